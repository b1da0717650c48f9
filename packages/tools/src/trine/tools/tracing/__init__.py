"""From events to files and from files to a timeline."""

from trine.tools.errors import TraceFileError
from trine.tools.tracing.chrome import write_timeline
from trine.tools.tracing.merge import merge
from trine.tools.tracing.rank_file import Header
from trine.tools.tracing.reader import RankTrace, read_rank_file, read_traces
from trine.tools.tracing.recorder import Recorder

__all__ = [
    "Header",
    "RankTrace",
    "Recorder",
    "TraceFileError",
    "merge",
    "read_rank_file",
    "read_traces",
    "write_timeline",
]

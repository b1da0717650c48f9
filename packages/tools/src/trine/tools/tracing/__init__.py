"""From events to files and from files to a timeline."""

from trine.tools.errors import TraceFileError
from trine.tools.tracing.chrome import write_timeline
from trine.tools.tracing.events import Events
from trine.tools.tracing.merge import merge
from trine.tools.tracing.perfetto import write_perfetto
from trine.tools.tracing.reader import RankTrace, read_rank_file, read_traces
from trine.tools.tracing.recorder import Recorder
from trine.tools.tracing.schema import ClockReading, End, Header

__all__ = [
    "ClockReading",
    "End",
    "Events",
    "Header",
    "RankTrace",
    "Recorder",
    "TraceFileError",
    "merge",
    "read_rank_file",
    "read_traces",
    "write_perfetto",
    "write_timeline",
]

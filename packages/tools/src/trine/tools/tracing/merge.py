"""One file per rank in, one timeline out."""

from __future__ import annotations

from pathlib import Path

from trine.tools.errors import TraceFileError
from trine.tools.text import printable
from trine.tools.tracing.chrome import write_timeline
from trine.tools.tracing.reader import RankTrace, rank_files, read_traces

__all__ = ["merge"]


def merge(path: Path, out: Path) -> list[RankTrace]:
    """Merge the traces of a run into one timeline, and return what was read.

    Args:
        path: the folder of a run, or one rank's file.
        out: the timeline, Chrome trace JSON; replaced if it exists.

    Raises:
        TraceFileError: if a trace cannot be read or the timeline cannot be written.
    """
    if out.resolve() in {file.resolve() for file in rank_files(path)}:
        raise TraceFileError(
            f"The timeline would take the place of a trace, {printable(str(out))}. "
            "Give it another name, for example timeline.json."
        )
    if out.exists() and not out.is_file():
        # A file would take its place: that of /dev/null, for who may write there.
        raise TraceFileError(
            f"The timeline cannot be written to {printable(str(out))}, which exists and is not "
            "a file. Give it another name, for example timeline.json."
        )
    traces = read_traces(path)
    write_timeline(traces, out)
    return traces

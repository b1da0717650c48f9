"""One file per rank in, one timeline out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from trine.tools.errors import TraceFileError
from trine.tools.text import printable
from trine.tools.tracing.chrome import write_timeline
from trine.tools.tracing.reader import RankTrace, rank_files, read_traces

__all__ = ["check_out", "merge"]


def merge(
    path: Path,
    out: Path,
    write: Callable[[Sequence[RankTrace], Path], None] = write_timeline,
) -> list[RankTrace]:
    """Merge the traces of a run into one timeline, and return what was read.

    Args:
        path: the folder of a run, or one rank's file.
        out: the timeline; replaced if it exists.
        write: `write_timeline` for Chrome trace JSON, `write_perfetto` for protobuf.

    Raises:
        TraceFileError: if a trace cannot be read or the timeline cannot be written.
    """
    check_out(rank_files(path), out, "timeline", "timeline.json")
    traces = read_traces(path)
    write(traces, out)
    return traces


def check_out(inputs: Iterable[Path], out: Path, what: str, name: str) -> None:
    """Check that a file made from traces takes the place of none of them.

    Args:
        inputs: the files that are read.
        out: what is to be written.
        what: one word for it.
        name: for example.

    Raises:
        TraceFileError: if it does, or is something else than a file.
    """
    if out.resolve() in {file.resolve() for file in inputs}:
        raise TraceFileError(
            f"The {what} would take the place of a trace, {printable(str(out))}. "
            f"Give it another name, for example {name}."
        )
    try:
        is_other = out.exists() and not out.is_file()
    except OSError as error:  # its name is longer than any there can be
        raise TraceFileError(
            f"The {what} cannot be written to {printable(str(out))}: {error.strerror or error}."
        ) from error
    if is_other:
        # A file would take its place: that of /dev/null, for who may write there.
        raise TraceFileError(
            f"The {what} cannot be written to {printable(str(out))}, which exists and is not "
            f"a file. Give it another name, for example {name}."
        )

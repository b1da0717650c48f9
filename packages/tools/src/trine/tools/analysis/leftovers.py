"""Read what a dead job left: every file that can be read, and why the others cannot."""

from __future__ import annotations

from pathlib import Path

from trine.tools.errors import TraceFileError
from trine.tools.sources import read
from trine.tools.text import format_ns, printable
from trine.tools.tracing.rank_file import rank_file_name
from trine.tools.tracing.reader import (
    APART_NS,
    RankTrace,
    last_ns,
    rank_files,
    read_rank_file,
)

__all__ = ["read_leftovers"]


def read_leftovers(path: Path) -> tuple[list[RankTrace], dict[str, str]]:
    """The recordings that can be read, and by file name why others cannot.

    A process that dies may leave an empty or damaged file. That is no reason to look at none.
    One that dies early leaves the file of the run before in its place: it is passed over where
    it had ended before others began, by the same clock.

    Raises:
        TraceFileError: if nothing can be read, or the files are not of one run.
    """
    traces, unreadable = _read_all(path)
    began: dict[str, int] = {}
    for trace in traces:
        header = trace.header
        began[header.clock] = max(header.perf_counter_ns, began.get(header.clock, 0))
    kept = []
    for trace in traces:
        before_ns = began[trace.header.clock] - last_ns(trace)
        if trace.end is None or before_ns <= APART_NS:
            kept.append(trace)
        else:
            name = rank_file_name(trace.header.rank)
            unreadable[name] = (
                f"{printable(str(path / name))} is of an earlier run: it ended "
                f"{format_ns(before_ns)} before others began."
            )
    return kept, unreadable


def _read_all(path: Path) -> tuple[list[RankTrace], dict[str, str]]:
    try:
        return read(path), {}
    except TraceFileError:
        if not path.is_dir():
            raise
        traces: dict[int, RankTrace] = {}
        unreadable: dict[str, str] = {}
        for file in rank_files(path):
            try:
                trace = read_rank_file(file)
            except TraceFileError as error:
                unreadable[file.name] = str(error)
            else:
                traces[trace.header.rank] = trace
        worlds = {trace.header.world_size for trace in traces.values()}
        if len(worlds) != 1 or len(traces) + len(unreadable) != len(rank_files(path)):
            raise
        return [traces[rank] for rank in sorted(traces)], unreadable

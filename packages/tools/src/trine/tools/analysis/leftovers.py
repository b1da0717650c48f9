"""Read what a dead job left: every file that can be read, and why the others cannot."""

from __future__ import annotations

from pathlib import Path

from trine.tools.errors import TraceFileError
from trine.tools.sources import read
from trine.tools.tracing.reader import RankTrace, rank_files, read_rank_file

__all__ = ["read_leftovers"]


def read_leftovers(path: Path) -> tuple[list[RankTrace], dict[str, str]]:
    """The recordings that can be read, and by file name why others cannot.

    A process that dies may leave an empty or damaged file. That is no reason to look at none.

    Raises:
        TraceFileError: if nothing can be read, or the files are not of one run.
    """
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

"""`read`: the recordings at a path, whoever wrote them, recognised by what is in the files."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final, cast

from trine.core.tracing import TraceEvent
from trine.tools.errors import TraceFileError
from trine.tools.sources.flight_recorder import (
    Entry,
    entries_of,
    flight_recorder_trace,
    is_flight_recorder,
)
from trine.tools.sources.json_members import members
from trine.tools.sources.kineto import is_kineto, kineto_events, kineto_trace
from trine.tools.sources.text import read_text
from trine.tools.text import printable
from trine.tools.tracing.rank_file import FORMAT
from trine.tools.tracing.reader import RankTrace, each_trace, rank_files, read_rank_file

__all__ = ["read", "read_each", "source_files"]

_HEAD_BYTES: Final = 512
_MAX_FILES: Final = 1 << 16
_MAX_RANKS: Final = 1 << 20
_GZIP: Final = b"\x1f\x8b"
_ARRAYS: Final = ("traceEvents", "entries")
_last_number = re.compile(r"(\d+)\D*$").search


def read(path: Path) -> list[RankTrace]:
    """The recordings at a path, in the order of their ranks.

    Recognised by their content are our own files, traces of torch.profiler (Chrome JSON, also
    compressed) and dumps of torch's flight recorder as JSON. In a folder our own files, where
    there are any, are all that is read.

    Args:
        path: a file, or a folder with one file for each rank. Ranks may be missing.

    Raises:
        TraceFileError: if there is nothing to read, a file is damaged or of a kind that is
            not read, or the files cannot belong to one run.
    """
    return sorted(read_each(path), key=lambda trace: trace.header.rank)


def read_each(path: Path) -> Iterator[RankTrace]:
    """The same one by one: of our own files only one is in memory at a time.

    They come in the order of the names of their files.

    Raises:
        TraceFileError: as `read` does, when it gets there.
    """
    files = source_files(path)
    if path.is_dir() and files == rank_files(path):
        yield from each_trace(path)
    else:
        yield from _read_files(files, path)


def _read_files(files: list[Path], path: Path) -> list[RankTrace]:
    traces: dict[int, RankTrace] = {}
    names: dict[int, str] = {}
    for file in files:
        trace, name = _read_file(file), printable(str(file))
        rank = trace.header.rank
        if rank in traces:
            raise TraceFileError(
                f"{printable(str(path))} holds two recordings of rank {rank}: {names[rank]} and "
                f"{name}. Keep one file for each rank."
            )
        traces[rank], names[rank] = trace, name
    return _of_one_run([traces[rank] for rank in sorted(traces)], path)


def source_files(path: Path) -> list[Path]:
    """The files that `read` reads.

    Raises:
        TraceFileError: if there is none.
    """
    found = rank_files(path)
    if found or not path.is_dir():
        return found
    try:
        files = sorted(file for file in path.iterdir() if file.is_file())
        found = [file for file in files[:_MAX_FILES] if _may_be_read(_head(file))]
    except OSError as error:
        raise _unreadable(path, error) from error
    if not found:
        raise TraceFileError(
            f"{printable(str(path))} holds no traces. Expected files named trace-rank00000.trine "
            "and so on, as a Recorder writes them, or one file for each rank of torch.profiler "
            "or of torch's flight recorder."
        )
    return found


def _of_one_run(traces: list[RankTrace], path: Path) -> list[RankTrace]:
    sources = {trace.header.environment.get("source") for trace in traces}
    sizes = {trace.header.world_size for trace in traces}
    if sources == {"flight recorder"}:
        # A dump need not say how many ranks there are.
        most = max(sizes)
        return [replace(each, header=replace(each.header, world_size=most)) for each in traces]
    if len(sources) > 1 or len(sizes) > 1:
        raise TraceFileError(
            f"{printable(str(path))} holds files of different runs or kinds. Keep the files of "
            "one run only, of one kind."
        )
    return traces


def _read_file(path: Path) -> RankTrace:
    name = printable(str(path))
    try:
        if not path.is_file():  # the reader of rank files says what it is
            return read_rank_file(path)
        head = _head(path)
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from error
    if _is_pickle(head):
        raise TraceFileError(
            f"{name} is a pickle, as torch's flight recorder writes its dumps. It is not read, "
            "since a pickle can run any code. Have each rank write JSON instead, to a file whose "
            "name ends in its rank: torch._C._distributed_c10d has _dump_nccl_trace_json() for "
            "NCCL and _dump_fr_trace_json() for gloo."
        )
    if FORMAT.encode() in head or not _may_be_read(head):
        return read_rank_file(path)
    return _read_json(path, name)


def _read_json(path: Path, name: str) -> RankTrace:
    """What a JSON file holds; its events are never all in memory at once as JSON has them."""
    text = read_text(path)
    about: dict[str, object] = {}
    events: list[TraceEvent] | None = None
    entries: list[Entry] | None = None
    try:
        for key, value in members(text, _ARRAYS):
            if key == "traceEvents":
                events = kineto_events(cast("Iterator[object]", value), name)
            elif key == "entries":
                entries = entries_of(cast("Iterator[object]", value), name)
            else:
                about[key] = value
    except ValueError as error:
        raise TraceFileError(
            f"{name} is not a JSON object, or is cut off: {printable(str(error))}."
        ) from error
    if events is not None and is_kineto(about):
        return kineto_trace(events, about, name)
    if entries is not None and is_flight_recorder(about):
        return flight_recorder_trace(entries, about, _rank_in(path))
    raise TraceFileError(
        f"{name} is neither a recording of a rank, nor a trace of torch.profiler, nor a dump of "
        "torch's flight recorder."
    )


def _rank_in(path: Path) -> int:
    """The rank in the name of a file.

    Raises:
        TraceFileError: if there is none.
    """
    stem = path.name
    while (shorter := Path(stem).stem) != stem:
        stem = shorter
    found = _last_number(stem)
    if found is None or len(found[1]) > 7 or int(found[1]) >= _MAX_RANKS:
        raise TraceFileError(
            f"{printable(str(path))} is a dump of torch's flight recorder, which does not say of "
            "which rank. Give it a name that ends in the rank, such as dump-rank3.json."
        )
    return int(found[1])


def _head(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(_HEAD_BYTES)


def _may_be_read(head: bytes) -> bool:
    return head.startswith(_GZIP) or head.lstrip()[:1] in (b"{", b"[") or _is_pickle(head)


def _is_pickle(head: bytes) -> bool:
    """Whether it begins as a pickle of protocol 2 or later does."""
    return len(head) > 1 and head[0] == 0x80 and 2 <= head[1] <= 5


def _unreadable(path: Path, error: Exception) -> TraceFileError:
    said = (error.strerror if isinstance(error, OSError) else None) or error
    return TraceFileError(f"{printable(str(path))} cannot be read: {said}.")

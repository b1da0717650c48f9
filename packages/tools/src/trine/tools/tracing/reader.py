"""Read the files that recorders wrote, believing nothing in them unchecked.

Every way in which a file can be wrong ends in a `TraceFileError` that names the file,
the line and the fault.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

from trine.core.tracing import TraceEvent
from trine.tools.errors import TraceFileError
from trine.tools.text import printable
from trine.tools.tracing.rank_file import (
    MAX_LINE_BYTES,
    Header,
    decode_event,
    decode_header,
)

__all__ = ["MAX_FILE_BYTES", "RankTrace", "rank_files", "read_rank_file", "read_traces"]

MAX_FILE_BYTES: Final = 4 << 30


@dataclass(frozen=True)
class RankTrace:
    """What one rank recorded.

    Attributes:
        header: where and when.
        events: in the order in which they were reported, which is that of their ends
            on each thread.
    """

    header: Header
    events: list[TraceEvent]


def read_traces(path: Path) -> list[RankTrace]:
    """The traces of a run, in the order of their ranks.

    Args:
        path: the folder of a run, or one rank's file. Ranks may be missing; whether
            all are there is seen by comparing with `header.world_size`.

    Raises:
        TraceFileError: if there is nothing to read, a file is damaged, or the files
            cannot belong to one run.
    """
    found = rank_files(path)
    if not found:
        raise TraceFileError(
            f"{_name(path)} holds no traces. Expected files named trace-rank00000.jsonl and so "
            "on, as a Recorder writes them."
        )
    traces: dict[int, RankTrace] = {}
    names: dict[int, str] = {}
    for file in found:
        trace = read_rank_file(file)
        rank, world_size = trace.header.rank, trace.header.world_size
        first = next(iter(traces), rank)
        if rank in traces:
            raise TraceFileError(
                f"{_name(path)} holds two traces of rank {rank}: {names[rank]} and "
                f"{_name(file)}. Keep the files of one run only."
            )
        if traces and traces[first].header.world_size != world_size:
            raise TraceFileError(
                f"{_name(path)} holds files of different runs: {names[first]} is from "
                f"{traces[first].header.world_size} ranks, {_name(file)} from {world_size}. "
                "Keep the files of one run only."
            )
        traces[rank] = trace
        names[rank] = _name(file)
    return [traces[rank] for rank in sorted(traces)]


def rank_files(path: Path) -> list[Path]:
    """The files that hold the traces of a run: those of its folder, or the one given."""
    return sorted(path.glob("trace-rank*.jsonl")) if path.is_dir() else [path]


def read_rank_file(path: Path) -> RankTrace:
    """The trace that one file holds.

    Raises:
        TraceFileError: if it is missing, cannot be read, is incomplete, or is not the
            trace of a rank in a version known here.
    """
    try:
        # Before opening: a pipe would block, and a device would never end.
        if not path.exists():
            raise TraceFileError(f"{_name(path)} does not exist.")
        if not path.is_file():
            raise TraceFileError(f"{_name(path)} is neither a file nor a folder.")
        if (size := path.stat().st_size) > MAX_FILE_BYTES:
            raise TraceFileError(
                f"{_name(path)} has {size} bytes; the most that is read is {MAX_FILE_BYTES}. "
                "Record fewer steps, or give the Recorder a smaller capacity."
            )
        with path.open("rb") as file:
            return _read(path, file)
    except OSError as error:
        raise _unreadable(path, error) from error
    except ValueError as error:  # from the path itself: a null byte in it
        raise TraceFileError(f"{_name(path)} cannot be read: {error}.") from error


def _read(path: Path, file: BinaryIO) -> RankTrace:
    header: Header | None = None
    events: list[TraceEvent] = []
    number = 0
    while raw := file.readline(MAX_LINE_BYTES + 1):
        number += 1
        if len(raw) > MAX_LINE_BYTES:
            raise _bad_line(path, number, f"it is longer than {MAX_LINE_BYTES} bytes")
        if not raw.endswith(b"\n") and header is not None:
            break  # cut off in the middle of an event: told below, with the counts
        try:
            line = raw.decode("utf-8")
            if header is None:
                header = decode_header(line)
            else:
                events.append(decode_event(line))
        except UnicodeDecodeError as error:
            raise _bad_line(path, number, f"byte {error.start + 1} of it is not UTF-8") from error
        except ValueError as error:
            raise _bad_line(path, number, str(error)) from error
    if header is None:
        raise TraceFileError(f"{_name(path)} is empty.")
    if len(events) != header.events:
        fault = "ends early" if len(events) < header.events else "has too many lines"
        raise TraceFileError(
            f"{_name(path)} {fault}: its header announces {header.events} events, and it holds "
            f"{len(events)}. Copy it again from where it was recorded."
        )
    return RankTrace(header, events)


def _name(path: Path) -> str:
    return printable(str(path))


def _bad_line(path: Path, number: int, fault: str) -> TraceFileError:
    return TraceFileError(f"{_name(path)} cannot be read, line {number}: {printable(fault)}.")


def _unreadable(path: Path, error: OSError) -> TraceFileError:
    return TraceFileError(f"{_name(path)} cannot be read: {error.strerror or error}.")

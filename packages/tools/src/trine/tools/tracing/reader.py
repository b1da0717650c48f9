"""Read the files that recorders wrote, believing nothing in them unchecked.

Every way in which a file can be wrong ends in a `TraceFileError` that names the file, the
record and the fault. One way is none: the file of a process that was killed, which ends
without an end, or within a record. It is read up to its last whole record.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

from trine.tools.errors import TraceFileError
from trine.tools.text import printable
from trine.tools.tracing.events import Events
from trine.tools.tracing.rank_file import MAX_HEAD_BYTES, Decoder
from trine.tools.tracing.schema import ClockReading, End, Header

__all__ = [
    "APART_NS",
    "MAX_FILE_BYTES",
    "RankTrace",
    "each_trace",
    "last_ns",
    "rank_files",
    "read_rank_file",
    "read_traces",
]

MAX_FILE_BYTES: Final = 4 << 30
APART_NS: Final = 10_000_000_000
"""Ranks of one run begin to record before any of them has been done for so long."""


@dataclass(frozen=True)
class RankTrace:
    """What one rank recorded.

    Attributes:
        header: where and when.
        events: in the order in which they were reported, which is that of their ends
            on each thread.
        dropped: how many events did not fit.
        readings: how far the rank's clock was from rank 0's, in the order of time.
        end: how the recording ended; None if its process was killed.
    """

    header: Header
    events: Events
    dropped: int = 0
    readings: tuple[ClockReading, ...] = ()
    end: End | None = None


def read_traces(path: Path) -> list[RankTrace]:
    """The traces of a run, in the order of their ranks.

    Args:
        path: the folder of a run, or one rank's file. Ranks may be missing; whether
            all are there is seen by comparing with `header.world_size`.

    Raises:
        TraceFileError: if there is nothing to read, a file is damaged, or the files
            cannot belong to one run.
    """
    return sorted(each_trace(path), key=lambda trace: trace.header.rank)


def each_trace(path: Path) -> Iterator[RankTrace]:
    """The traces of a run one by one, so that they need not all be in memory.

    They come in the order of the names of their files.

    Args:
        path: see `read_traces`.

    Raises:
        TraceFileError: as `read_traces` does, when it gets there.
    """
    found = rank_files(path)
    if not found:
        raise TraceFileError(
            f"{_name(path)} holds no traces. Expected files named trace-rank00000.trine and so "
            "on, as a Recorder writes them."
        )
    names: dict[int, str] = {}
    lives: list[_Life] = []
    of_run = -1
    for file in found:
        trace = read_rank_file(file)
        rank, world_size = trace.header.rank, trace.header.world_size
        if rank in names:
            raise TraceFileError(
                f"{_name(path)} holds two traces of rank {rank}: {names[rank]} and "
                f"{_name(file)}. Keep the files of one run only."
            )
        if names and of_run != world_size:
            raise TraceFileError(
                f"{_name(path)} holds files of different runs: {next(iter(names.values()))} is "
                f"from {of_run} ranks, {_name(file)} from {world_size}. "
                "Keep the files of one run only."
            )
        names[rank], of_run = _name(file), world_size
        lives.append(_Life(names[rank], trace))
        for other in lives:
            for first, second in ((other, lives[-1]), (lives[-1], other)):
                if first.over_before(second):
                    raise TraceFileError(
                        f"{_name(path)} holds files of different runs: {first.name} ended long "
                        f"before {second.name} began. Keep the files of one run only."
                    )
        yield trace


class _Life:
    """From when to when a rank recorded, by its own clock."""

    def __init__(self, name: str, trace: RankTrace) -> None:
        self.name = name
        self._clock = trace.header.clock
        self._began_ns = trace.header.perf_counter_ns
        self._ended_ns = None if trace.end is None else last_ns(trace)

    def over_before(self, other: _Life) -> bool:
        """Whether it ended so long before the other began that they are not of one run."""
        if self._ended_ns is None or self._clock != other._clock:
            return False
        return other._began_ns - self._ended_ns > APART_NS


def last_ns(trace: RankTrace) -> int:
    """The last moment that a recording tells of."""
    ends, began_ns = trace.events.end_ns, trace.header.perf_counter_ns
    return max(began_ns, int(ends.max())) if len(ends) else began_ns


def rank_files(path: Path) -> list[Path]:
    """The files that hold the traces of a run: those of its folder, or the one given."""
    return sorted(path.glob("trace-rank*.trine")) if path.is_dir() else [path]


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
    decoder = Decoder()
    size = os.fstat(file.fileno()).st_size
    at = number = 0
    while line := file.readline(MAX_HEAD_BYTES + 1):
        number += 1
        at += len(line)
        if not line.endswith(b"\n"):
            if decoder.header is not None and len(line) <= MAX_HEAD_BYTES:
                break  # the process was killed as it wrote this
            fault = f"its line does not end within {MAX_HEAD_BYTES} bytes"
            raise _bad_record(path, number, fault)
        try:
            what, head, nbytes = decoder.head(line)
            # Before memory is taken for it. A record that is not whole is not read either.
            at += nbytes
            if at > size:
                break
            body = bytearray(nbytes)
            if file.readinto(body) != nbytes:  # type: ignore[attr-defined]  # typeshed lacks it
                break
            decoder.take(what, head, body)
        except ValueError as error:
            raise _bad_record(path, number, str(error)) from error
    if decoder.header is None:
        raise TraceFileError(f"{_name(path)} is {'empty' if not number else 'cut in its header'}.")
    return RankTrace(
        decoder.header,
        Events.join(decoder.runs, decoder.texts, decoder.threads, decoder.labels),
        decoder.dropped,
        tuple(decoder.readings),
        decoder.end,
    )


def _name(path: Path) -> str:
    return printable(str(path))


def _bad_record(path: Path, number: int, fault: str) -> TraceFileError:
    return TraceFileError(f"{_name(path)} cannot be read, record {number}: {printable(fault)}.")


def _unreadable(path: Path, error: OSError) -> TraceFileError:
    return TraceFileError(f"{_name(path)} cannot be read: {error.strerror or error}.")

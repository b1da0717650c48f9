"""A rank's file while it grows: whole records at its end, the oldest gone when it is full.

Every moment leaves a file that can be read: records are appended whole, and a shorter file
takes the name of a full one only once it is complete.
"""

from __future__ import annotations

import errno
import os
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from trine.core.tracing import TraceEvent
from trine.tools.tracing.rank_file import Encoder
from trine.tools.tracing.schema import ClockReading, Header, Reason

__all__ = ["GrowingFile"]

_COPY_BYTES: Final = 1 << 20


class GrowingFile:
    """The file of one recording, opened for writing.

    Args:
        path: where; what is there is replaced.
        header: of the recording.
        max_bytes: when the file would become longer, its older half is left out.

    Attributes:
        left_out: how many events were in the file and are not any more.

    Raises:
        OSError: if the file cannot be made. All other methods raise it as well.
    """

    def __init__(self, path: Path, header: Header, max_bytes: int) -> None:
        self._path = path
        self._encoder = Encoder()
        self._head = self._encoder.header(header)
        self._readings: list[tuple[int, bytes]] = []  # where each stands, and the record
        self._runs: deque[tuple[int, int]] = deque()  # where each begins, and its events
        self._max_bytes = self._limit = max_bytes
        self._size = 0
        self.left_out = 0
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        self._file = _create(path)
        try:
            self._append(self._head)
        except OSError:
            self.close()
            path.unlink(missing_ok=True)  # an empty file would pass for a recording
            raise

    def add_events(self, events: Sequence[TraceEvent], dropped: int) -> None:
        """Append a run of events.

        Args:
            events: at most `RUN_EVENTS`.
            dropped: how many never reached this file.
        """
        record = self._encoder.events(events, dropped + self.left_out)
        self._runs.append((self._size, len(events)))
        self._append(record)
        if self._size > self._limit:
            self._leave_out_older_half(dropped)

    def add_reading(self, reading: ClockReading) -> None:
        """Append a reading of the clocks, which stays whatever is left out."""
        record = self._encoder.clock(reading)
        self._readings.append((self._size, record))
        self._append(record)

    def finish(self, dropped: int, reason: Reason) -> None:
        """Write the last record."""
        self._append(self._encoder.end(dropped + self.left_out, reason))
        # The last one to tell that somebody deleted it, or put another in its place.
        if not os.path.samestat(self._path.stat(), os.fstat(self._file)):
            raise FileExistsError(errno.EEXIST, "another recording has taken its place")

    def close(self) -> None:
        """Close the file, if it is open."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _append(self, record: bytes) -> None:
        try:
            _write(self._file, record)
        except OSError:
            # Half a record may be there; what comes after it could not be read.
            os.ftruncate(self._file, self._size)
            raise
        self._size += len(record)

    def _leave_out_older_half(self, dropped: int) -> None:
        end, keep_from = self._size, self._size - self._max_bytes // 2
        left_out = 0
        while self._runs and self._runs[0][0] < keep_from:
            left_out += self._runs.popleft()[1]
        start = self._runs[0][0] if self._runs else end
        self.left_out += left_out
        self._encoder.held -= left_out
        part = self._path.with_name(f".{self._path.name}.{os.getpid()}.part")
        part.unlink(missing_ok=True)
        new = _create(part)
        try:
            tables = self._encoder.tables(dropped + self.left_out)
            readings = [record for at, record in self._readings if at < start]
            kept = b"".join((self._head, tables, *readings))
            _write(new, kept)
            for at in range(start, end, _COPY_BYTES):
                _write(new, os.pread(self._file, min(_COPY_BYTES, end - at), at))
            part.replace(self._path)
        except BaseException:
            os.close(new)
            part.unlink(missing_ok=True)
            raise
        os.close(self._file)
        self._file = new
        self._size = len(kept) + end - start
        self._runs = deque((at - start + len(kept), count) for at, count in self._runs)
        self._readings = [(max(0, at - start + len(kept)), record) for at, record in self._readings]
        # Tables alone may be longer than was asked for; then there is nothing to gain by
        # doing this again at once.
        self._limit = max(self._max_bytes, 2 * self._size)


def _create(path: Path) -> int:
    # Opens nothing that exists, so a planted link cannot lead elsewhere.
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)


def _write(file: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]

"""Record a rank's events while it trains: a bounded ring, and a thread that empties it.

The hot path is `Recorder.record`: one append and one tick. Everything that costs, from
formatting to the disk, happens on a thread of its own, a few events at a time: it shares
the interpreter with the training, which should never have to wait long for it.

Note [Events die young]: the collector of Python's cycles looks through objects that live on
and, after enough of them, through all of torch's: 100 ms for each 100,000 events that wait in
memory. So the thread comes whenever some 300 have come together, 50 times a second at most.
Most are gone before the collector has seen them, which costs less than any one look at them.

Note [What is left of a recording]: the file grows as training goes on, so however a process
ends, what was recorded up to a moment before is in its file. Closing adds the last moment
and how it ended. `exits` closes what nobody closed.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

from trine.core.tracing import TraceEvent
from trine.tools.errors import TraceFileError
from trine.tools.tracing import exits
from trine.tools.tracing.environment import make_header
from trine.tools.tracing.growing_file import GrowingFile
from trine.tools.tracing.rank_file import rank_file_name
from trine.tools.tracing.schema import ClockReading, Reason

__all__ = ["DEFAULT_CAPACITY", "DEFAULT_MAX_BYTES", "Recorder"]

DEFAULT_CAPACITY: Final = 200_000
DEFAULT_MAX_BYTES: Final = 512 << 20

_MIN_BYTES: Final = 64 << 10
_AT_A_TIME: Final = 300  # see Note [Events die young]
_OFTEN_S: Final = 0.02
_RARE_S: Final = 0.25
_CHUNK: Final = 512  # events formatted before the training gets its turn: 0.5 ms
_PAUSE_S: Final = 0.001
# A disk that hangs must not keep a process from ending, least of all one that was told to.
_CLOSE_S: Final = 30.0
_TERMINATED_S: Final = 5.0

_log = logging.getLogger(__name__)


class Recorder:
    """A trace sink that writes the last events to one file per rank, as they come.

    Its thread writes several times a second, so a process that is killed leaves all but
    the last quarter of a second. When the file is full its older half is left out: the end
    of a run is what one looks for. A crash, a hang and the steady state are all there, and
    the first steps, which warm up, are the ones to lose. What was lost is counted.

    Once it is made, nothing that goes wrong with the file disturbs the training: it is said
    once in the log, and recording ends.

    Args:
        directory: where the file goes; made if it is not there. A file of this rank that
            is there is replaced.
        rank: this rank.
        world_size: how many ranks record.
        capacity: how many events may wait in memory to be written, about 300 bytes each;
            a new one pushes out the oldest one.
        max_bytes: how long the file may become; an event takes about 80 bytes.

    Attributes:
        path: the file.

    Raises:
        ValueError: if a number is out of range.
        TraceFileError: if the file cannot be made.

    Example:
        >>> from pathlib import Path
        >>> from tempfile import TemporaryDirectory
        >>> from trine.core import tracing
        >>> from trine.tools.tracing import Recorder
        >>> with TemporaryDirectory() as folder:
        ...     recorder = Recorder(Path(folder), rank=0, world_size=1)
        ...     tracing.add_sink(recorder)
        ...     with tracing.span("load batch", category="io"):
        ...         pass
        ...     tracing.remove_sink(recorder)
        ...     recorder.close().name
        'trace-rank00000.trine'
    """

    def __init__(
        self,
        directory: Path,
        *,
        rank: int,
        world_size: int,
        capacity: int = DEFAULT_CAPACITY,
        max_bytes: int = DEFAULT_MAX_BYTES,
    ) -> None:
        if not 0 <= rank < world_size:
            raise ValueError(f"rank {rank} does not fit a world of {world_size} ranks.")
        if capacity < 1:
            raise ValueError(f"capacity is {capacity}; a recorder keeps at least one event.")
        if max_bytes < _MIN_BYTES:
            raise ValueError(f"max_bytes is {max_bytes}; the least is {_MIN_BYTES}.")
        self.path = Path(directory) / rank_file_name(rank)
        try:
            # A pipe, since a signal handler may write to it whatever it interrupted.
            self._wake_from, self._wake_to = os.pipe()
            self._file = GrowingFile(self.path, make_header(rank, world_size), max_bytes)
        except OSError as error:
            raise TraceFileError(
                f"The trace of rank {rank} cannot be written to {self.path}: "
                f"{error.strerror or error}."
            ) from error
        self._rank = rank
        self._events: deque[TraceEvent] = deque(maxlen=capacity)
        self._capacity = capacity
        self._readings: deque[ClockReading] = deque()
        self._append: Callable[[TraceEvent], object] = self._events.append
        # A counter that threads may advance without a lock; `seen += 1` would lose some.
        self._tick: Callable[[], object]
        self._tick = self._ticks = itertools.count(1).__next__
        self._looks = 0  # ticks that were no events
        self._taken = 0
        self._lost = 0
        self._reason: Reason | None = None
        os.set_blocking(self._wake_to, False)
        self._thread = threading.Thread(target=self._run, name="trine recorder", daemon=True)
        self._thread.start()
        self._leave = exits.watch(self.close, self.forget, self._wake_to)

    def record(self, event: TraceEvent) -> None:
        """Take one event."""
        self._append(event)
        self._tick()

    def add_reading(self, reading: ClockReading) -> None:
        """Write down how far this rank's clock is from rank 0's."""
        self._readings.append(reading)

    def close(self, reason: Reason = "closed") -> Path:
        """Write what is left and return the file's path. A second call changes nothing.

        Events recorded from now on are lost; call `remove_sink` first.
        """
        first = self._reason is None
        if first:
            self._take_no_more()
            self._reason = reason
            self._wake()
        seconds = _TERMINATED_S if reason == "signal" else _CLOSE_S
        self._thread.join(seconds)
        hangs = self._thread.is_alive()
        if hangs:
            self._give_up(f"nothing could be written for {seconds:.0f} s")
        if first and self._leave() and not hangs:
            os.close(self._wake_from)
            os.close(self._wake_to)
        return self.path

    def forget(self) -> None:
        """In a child that was forked: the file and its thread are the parent's."""
        self._take_no_more()
        self._events.clear()
        self._reason = "exit"

    def _run(self) -> None:
        try:
            sleep_s = _RARE_S
            while self._reason is None:
                woken_by = self._sleep(sleep_s)
                # So long that as many as are wanted at a time would have come.
                sleep_s *= _AT_A_TIME / max(1, len(self._events))
                sleep_s = max(_OFTEN_S, min(sleep_s, _RARE_S))
                self._drain()
                if woken_by == exits.TERMINATE:
                    exits.after_grace(self._wake_from, self._finish)
            self._drain()
            self._finish(self._reason)
        except OSError as error:
            self._give_up(error.strerror or str(error))
        except Exception as error:  # ours to mend, and no reason to disturb the training
            self._give_up(f"{type(error).__name__}: {error}")
        finally:
            self._file.close()

    def _sleep(self, seconds: float) -> bytes:
        return exits.read_byte(self._wake_from, seconds)

    def _wake(self) -> None:
        with suppress(BlockingIOError):  # it is full of reasons to wake up
            os.write(self._wake_to, exits.CLOSE)

    def _drain(self) -> None:
        """Write all that waits, a chunk at a time."""
        while self._readings:
            self._file.add_reading(self._readings.popleft())
        while self._events:
            chunk = [self._events.popleft() for _ in range(min(_CHUNK, len(self._events)))]
            self._taken += len(chunk)
            self._write(chunk)
            if self._reason is None and len(self._events) < self._capacity // 2:
                time.sleep(_PAUSE_S)

    def _write(self, events: list[TraceEvent]) -> None:
        try:
            self._file.add_events(events, self._dropped())
        except OSError:
            raise
        except Exception:  # somebody reported what is no event; the others are worth keeping
            if len(events) == 1:
                self._lost += 1
            else:
                for event in events:
                    self._write([event])

    def _finish(self, reason: Reason) -> None:
        self._file.finish(self._dropped(), reason)

    def _dropped(self) -> int:
        """How many events were pushed out of memory before they were written."""
        self._looks += 1
        seen = self._ticks() - self._looks
        # An event may be there that has not ticked yet.
        return max(0, seen - self._taken - len(self._events)) + self._lost

    def _give_up(self, why: str) -> None:
        self._take_no_more()
        self._events.clear()
        _log.warning(
            "The trace of rank %d is not complete. Writing %s failed: %s. Training goes on "
            "without it.",
            self._rank,
            self.path,
            why,
        )

    def _take_no_more(self) -> None:
        # Not by removing the sink: its owner does that, and a forked child must not wait for
        # the lock that takes.
        self._append = _ignore
        self._tick = _no_tick


def _ignore(event: TraceEvent) -> None:
    pass


def _no_tick() -> None:
    pass

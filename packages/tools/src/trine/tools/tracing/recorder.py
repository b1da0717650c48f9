"""Keep a rank's events in memory and write them to its file at the end.

The hot path is `Recorder.record`: one append and one tick. Everything that costs,
from formatting to the disk, waits for `close`.
"""

from __future__ import annotations

import itertools
import os
import platform
import socket
from collections import deque
from importlib.metadata import version
from pathlib import Path
from time import perf_counter_ns, time_ns
from typing import Final

from trine.core.tracing import TraceEvent
from trine.tools.errors import TraceFileError
from trine.tools.tracing.rank_file import RUN_EVENTS, Encoder, rank_file_name
from trine.tools.tracing.schema import Header
from trine.tools.tracing.write import written_beside

__all__ = ["DEFAULT_CAPACITY", "Recorder"]

DEFAULT_CAPACITY: Final = 1_000_000


class Recorder:
    """A trace sink that keeps the last events and writes them to one file per rank.

    When it is full, each new event pushes out the oldest one. The end of a run is
    what one looks for: a crash, a hang and the steady state are all there, and the
    first steps, which warm up, are the ones to lose. What was lost is counted.

    Args:
        directory: where the file goes; made by `close` if it is not there.
        rank: this rank.
        world_size: how many ranks record.
        capacity: how many events to keep, about 300 bytes of memory each.

    Raises:
        ValueError: if a number is out of range.

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
        self, directory: Path, *, rank: int, world_size: int, capacity: int = DEFAULT_CAPACITY
    ) -> None:
        if not 0 <= rank < world_size:
            raise ValueError(f"rank {rank} does not fit a world of {world_size} ranks.")
        if capacity < 1:
            raise ValueError(f"capacity is {capacity}; a recorder keeps at least one event.")
        self.path = Path(directory) / rank_file_name(rank)
        self._rank = rank
        self._world_size = world_size
        self._events: deque[TraceEvent] = deque(maxlen=capacity)
        self._append = self._events.append
        # A counter that threads may advance without a lock; `seen += 1` would lose some.
        self._tick = itertools.count(1).__next__
        self._closed = False

    def record(self, event: TraceEvent) -> None:
        """Keep one event."""
        self._append(event)
        self._tick()

    def close(self) -> Path:
        """Write the file and return its path. A second call changes nothing.

        Events recorded from now on are lost; call `remove_sink` first. The file is
        written under another name and renamed once it is complete.

        Raises:
            TraceFileError: if it cannot be written.
        """
        if self._closed:
            return self.path
        events = list(self._events)
        dropped = self._tick() - 1 - len(events)
        encoder = Encoder()
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with written_beside(self.path) as file:
                file.write(encoder.header(self._header()))
                for first in range(0, len(events), RUN_EVENTS):
                    file.write(encoder.events(events[first : first + RUN_EVENTS], dropped))
                file.write(encoder.end(dropped, "closed"))
        except OSError as error:
            raise TraceFileError(
                f"The trace of rank {self._rank} cannot be written to {self.path}: "
                f"{error.strerror or error}."
            ) from error
        self._closed = True
        self._events.clear()
        return self.path

    def _header(self) -> Header:
        before = perf_counter_ns()
        unix_ns = time_ns()
        after = perf_counter_ns()
        host = socket.gethostname()
        return Header(
            rank=self._rank,
            world_size=self._world_size,
            host=host,
            clock=_clock_name() or host,
            pid=os.getpid(),
            python=platform.python_version(),
            torch=version("torch"),
            perf_counter_ns=(before + after) // 2,
            unix_ns=unix_ns,
        )


def _clock_name() -> str:
    # On Linux the monotonic clock starts with the kernel, so containers of one machine
    # share it whatever their host names are, and two machines never do.
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""

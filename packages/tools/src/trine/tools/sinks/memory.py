"""How much of the host's memory the process uses, as a counter at the ends of spans."""

from __future__ import annotations

import os
from pathlib import Path
from time import perf_counter_ns
from typing import Final

from trine.core import tracing
from trine.core.tracing import TraceEvent

__all__ = ["ResidentMemory"]

_STATM: Final = Path("/proc/self/statm")
_CATEGORIES: Final = frozenset({"step", "compute", "io"})


class ResidentMemory:
    """A sink that reports memory to all sinks, and keeps nothing itself.

    Whenever a span of a step, of computation or of data loading ends, it reports the counter
    `process.resident`, the process's memory on the host: what no count of tensors knows,
    such as that of libraries and of data loading. Where there is no `/proc` it does nothing.
    Tensors are reported by the engine and by `trine.tools.profile(memory=True)`.

    Args:
        interval_ns: the least time between two looks; one takes about 10 us.

    Raises:
        ValueError: if it is negative.
    """

    def __init__(self, interval_ns: int = 1_000_000) -> None:
        if interval_ns < 0:
            raise ValueError(f"interval_ns is {interval_ns}; expected 0 or more.")
        self._interval_ns = interval_ns
        self._next_ns = 0
        self._is_there = _STATM.exists()
        self._page = os.sysconf("SC_PAGE_SIZE")

    def record(self, event: TraceEvent) -> None:
        """Look, if it is time."""
        if event.kind != "span" or event.category not in _CATEGORIES or not self._is_there:
            return
        now = perf_counter_ns()
        if now < self._next_ns:
            return
        self._next_ns = now + self._interval_ns
        pages = int(_STATM.read_bytes().split()[1])
        tracing.counter("process.resident", pages * self._page, "mem")

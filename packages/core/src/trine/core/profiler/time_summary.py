"""TimeSummary: how long each named thing took, on the host and on the device.

Host times are added on the thread that reports them. Device times are pairs of events,
read once the device has passed them: reporting never waits for the device, except for
the oldest pair when too many are waiting to be read.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from contextlib import AbstractContextManager, nullcontext
from time import perf_counter_ns
from types import TracebackType
from typing import Protocol, Self

from trine.core.devices import Device, Event, get_device
from trine.core.profiler.inbox import Inbox
from trine.core.profiler.statistics import DictSummary

__all__ = ["Report", "TimeSummary", "get_time_summary"]


class Report(Protocol):
    """A measurement that has begun; a `with` block that is timed is given one."""

    def defer(self) -> None:
        """Do not stop at the end of the block: `complete` will be called later."""

    def complete(self) -> None:
        """Stop now and count the time. A second call changes nothing."""


class _Timing:
    """The report that counts, and the context manager around its block."""

    __slots__ = ("_begin_event", "_begin_ns", "_deferred", "_device", "_done", "_summary", "_tag")

    def __init__(self, summary: TimeSummary, tag: str, device: Device | None) -> None:
        self._summary = summary
        self._tag = tag
        self._device = device
        self._begin_event: Event | None = None
        self._deferred = False
        self._done = False

    def __enter__(self) -> Self:
        if self._device is not None:
            self._begin_event = self._device.event(timing=True)
            self._begin_event.record()
        self._begin_ns = perf_counter_ns()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if not self._deferred:
            self.complete()

    def defer(self) -> None:
        self._deferred = True

    def complete(self) -> None:
        end_ns = perf_counter_ns()
        if self._done:
            return
        self._done = True
        self._summary.add(self._tag, (end_ns - self._begin_ns) / 1e9)
        if self._device is not None and self._begin_event is not None:
            end_event = self._device.event(timing=True)
            end_event.record()
            self._summary._add_events(f"{self._tag}.cuda", self._begin_event, end_event)


class TimeSummary:
    """Mean, deviation, minimum and maximum of the times reported under each name.

    May be used from any thread. Processes forked from this one report into it too, if it
    was initialized before they were made; such a process can report, but not read. A
    report that finds their pipe full (64 KiB on Linux) is dropped: workers never wait here.

    Args:
        max_queue_size: how many device times may wait to be read. One more waits, on the
            host, until the oldest of them has been passed by the device.
        auto_init: listen to processes forked from now on; without it, call `initialize`.
    """

    def __init__(self, *, max_queue_size: int = 1000, auto_init: bool = True) -> None:
        if max_queue_size < 1:
            raise ValueError(f"max_queue_size={max_queue_size}: at least one report must fit.")
        self._totals = _Totals()
        self._owner = os.getpid()
        self._inbox: Inbox | None = None
        self._close_inbox: weakref.finalize[[], TimeSummary] | None = None
        self._max_queue_size = max_queue_size
        self._waiting: deque[tuple[str, Event, Event]] = deque()
        self._waiting_lock = threading.Lock()
        if auto_init:
            self.initialize()

    def initialize(self) -> None:
        """Listen to processes forked from now on; a second call changes nothing.

        Raises:
            RuntimeError: in another process than the one that made this summary.
        """
        self._check_owner("initialize it")
        if self._inbox is None:
            # Neither the inbox nor its thread may keep this object alive.
            self._inbox = Inbox(self._totals.add)
            self._close_inbox = weakref.finalize(self, self._inbox.close)

    def finalize(self) -> None:
        """Stop listening to other processes. What was reported stays, and more can be added.

        Called for you when the summary is no longer used, and at the end of the process.
        """
        if self._close_inbox is not None and os.getpid() == self._owner:
            self._close_inbox()
            self._inbox = self._close_inbox = None

    def synchronize(self) -> None:
        """Wait until every report made so far is counted, those of the device included."""
        self._check_owner("read it")
        if self._inbox is not None:
            self._inbox.drain()
        self._read_events(wait_for=self._max_queue_size)

    def add(self, name: str, value: float) -> None:
        """Count one value, in seconds if it is a time.

        Raises:
            RuntimeError: in a process forked before this summary was initialized.
        """
        if os.getpid() == self._owner:
            self._totals.add(name, value)
        elif self._inbox is not None:
            self._inbox.send(name, value)
        else:
            self._check_owner("report into it")

    def summary(
        self, clear: bool = False
    ) -> AbstractContextManager[tuple[DictSummary, dict[str, float]]]:
        """What was reported so far, for a `with` block.

        Device times that the device has not reached yet are left for the next call;
        `synchronize` first to have them all.

        Args:
            clear: begin anew. No report is lost or counted twice, whoever reports meanwhile.

        Returns:
            Enters as the statistics and a dictionary with `name.min` and `name.max`. Both
            are copies.
        """
        self._check_owner("read it")
        if self._inbox is not None:
            self._inbox.drain()
        self._read_events()
        taken = self._totals.take(clear)
        return nullcontext((taken, taken.extremes()))

    def report(self, tag: str, use_cuda: bool = False) -> AbstractContextManager[Report]:
        """Time a `with` block and count it under `tag`, however the block ends.

        Args:
            tag: the name it is counted under.
            use_cuda: measure the time between the two ends on the current CUDA stream too,
                counted as `tag.cuda`.

        Raises:
            ValueError: if `use_cuda` is set and this machine has no CUDA device.
            RuntimeError: if `use_cuda` is set in another process than the summary's.
        """
        if not use_cuda:
            return _Timing(self, tag, None)
        self._check_owner("measure device time for it")
        return _Timing(self, tag, get_device("cuda"))

    def _add_events(self, name: str, begin: Event, end: Event) -> None:
        with self._waiting_lock:
            self._waiting.append((name, begin, end))
            excess = len(self._waiting) - self._max_queue_size
        self._read_events(wait_for=excess)

    def _read_events(self, wait_for: int = 0) -> None:
        """Count the device times that are ready, in order, and wait for the first `wait_for`."""
        while True:
            with self._waiting_lock:
                if not self._waiting:
                    return
                name, begin, end = self._waiting[0]
                if wait_for <= 0 and not end.query():
                    return
                self._waiting.popleft()
            wait_for -= 1
            end.synchronize()
            self._totals.add(name, begin.elapsed_ms(end) / 1e3)

    def _is_deaf(self) -> bool:
        """Whether this process inherited it from one that does not listen."""
        return os.getpid() != self._owner and self._inbox is None

    def _check_owner(self, to_do: str) -> None:
        if os.getpid() != self._owner:
            raise RuntimeError(
                f"This TimeSummary belongs to process {self._owner}, and process {os.getpid()} "
                f"tried to {to_do}. Call initialize() there before starting this process: "
                "then this one can report into it."
            )


class _Totals:
    """The statistics behind a lock, apart from the summary so that a thread can hold them."""

    def __init__(self) -> None:
        # Reentrant for the reason given in Inbox.
        self._lock = threading.RLock()
        self._summary = DictSummary()

    def add(self, name: str, value: float) -> None:
        with self._lock:
            self._summary.add({name: value})

    def take(self, clear: bool) -> DictSummary:
        with self._lock:
            if not clear:
                return self._summary.copy()
            taken, self._summary = self._summary, DictSummary()
            return taken


_of_this_thread = threading.local()


def get_time_summary() -> TimeSummary:
    """The summary that `record` and its relatives report into: one for each thread.

    It is made at the first call, not initialized. To have another thread report into it,
    hand it over and use `TimeSummary.report` there. A forked process reports into the one
    of the thread that forked it if that is initialized, and otherwise makes its own.
    """
    found: TimeSummary | None = getattr(_of_this_thread, "summary", None)
    if found is None or found._is_deaf():
        found = _of_this_thread.summary = TimeSummary(auto_init=False)
    return found

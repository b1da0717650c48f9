"""Keeps operations going: on the thread of whoever waits for one, or behind the computation.

MPI libraries move data only while somebody calls them. Operations wait in lanes: in that of a
communicator's collectives only the first is under way, in the order in which they were
submitted, which is the same on every rank; messages between two ranks are under way all at once.

A call that waits drives its lane itself: to hand a small operation to another thread and back
takes longer than the operation. Lanes for which nobody waits are driven by one thread of the
process, while the program computes.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections import deque
from functools import partial
from math import inf

import torch.distributed as dist

from trine.distributed.mpi.work import MPIWork

__all__ = ["ANY_ORDER", "Progress"]

ANY_ORDER = 0
"""The lane of operations that need not wait for each other."""

_YIELDS = 200  # tests with nothing but a yield in between, before sleeping
_SHORTEST_S, _LONGEST_S = 20e-6, 500e-6


class _Patience:
    """Waits a little longer each time nothing has moved."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self._count, self._pause_s = 0, _SHORTEST_S

    def wait(self) -> None:
        self._count += 1
        if self._count < _YIELDS:
            os.sched_yield()
            return
        time.sleep(self._pause_s)
        self._pause_s = min(self._pause_s * 1.2, _LONGEST_S)


class _Lane:
    """Operations that are not over.

    Attributes:
        works: in the order of their submission; anybody may append.
        driver: held by whoever drives them at the moment.
        waiting: how many threads do so while they wait.
    """

    def __init__(self) -> None:
        self.works: deque[MPIWork] = deque()
        self.driver = threading.Lock()
        self.waiting = 0


class Progress:
    """Drives the operations of one process.

    Attributes:
        broken: why nothing can be submitted any more; None while all is well. An operation
            that ran out of time cannot be taken back, and leaves the ranks out of step.
    """

    def __init__(self) -> None:
        self.broken: str | None = None
        self._lanes: dict[int, _Lane] = {}
        self._counting = threading.Lock()
        self._kept: list[MPIWork] = []  # expired: MPI may still write to their buffers
        self._calls: queue.SimpleQueue[None] = queue.SimpleQueue()  # for the thread to look around
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="mpi progress", daemon=True)
        self._thread.start()

    def submit(self, lane: int, work: MPIWork, *, caller_waits: bool) -> None:
        """Start an operation.

        Args:
            lane: what it must not overtake.
            work: the operation.
            caller_waits: the caller has nothing to do until it is over.

        Raises:
            DistBackendError: if an earlier operation has failed.
        """
        if self.broken is not None:
            raise dist.DistBackendError(
                f"mpi: {work.label} was refused, because {self.broken} The ranks are out of step; "
                "end the job and start again from a checkpoint."
            )
        here = self._lanes.get(lane) or self._lanes.setdefault(lane, _Lane())
        work.drive = partial(self._drive, lane, here)
        here.works.append(work)
        if caller_waits:
            self._drive(lane, here, work, inf)
            return
        if here.driver.acquire(blocking=False):
            # Other ranks need not wait until the thread has its turn.
            try:
                if here.works and (lane == ANY_ORDER or here.works[0] is work):
                    work.advance(test=False)
            finally:
                here.driver.release()
        self._calls.put(None)

    def _drive(self, number: int, lane: _Lane, work: MPIWork, until: float) -> None:
        """Drive a lane on the calling thread until an operation is over, or time is up."""
        with self._counting:
            lane.waiting += 1
        patience: _Patience | None = None
        try:
            while True:
                if lane.driver.acquire(blocking=False):
                    try:
                        self._advance(number, lane)
                    finally:
                        lane.driver.release()
                if work.is_completed() or time.monotonic() > until:
                    return
                patience = patience or _Patience()
                patience.wait()
        finally:
            with self._counting:
                lane.waiting -= 1
            if lane.works:
                self._calls.put(None)

    def _advance(self, number: int, lane: _Lane) -> bool:
        """Go on with what is under way in a lane; whether anything is over. For its driver."""
        if number != ANY_ORDER:
            moved = False
            while lane.works and self._is_over(lane.works[0]):
                lane.works.popleft()
                moved = True
            return moved
        over = [work for work in list(lane.works) if self._is_over(work)]
        for work in over:
            lane.works.remove(work)
        return bool(over)

    def _is_over(self, work: MPIWork) -> bool:
        if not work.advance():
            if time.monotonic() <= work.deadline:
                return False
            self._expire(work)
        if work.exception() is not None:
            self._kept.append(work)
            self.broken = self.broken or f"{work.label} failed."
        return True

    def _expire(self, work: MPIWork) -> None:
        self.broken = f"{work.label} was not complete after {work.timeout_s:g} s."
        work.end(
            dist.DistBackendError(
                f"mpi: {self.broken} {_who(work)} not come (raised, ended, waiting elsewhere, or "
                "computing for longer than that: see timeout=... of init_process_group)."
            )
        )

    def finish(self, lane: int) -> None:
        """Return when nothing is under way in a lane. Every operation has a limit of its own."""
        here = self._lanes.get(lane)
        while here is not None and (works := list(here.works)):
            self._drive(lane, here, works[-1], inf)

    def is_busy(self, lane: int) -> bool:
        """Whether something is under way in a lane."""
        here = self._lanes.get(lane)
        return here is not None and bool(here.works)

    def drain(self, timeout_s: float) -> list[str]:
        """Let what was submitted come to its end, and stop.

        Returns:
            The labels of operations that did not.
        """
        self._stopping = True
        self._calls.put(None)
        self._thread.join(timeout_s)
        return self.under_way() if self._thread.is_alive() else []

    def under_way(self) -> list[str]:
        """The labels of operations that are not over; those that somebody waits for come first."""
        lanes = list(self._lanes.values())  # others may add some
        lanes.sort(key=lambda lane: -lane.waiting)
        return [work.label for lane in lanes for work in list(lane.works)]

    def _run(self) -> None:
        patience = _Patience()
        while True:
            lanes = [(number, lane) for number, lane in list(self._lanes.items()) if lane.works]
            if self._stopping and not lanes:
                return
            if not self._stopping:
                lanes = [(number, lane) for number, lane in lanes if not lane.waiting]
            if self._was_called(block=not lanes):
                patience.reset()
            moved = False
            for number, lane in lanes:
                if lane.driver.acquire(blocking=False):
                    try:
                        moved |= self._advance(number, lane)
                    finally:
                        lane.driver.release()
            if moved:
                patience.reset()
            elif lanes:
                patience.wait()

    def _was_called(self, *, block: bool) -> bool:
        called = False
        try:
            while True:
                self._calls.get(block=block and not called)
                called = True
        except queue.Empty:
            return called


def _who(work: MPIWork) -> str:
    missing = ", ".join(str(rank) for rank in sorted(work.missing))
    if not missing:
        return "Another rank has"
    return f"Rank {missing} has" if len(work.missing) == 1 else f"Ranks {missing} have"

"""The thread that keeps operations going while the program computes.

MPI libraries move data only while somebody calls them. One thread of each process tests the
requests of all operations under way: of each lane (a communicator's collectives) one
operation at a time, in the order in which they were submitted, which is the same on every
rank; messages between two ranks all at once.

A call that waits anyway, while its lane is empty, is driven by the caller's own thread:
handing a small operation over costs more than the operation.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections import defaultdict, deque

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


class Progress:
    """Drives the operations of one process.

    Attributes:
        broken: why nothing can be submitted any more; None while all is well. An operation
            that ran out of time cannot be taken back, and leaves the ranks out of step.
    """

    def __init__(self) -> None:
        self.broken: str | None = None
        self._submitted: queue.SimpleQueue[tuple[int, MPIWork] | None] = queue.SimpleQueue()
        self._pending: dict[int, int] = defaultdict(int)
        self._lock = threading.Lock()
        self._kept: list[MPIWork] = []  # expired: MPI may still write to their buffers
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
        with self._lock:
            alone = caller_waits and lane != ANY_ORDER and self._pending[lane] == 0
            self._pending[lane] += 1
        if not alone:
            self._submitted.put((lane, work))
            return
        try:
            if not work.advance() and not self._wait(work):
                self._expire(work)
                return
            self._look_at(work)
        finally:
            self._done(lane)

    def _wait(self, work: MPIWork) -> bool:
        """Drive an operation; False if time is up."""
        patience = _Patience()
        while not work.advance():
            if time.monotonic() > work.deadline:
                return False
            patience.wait()
        return True

    def _done(self, lane: int) -> None:
        with self._lock:
            self._pending[lane] -= 1

    def _look_at(self, work: MPIWork) -> None:
        if work.exception() is not None and self.broken is None:
            self.broken = f"{work.label} failed."
            self._kept.append(work)

    def _expire(self, work: MPIWork) -> None:
        self.broken = f"{work.label} was not complete after {work.timeout_s:g} s."
        self._kept.append(work)
        work.end(
            dist.DistBackendError(
                f"mpi: {self.broken} Another rank has not come: it raised, ended, waits elsewhere, "
                "or computes for longer than that (timeout=... of init_process_group)."
            )
        )

    def drain(self, timeout_s: float) -> list[str]:
        """Let what was submitted come to its end, and stop.

        Returns:
            The labels of operations that did not.
        """
        self._submitted.put(None)
        self._thread.join(timeout_s)
        return [work.label for work in self._under_way()] if self._thread.is_alive() else []

    def _under_way(self) -> list[MPIWork]:
        return [work for lane in list(self._lanes.values()) for work in list(lane)]

    def _run(self) -> None:
        self._lanes: dict[int, deque[MPIWork]] = defaultdict(deque)
        patience = _Patience()
        stopping = False
        while True:
            idle = not any(self._lanes.values())
            if idle and stopping:
                return
            for lane, work in self._arrivals(block=idle):
                if work is None:
                    stopping = True
                else:
                    self._lanes[lane].append(work)
                    patience.reset()
            if self._advance_all():
                patience.reset()
            elif any(self._lanes.values()):
                patience.wait()

    def _arrivals(self, *, block: bool) -> list[tuple[int, MPIWork | None]]:
        found: list[tuple[int, MPIWork | None]] = []
        try:
            while True:
                item = self._submitted.get(block=block and not found)
                found.append((ANY_ORDER, None) if item is None else item)
                if item is None:
                    return found
        except queue.Empty:
            return found

    def _advance_all(self) -> bool:
        moved = False
        for lane, waiting in self._lanes.items():
            running = list(waiting) if lane == ANY_ORDER else list(waiting)[:1]
            for work in running:
                if not work.advance():
                    if time.monotonic() <= work.deadline:
                        continue
                    self._expire(work)
                self._look_at(work)
                waiting.remove(work)
                self._done(lane)
                moved = True
        return moved

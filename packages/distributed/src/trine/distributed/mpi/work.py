"""An operation under way: c10d's `Work` over requests of MPI."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from mpi4py import MPI
from torch import Tensor

__all__ = ["MPIWork", "Steps"]

Steps = Iterator[Sequence[MPI.Request]]
"""An operation: it yields requests, and goes on once all of them are complete. Where it yields
none, it has to wait for something that it asks about itself."""

_NO_TIMEOUT = timedelta(0)
_ending = threading.Lock()  # of all: it is held for a moment, and making one for each costs as much
_REPORT_S = 5.0  # beyond the timeout, for whoever drives the operation to say that it is over


class MPIWork(dist.Work):
    """One operation. Whoever drives it calls `advance` until it is over.

    Args:
        label: what it is, for messages.
        steps: what to do.
        timeout_s: how long it may take from now.
        results: the tensors that it fills.
        missing: the ranks, numbered in the world, that it still waits for, if it knows them.

    Attributes:
        drive: set by whoever takes it: drives it on the calling thread until it is over, or
            until a time of the monotonic clock.
        begun_ns: when it was taken up, by the clock of the tracing seam; 0 before that.
    """

    def __init__(
        self,
        label: str,
        steps: Steps,
        timeout_s: float,
        results: Sequence[Tensor],
        missing: Collection[int] = (),
    ) -> None:
        super().__init__()
        self.missing = missing
        self.label = label
        self.timeout_s = timeout_s
        self.deadline = time.monotonic() + timeout_s
        self.source = -1
        self.begun_ns = 0
        self._steps: Steps | None = steps
        self._requests: list[MPI.Request] = []
        self._results = list(results)
        self._error: BaseException | None = None
        self._is_over = False
        self.drive: Callable[[MPIWork, float], None] | None = None
        self._future: torch.futures.Future[Any] | None = None

    def advance(self, *, test: bool = True) -> bool:
        """Go on as far as possible without waiting.

        Args:
            test: whether to ask if what MPI was told to do is done; else it is only told so.

        Returns:
            True once the operation is over, well or not.
        """
        if self._is_over:
            return True
        if not self.begun_ns:
            self.begun_ns = time.perf_counter_ns()
        try:
            while True:
                while self._requests:
                    if not test or not self._requests[-1].Test():
                        return False
                    self._requests.pop()
                assert self._steps is not None
                self._requests = list(next(self._steps))
                if not self._requests:
                    return False
        except StopIteration:
            self.end(None)
        except BaseException as error:
            self.end(dist.DistBackendError(f"mpi: {self.label} failed: {error}"))
            if not isinstance(error, Exception):  # Ctrl-C, on the thread of a caller
                raise
        return True

    def end(self, error: BaseException | None) -> None:
        """Note that it is over. Buffers of requests that are still under way are kept alive."""
        with _ending:
            if self._is_over:
                return
            self._error = error
            if error is None:
                self._steps = None
            self._is_over = True
            future = self._future
        if future is not None:
            self._fill(future)

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        """Return when the results may be read.

        Raises:
            DistBackendError: if it failed, or is not over within `timeout`.
        """
        limit = timeout.total_seconds() or self.timeout_s + _REPORT_S
        if not self._is_over:
            assert self.drive is not None
            self.drive(self, time.monotonic() + limit)
            if not self._is_over:
                raise dist.DistBackendError(f"mpi: {self.label} is not complete after {limit:g} s.")
        if self._error is not None:
            raise self._error
        return True

    def synchronize(self) -> None:
        """The same."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether it is over, well or not."""
        return self._is_over

    def is_success(self) -> bool:
        """Whether it is over, and well."""
        return self._is_over and self._error is None

    def exception(self) -> BaseException | None:
        """What went wrong, if something did."""
        return self._error

    def result(self) -> list[Tensor]:
        """The tensors that it fills, once they are filled."""
        self.wait()
        return self._results

    def source_rank(self) -> int:
        """Where a message from any source came from."""
        return self.source

    _source_rank = source_rank  # the name by which torch asks

    def get_future(self) -> torch.futures.Future[Any]:
        """A future of the results."""
        with _ending:
            fresh = self._future is None
            if self._future is None:
                self._future = torch.futures.Future()
            future, over = self._future, self._is_over
        if fresh and over:
            self._fill(future)
        return future

    def _fill(self, future: torch.futures.Future[Any]) -> None:
        if self._error is None:
            future.set_result(self._results)
        else:
            future.set_exception(self._error)

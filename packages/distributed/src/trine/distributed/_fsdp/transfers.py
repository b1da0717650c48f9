"""Wait for collectives, report them to the tracing seam, and say whose they were if they fail."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from trine.core import tracing
from trine.distributed._fsdp.collectives import Comm, Pending, PendingReduce
from trine.distributed._fsdp.errors import CommError
from trine.distributed.units import of_unit

__all__ = ["Transfer", "Transfers", "guarded"]

T = TypeVar("T")


@dataclass(slots=True)
class Transfer:
    """A collective under way, and what to report when it is over.

    Attributes:
        name: what it is, such as `all_gather`.
        dtype: of the elements that travel.
        nbytes: bytes that this rank sends.
        start_ns: when it was started, 0 if nobody listened then.
    """

    name: str
    dtype: torch.dtype
    nbytes: int
    start_ns: int


class Transfers:
    """The collectives of one parameter group.

    Args:
        comm: whose they are.

    Attributes:
        unit: full name of the group's module, for reports and messages.
    """

    def __init__(self, comm: Comm) -> None:
        self.comm = comm
        self.unit = "(root)"

    def start(
        self,
        what: str,
        buffer: Tensor,
        call: Callable[[], T],
        group: dist.ProcessGroup | None = None,
    ) -> T:
        """Start a collective.

        Args:
            what: its name, such as `all_gather`.
            buffer: what it moves, as large on every rank.
            call: starts it.
            group: its ranks, if they are not those of `comm`.

        Raises:
            CommError: see `guard`.
        """
        with of_unit(self.unit):
            return self.guard(what, call)

    def guard(self, what: str, call: Callable[[], T]) -> T:
        """Make a call that may fail because of another rank.

        Raises:
            CommError: naming the operation, the unit and this rank.
        """
        return guarded(f"{what} of {self.unit}", self.comm.rank, self.comm.world_size, call)

    def wait(self, transfer: Transfer, pending: Pending | PendingReduce) -> None:
        """Wait for a collective, and report it if somebody listened when it was started."""
        if not tracing.enabled or not transfer.start_ns:
            self.guard(transfer.name, pending.wait)
            return
        blocked_ns = time.perf_counter_ns()
        with tracing.span(f"wait {transfer.name}", "comm", self.unit):
            self.guard(transfer.name, pending.wait)
        now_ns = time.perf_counter_ns()
        inner = pending.pending if isinstance(pending, PendingReduce) else pending
        tracing.record_span(
            transfer.name,
            transfer.start_ns,
            inner.done_ns or now_ns,
            "comm",
            self.unit,
            transfer.nbytes,
            {
                "exposed_ns": now_ns - blocked_ns,
                "backend": self.comm.backend,
                "dtype": str(transfer.dtype).removeprefix("torch."),
            },
        )


def guarded(what: str, rank: int, size: int, call: Callable[[], T]) -> T:
    """Make a call that may fail because of another rank.

    Args:
        what: the operation and whose it is, for the message.
        rank: which of the ranks this one is.
        size: how many there are.
        call: starts or ends the operation.

    Raises:
        CommError: naming the operation and this rank, and where to look.
    """
    try:
        return call()
    except RuntimeError as error:
        raise CommError(
            f"{what} failed on rank {rank} of {size}: {error}\nUsually another rank raised or was "
            "killed; look at the first rank that reported an error. If none did, run again with "
            "TRINE_DEBUG=1: ranks then say what they were about to do."
        ) from error

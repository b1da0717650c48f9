"""Wait for collectives, report them to the tracing seam, and say whose they were if they fail."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from trine.core import tracing
from trine.distributed._fsdp.collectives import Comm, Pending, PendingReduce
from trine.distributed._fsdp.failures import confirm, failed, refused
from trine.distributed._fsdp.reports import Report, report_begin
from trine.distributed.ledger import Entry, Ledger
from trine.distributed.units import of_unit

__all__ = ["Transfer", "Transfers"]

T = TypeVar("T")


@dataclass(slots=True)
class Transfer:
    """A collective under way, and what to report when it is over.

    Attributes:
        name: what it is, such as `all_gather`.
        dtype: of the elements that travel.
        nbytes: bytes that this rank sends.
        ledger: of the group; None until it is started, and where there is no other rank.
        number: which of the group's collectives it is.
        report: what the tracing seam was told as it started; None if nobody listened then.
    """

    name: str
    dtype: torch.dtype
    nbytes: int
    ledger: Ledger | None = None
    number: int = 0
    report: Report | None = None


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
        self._known: set[Entry] = set()

    def start(
        self,
        transfer: Transfer,
        buffer: Tensor,
        call: Callable[[], T],
        ledger: Ledger | None = None,
    ) -> T:
        """Start a collective.

        Args:
            transfer: what it is; is given its number.
            buffer: what it moves, as large on every rank.
            call: starts it.
            ledger: of its group, if that is not the group of `comm`.

        Raises:
            CommError: naming the operation, the unit, and who is missing; also if an earlier
                collective of the group has failed.
        """
        transfer.ledger = ledger = ledger or self.comm.ledger
        if ledger is not None:
            if ledger.broken is not None:
                raise refused(transfer.name, self.unit, ledger)
            entry = ledger.note(transfer.name, self.unit, buffer)
            transfer.number = ledger.number
            if ledger.doubt is not None or entry not in self._known:
                self._check(entry, ledger)
        if tracing.enabled:
            transfer.report = report_begin(
                transfer.name, self.unit, buffer, transfer.nbytes, self.comm.backend, ledger
            )
        with of_unit(self.unit):
            return self.guard(transfer, call)

    def _check(self, entry: Entry, ledger: Ledger) -> None:
        """Compare with the other ranks what this one is about to do, where that is in doubt."""
        doubt, ledger.doubt = ledger.doubt, None
        # What is moved first was compared at the first forward.
        others = any(known[:3] == entry[:3] for known in self._known)
        if doubt is None and entry not in self._known and others:
            doubt = (
                f"On rank {ledger.rank} this moves more or less than it did before: a parameter "
                "was frozen, unfrozen, cast or loaded there. Do the same on every rank, at the "
                "same place of the program."
            )
        if doubt is not None:
            confirm(ledger, doubt)
        self._known.add(entry)

    def guard(self, transfer: Transfer, call: Callable[[], T]) -> T:
        """Make a call that may fail because of another rank.

        Raises:
            CommError: see `start`.
        """
        try:
            return call()
        except RuntimeError as error:
            ledger = transfer.ledger
            if ledger is None:  # there is no other rank
                raise
            raise failed(transfer.name, self.unit, ledger, transfer.number, error) from error

    def wait(self, transfer: Transfer, pending: Pending | PendingReduce) -> None:
        """Wait for a collective, and report it if somebody listened when it was started."""
        # Once: who waits again after a failure finds nothing left to wait for.
        report, transfer.report = transfer.report, None
        if report is None or not tracing.enabled:
            self.guard(transfer, pending.wait)
            return
        with report.waiting():
            self.guard(transfer, pending.wait)
        inner = pending.pending if isinstance(pending, PendingReduce) else pending
        report.end(inner.begun_ns, inner.done_ns)

"""TRINE_DEBUG=1: before each collective, its ranks make sure that all mean the same one.

Whether they do is decided where a module is sharded: without the variable nothing of this
is called. How ranks compare is in `meeting`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist
from torch import Tensor

from trine.distributed._fsdp.collectives import Comm
from trine.distributed._fsdp.failures import guarded
from trine.distributed._fsdp.meeting import meetings
from trine.distributed._fsdp.transfers import Transfer, Transfers
from trine.distributed.ledger import Ledger, ledger_of
from trine.distributed.process_groups import MPI4PY, backend_of, debugging

__all__ = [
    "CheckedTransfers",
    "all_reduce",
    "check_label",
    "debug_limit_s",
    "transfers_for",
]

T = TypeVar("T")

_MEND = (
    "Every rank must run the same sharded modules, in the same order, the same number of times: "
    "look for a branch, a loop or a loss that depends on the rank or on its data. If a rank is "
    "only slow, give it longer: TRINE_DEBUG_TIMEOUT_S (seconds)."
)


def debug_limit_s() -> float:
    """How long ranks wait for each other before a collective, in seconds, while debugging.

    Raises:
        ValueError: if `TRINE_DEBUG_TIMEOUT_S` is not a positive number.
    """
    given = os.environ.get("TRINE_DEBUG_TIMEOUT_S", "60")
    try:
        limit_s = float(given)
    except ValueError:
        limit_s = 0.0
    if not limit_s > 0:
        raise ValueError(
            f"TRINE_DEBUG_TIMEOUT_S={given!r}: expected a positive number of seconds to wait "
            "for the other ranks before each collective."
        )
    return limit_s


def transfers_for(comm: Comm) -> Transfers:
    """The collectives of a group, with checked labels if the environment asks for them.

    Raises:
        ValueError: see `debug_limit_s`.
    """
    if not debugging():
        return Transfers(comm)
    debug_limit_s()  # refused here rather than in the middle of a step
    return CheckedTransfers(comm)


class CheckedTransfers(Transfers):
    """Transfers whose ranks compare, before each collective, what they are about to do."""

    def start(
        self,
        transfer: Transfer,
        buffer: Tensor,
        call: Callable[[], T],
        ledger: Ledger | None = None,
    ) -> T:
        """See `Transfers.start`.

        Raises:
            RanksDisagree: on every rank, if one is about to do something else.
            CommError: if a rank does not come.
        """
        ledger = ledger or self.comm.ledger
        if ledger is not None:
            check_label(ledger, f"{transfer.name} of {self.unit}", buffer)
        return super().start(transfer, buffer, call, ledger)


def all_reduce(
    what: str, tensor: Tensor, op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup
) -> None:
    """All-reduce a small tensor that belongs to no unit, such as a norm; waits for it.

    Args:
        what: it is, for messages.
        tensor: changed in place.
        op: how to reduce.
        group: the ranks.

    Raises:
        CommError: if another rank has gone, or does not come.
        RanksDisagree: on every rank, while debugging, if one is about to do something else.
    """
    ledger = ledger_of(group)
    if debugging():
        check_label(ledger, f"all_reduce of {what}", tensor)
    backend = backend_of(group, tensor.device.type)
    guarded(
        "all_reduce",
        what,
        tensor,
        ledger,
        "mpi" if backend == MPI4PY else backend,
        lambda: dist.all_reduce(tensor, op=op, group=group),
    )


def check_label(ledger: Ledger, what: str, buffer: Tensor) -> None:
    """Compare with the other ranks of a group what this one is about to do.

    Args:
        ledger: of the group.
        what: the operation and whose it is.
        buffer: what it moves.

    Raises:
        RanksDisagree: on every rank, if one is about to do something else.
        CommError: if a rank does not come.
    """
    met = meetings()
    if met is None:
        return
    dtype = str(buffer.dtype).removeprefix("torch.")
    met.meet(
        ledger.ranks,
        f"{what} ({buffer.numel()} elements of {dtype})",
        limit_s=debug_limit_s(),
        mend=_MEND,
    )

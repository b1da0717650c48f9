"""Sharded parameters in the slots of modules, for callers who are about to look at them there.

While a unit computes, its whole parameters are in the slots, and what autograd has saved of them
ends with their memory: taking it away there would end the process or leave wrong numbers.
"""

from __future__ import annotations

import torch.distributed as dist

from trine.distributed._fsdp.schedule import Phase
from trine.distributed._fsdp.state import FSDPState
from trine.distributed._fsdp.torch_internals import backward_running, in_forward

__all__ = ["computing", "show_shards"]


def show_shards(state: FSDPState, call: str) -> None:
    """Free whole parameters and put the sharded ones into the slots.

    Args:
        state: whose.
        call: what needs them, for the error.

    Raises:
        RuntimeError: if the unit is computing with its whole parameters.
    """
    where = computing(state) if any(group.is_whole for group in state.groups) else None
    if where is not None:
        raise RuntimeError(
            f"{call} was called on rank {dist.get_rank()} inside the {where} of {state.name}, "
            "which computes with its whole parameters there, while the call is for the sharded "
            "ones. Call it between iterations, or between forward and backward."
        )
    for group in state.groups:
        group.reshard()


def computing(state: FSDPState) -> str | None:
    """Which pass a unit is inside of: "forward", "backward", or None.

    One that an exception or Ctrl-C has broken off does not count.
    """
    schedule = state.schedule
    if schedule is None:
        return None
    phases = {schedule.phase_of(group) for group in state.groups}
    if Phase.BACKWARD in phases and backward_running() != -1:
        return "backward"
    # In backward a forward may be recomputed, which the phases do not tell.
    may_be = Phase.FORWARD in phases or schedule.in_backward
    return "forward" if may_be and in_forward(state.modules) else None

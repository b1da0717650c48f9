"""Which optimizer steps have changed which parameters, so that gathered values are known to be old.

Whether a group gathers again decides whether it takes part in a collective, so it must follow
from what all ranks do alike. An optimizer that holds a group's parameters steps on all of them;
another one may belong to this rank alone, such as a probe's, and does not count.
"""

from __future__ import annotations

import weakref
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from trine.distributed._fsdp.successors import owner_of

__all__ = ["StepCount", "count_optimizer_steps", "optimizer_steps"]


class StepCount:
    """How often optimizers have stepped that hold one of a group's parameters."""

    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0


_all = StepCount()
_registered = False
# What an optimizer held when it was looked at last, and the counts of that.
_held: weakref.WeakKeyDictionary[Optimizer, tuple[list[int], list[StepCount]]] = (
    weakref.WeakKeyDictionary()
)


def count_optimizer_steps() -> None:
    """Start to count, once; and look again at what each optimizer holds."""
    global _registered
    if not _registered:
        _registered = True
        register_optimizer_step_post_hook(_stepped)
    _held.clear()


def optimizer_steps() -> int:
    """How many optimizer steps this process has made since it sharded its first module."""
    return _all.count


def _stepped(optimizer: Optimizer, *_: Any) -> None:
    _all.count += 1
    for each in _counts_of(optimizer):
        each.count += 1


def _counts_of(optimizer: Optimizer) -> list[StepCount]:
    params = [param for group in optimizer.param_groups for param in group["params"]]
    ids = list(map(id, params))
    known = _held.get(optimizer)
    if known is not None and known[0] == ids:
        return known[1]
    counts: dict[StepCount, None] = {}
    for param in params:
        owner: Any = owner_of(param)
        if owner is not None:
            counts[owner.steps] = None
    _held[optimizer] = (ids, list(counts))
    return list(counts)

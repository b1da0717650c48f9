"""MemoryCounters: what one parameter group tells the tracing seam of its memory.

Counters of category "mem", in bytes and on change: `memory.sharded`, `memory.unsharded`,
`memory.gradients`, `memory.communication` (buffers that the group has borrowed) and
`memory.optimizer`, each of a unit. Idle buffers belong to nobody: `memory.communication`
without a unit. With nobody listening nothing here is called; callers ask `tracing.enabled`.

Note [Order of counters]
    A reader adds counters up as they come, so two that change together must not add up to
    more than there ever was: what was given up is told before what was taken.

Note [Groups of one name]
    A module whose parameters have several dtypes has several groups, and two models may have
    units of one name. A counter is known by its name alone, so it tells of all of them.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from trine.core import tracing
from trine.distributed._fsdp.buffers import BufferPool
from trine.distributed._fsdp.torch_internals import nbytes_here

__all__ = ["MemoryCounters"]


class _Param(Protocol):
    """What is asked of a sharded parameter."""

    sharded: nn.Parameter

    @property
    def grad_nbytes(self) -> int:
        """Bytes of its gradients on this rank, whole and sharded ones."""


_all: weakref.WeakSet[MemoryCounters] = weakref.WeakSet()
_registered = False


class _Unit:
    """What was told of the groups of one name; see Note [Groups of one name]."""

    def __init__(self) -> None:
        self.groups: weakref.WeakSet[MemoryCounters] = weakref.WeakSet()
        self.told: dict[str, int] = {}
        self.step = -1
        self.sinks: tuple[tracing.TraceSink, ...] = ()


_units: weakref.WeakValueDictionary[str, _Unit] = weakref.WeakValueDictionary()


class MemoryCounters:
    """Reports the bytes of one group's tensors.

    Args:
        params: the group's parameters.
    """

    def __init__(self, params: Sequence[_Param]) -> None:
        global _registered
        self._params = params
        self._borrowed = 0
        self._grads_nbytes = 0
        self._nbytes: dict[str, int] = {}
        self._unit = _Unit()
        self.rename("(root)")
        _all.add(self)
        if not _registered:
            _registered = True
            register_optimizer_step_post_hook(_stepped)

    def rename(self, name: str) -> None:
        """Take the full name that the group's module has under its root."""
        self._name = name
        self._unit.groups.discard(self)
        self._unit = _units.setdefault(name, _Unit())
        self._unit.groups.add(self)

    def tell(self, pool: BufferPool, sharded: int, unsharded: int, *, grads: bool) -> None:
        """Report what has changed since the last report.

        Args:
            pool: where the group's buffers come from.
            sharded: bytes of this rank's shards.
            unsharded: bytes of whole parameters, or of pieces kept of them.
            grads: whether gradients can have changed: to look at each costs more than the rest.
        """
        self._tell("sharded", sharded)
        self._tell("unsharded", unsharded)
        if grads:
            self._grads_nbytes = sum([param.grad_nbytes for param in self._params])
        self._tell("gradients", self._grads_nbytes)
        self.tell_buffers(pool)

    def tell_buffers(self, pool: BufferPool) -> None:
        """Report communication buffers alone: what was borrowed or returned since the last report.

        Groups take turns, and each reports when it has done something, so a change is its own.
        """
        change = pool.lent_nbytes - pool.told_lent_nbytes
        pool.told_lent_nbytes = pool.lent_nbytes
        # Never below 0: what was borrowed before anybody listened was nobody's.
        self._borrowed = max(self._borrowed + change, 0)
        # See Note [Order of counters].
        if change > 0:
            pool.tell_idle()
        self._tell("communication", self._borrowed)
        pool.tell_idle()

    def tell_optimizer(self, optimizer: Optimizer) -> None:
        """Report the bytes of the state of the group's parameters, if `optimizer` trains them."""
        states = [state for param in self._params if (state := optimizer.state.get(param.sharded))]
        if states:
            tensors = [each for state in states for each in state.values()]
            found = [nbytes_here(each) for each in tensors if isinstance(each, Tensor)]
            self._tell("optimizer", sum(found))

    def _tell(self, kind: str, nbytes: int) -> None:
        unit = self._unit
        # All anew for a sink that was not there before, and in each step: a recording may
        # begin in any step, and lose its oldest events.
        if unit.step != tracing.current_step() or unit.sinks is not tracing.sinks():
            unit.step, unit.sinks = tracing.current_step(), tracing.sinks()
            unit.told.clear()
        elif self._nbytes.get(kind) == nbytes and kind in unit.told:
            return
        self._nbytes[kind] = nbytes
        total = sum([group._nbytes.get(kind, 0) for group in unit.groups])
        if unit.told.get(kind) != total:
            unit.told[kind] = total
            tracing.counter(f"memory.{kind}", total, "mem", self._name)


def _stepped(optimizer: Optimizer, *_: Any) -> None:
    if tracing.enabled:
        for counters in list(_all):
            counters.tell_optimizer(optimizer)

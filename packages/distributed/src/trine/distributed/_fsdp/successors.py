"""Which sharded parameter has taken the place of a plain one, while anyone still holds that.

Two mistakes leave a program that trains nothing, without a word: a module outside a call of
`fully_shard` keeps a whole parameter that the call has replaced, or an optimizer does. Both
are found by asking here for the successor of a tensor. A third, a parameter that two calls
shard, is found by asking for its owner.
"""

from __future__ import annotations

import warnings
import weakref
from typing import Any, Protocol

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

__all__ = ["HoldsSharded", "note_owner", "note_successor", "owner_of", "rebind", "successor_of"]


class HoldsSharded(Protocol):
    """What knows the sharded parameter.

    The parameter itself must have no weak references: torch refuses to exchange the contents
    of a tensor that has some, as `module.to(dtype)` does.
    """

    fqn: str
    sharded: nn.Parameter


# By id, since tensors compare element by element.
_successors: dict[int, tuple[weakref.ref[Tensor], weakref.ref[HoldsSharded]]] = {}
_owners: dict[int, weakref.ref[HoldsSharded]] = {}
_checked: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
_noted = 0


def note_successor(old: Tensor, holder: HoldsSharded) -> None:
    """Remember that the sharded parameter of `holder` stands where `old` stood."""
    global _noted
    if not _noted:
        register_optimizer_step_pre_hook(rebind)
    _noted += 1
    key = id(old)
    gone = weakref.ref(old, lambda _: _successors.pop(key, None))
    _successors[key] = (gone, weakref.ref(holder))


def successor_of(param: Tensor) -> tuple[nn.Parameter, str] | None:
    """The sharded parameter that has taken the place of `param`, and its name."""
    found = _successors.get(id(param))
    if found is None or found[0]() is not param:
        return None
    holder = found[1]()
    return None if holder is None else (holder.sharded, holder.fqn)


def note_owner(holder: HoldsSharded) -> None:
    """Remember that `holder` owns the sharded parameter that it has now."""
    key = id(holder.sharded)

    def forget(gone: weakref.ref[HoldsSharded]) -> None:
        if _owners.get(key) is gone:
            del _owners[key]

    _owners[key] = weakref.ref(holder, forget)


def owner_of(param: Tensor) -> HoldsSharded | None:
    """Who owns `param`, if that is a sharded parameter of the engine's."""
    found = _owners.get(id(param))
    holder = None if found is None else found()
    return holder if holder is not None and holder.sharded is param else None


def rebind(optimizer: Optimizer, *_: Any) -> None:
    """Let an optimizer train the sharded parameters instead of whole ones.

    Called before each of its steps, and before its state is saved or loaded.
    """
    if _checked.get(optimizer) == _noted:
        return
    _checked[optimizer] = _noted
    rebound: list[str] = []
    stale: list[str] = []
    held = {id(param) for group in optimizer.param_groups for param in group["params"]}
    for group in optimizer.param_groups:
        params = group["params"]
        for position, param in enumerate(params):
            found = successor_of(param)
            if found is None:
                continue
            new, name = found
            if _sharded_alike(param, new):
                # Exchanged since, as by load_state_dict(assign=True): its state still fits.
                if id(new) not in held:
                    params[position] = new
                    if param in optimizer.state:
                        optimizer.state[new] = optimizer.state.pop(param)
            elif optimizer.state.get(param):
                stale.append(name)
            else:
                params[position] = new
                rebound.append(name)
    optimizer_name = type(optimizer).__name__
    if rebound:
        warnings.warn(
            f"This {optimizer_name} was made with whole parameters that fully_shard has replaced "
            f"({_listed(rebound)}). It trains the sharded ones from now on. Make the optimizer "
            "after fully_shard, and while parameters are not gathered.",
            stacklevel=3,
        )
    if stale:
        warnings.warn(
            f"This {optimizer_name} holds state for whole parameters that fully_shard has "
            f"replaced ({_listed(stale)}), so it cannot train the sharded ones. Make a new "
            "optimizer after fully_shard.",
            stacklevel=3,
        )


def _sharded_alike(old: Tensor, new: Tensor) -> bool:
    return (
        isinstance(old, DTensor)
        and isinstance(new, DTensor)
        and old.device_mesh == new.device_mesh
        and old.placements == new.placements
    )


def _listed(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")

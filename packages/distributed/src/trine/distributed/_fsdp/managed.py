"""Which parameters one call of `fully_shard` owns, and which it must refuse.

A call owns the parameters of its module's tree except those of modules that an earlier
call took. Shared parameters inside one call are one parameter with several slots.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from torch import nn

from trine.distributed._fsdp.param import Slot
from trine.distributed._fsdp.state import plain_name, state_of
from trine.distributed._fsdp.successors import owner_of, successor_of
from trine.distributed._fsdp.torch_internals import module_parameters

__all__ = ["ManagedParam", "managed_params"]


class ManagedParam:
    """A parameter to shard: the tensor, all its slots, its name below the module."""

    def __init__(self, param: nn.Parameter, fqn: str, slot: Slot) -> None:
        self.param = param
        self.fqn = fqn
        self.slots = [slot]


def managed_params(
    modules: Sequence[nn.Module], ignored: Collection[nn.Parameter] = ()
) -> list[ManagedParam]:
    """The parameters that a call on `modules` owns, in the order of `named_parameters`.

    Args:
        modules: of the call.
        ignored: parameters to leave as they are.

    Raises:
        ValueError: if one of them is owned by another call, or shared with a module that has
            been sharded by one.
    """
    skipped = {id(param) for param in ignored}
    found: dict[int, ManagedParam] = {}
    for prefix, owner in _unmanaged_modules(modules):
        for name, param in module_parameters(owner).items():
            if param is None or id(param) in skipped:
                continue
            fqn = f"{prefix}.{name}" if prefix else name
            known = found.get(id(param))
            if known is not None:
                known.slots.append(Slot(owner, name))
                continue
            _check(param, fqn)
            found[id(param)] = ManagedParam(param, fqn, Slot(owner, name))
    return list(found.values())


def _unmanaged_modules(modules: Sequence[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """The modules below those of a call that no earlier call took, with their names."""
    seen: set[nn.Module] = set()

    def walk(node: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
        if node in seen or (node not in modules and state_of(node) is not None):
            return
        seen.add(node)
        yield name, node
        for child_name, child in node.named_children():
            yield from walk(child, plain_name(f"{name}.{child_name}" if name else child_name))

    for position, module in enumerate(modules):
        # Several modules have no common name until their root is known.
        yield from walk(module, "" if len(modules) == 1 else f"[{position}]")


def _check(param: nn.Parameter, fqn: str) -> None:
    taken = successor_of(param)
    if taken is not None:
        raise ValueError(
            f"{fqn} is shared with {taken[1]}, which another call of "
            "fully_shard, or another wrapper, has sharded already: the two would train apart. "
            "Shard the modules "
            "that share a parameter in one call, on a module that contains them all."
        )
    owner = owner_of(param)
    if owner is not None:
        raise ValueError(
            f"{fqn} belongs to a call of fully_shard on a module around this one, as {owner.fqn}. "
            "Call it from the inside out: on a module before the one that contains it. Or leave "
            "the parameter where it is with ignored_params."
        )

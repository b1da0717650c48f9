"""Which modules are units, and what each of them owns, of a model that nobody has sharded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import nn

from trine.core.planning import PlanError

__all__ = ["Owned", "Tree", "units_of"]

_CONTAINERS = (nn.ModuleList, nn.ModuleDict)


@dataclass(frozen=True)
class Owned:
    """A parameter of a unit.

    Attributes:
        shape: of the whole, with at least one dim: a number is a row for each rank.
        numel: elements of the whole.
        dtype: in which it is stored.
        trained: whether it has a gradient.
        is_number: whether it has no dims, so that each rank holds all of it.
    """

    shape: tuple[int, ...]
    numel: int
    dtype: torch.dtype
    trained: bool
    is_number: bool


@dataclass
class Tree:
    """A unit and the units inside it, in the order of the model.

    Attributes:
        name: full name of the module; "(root)" for the model.
        module: itself.
        params: that it owns: those below it that no unit inside it owns.
        inside: the next units below.
    """

    name: str
    module: nn.Module
    params: list[Owned] = field(default_factory=list)
    inside: list[Tree] = field(default_factory=list)


def units_of(model: nn.Module, chosen: tuple[str, ...] | int | None, shard: int) -> Tree:
    """The units of a model, from the root down.

    Args:
        model: on any device.
        chosen: see `PlanRequest.units`.
        shard: how many ranks share one copy.

    Raises:
        PlanError: if no module is of a class that was named, or if two units share a parameter.
    """
    picked = _picked(model, chosen)
    root = Tree("(root)", model)
    owners: dict[int, tuple[str, Tree]] = {}
    seen: set[int] = set()

    def walk(module: nn.Module, name: str, unit: Tree) -> None:
        if id(module) in seen:
            return
        seen.add(id(module))
        if module is not model and id(module) in picked:
            unit.inside.append(Tree(name, module))
            unit = unit.inside[-1]
        for below, param in module.named_parameters(recurse=False):
            full = f"{name}.{below}" if name else below
            other = owners.get(id(param))
            if other is not None and other[1] is not unit:
                raise PlanError(
                    f"{full} is shared with {other[0]}, and they are in two units, "
                    f"{unit.name} and {other[1].name}. Choose units so that one contains both."
                )
            if other is None:
                owners[id(param)] = full, unit
                unit.params.append(_owned(param, shard))
        for below, child in module.named_children():
            walk(child, f"{name}.{below}" if name else below, unit)

    walk(model, "", root)
    return root


def _owned(param: nn.Parameter, shard: int) -> Owned:
    shape = tuple(param.shape)
    return Owned(shape or (shard,), param.numel(), param.dtype, param.requires_grad, not shape)


def _picked(model: nn.Module, chosen: tuple[str, ...] | int | None) -> set[int]:
    if isinstance(chosen, int):
        return _large(model, chosen)
    if chosen is None:
        return _members(model)
    found = {name: [m for m in model.modules() if type(m).__name__ == name] for name in chosen}
    for name, modules in found.items():
        if not modules:
            classes = sorted({type(module).__name__ for module in model.modules()})
            raise PlanError(f"No module is a {name}. The model has {', '.join(classes)}.")
    return {id(module) for modules in found.values() for module in modules}


def _members(model: nn.Module) -> set[int]:
    """The members of module lists that are in no such member themselves."""
    picked: set[int] = set()

    def visit(module: nn.Module) -> None:
        for child in module.children():
            if isinstance(module, nn.ModuleList) and not isinstance(child, _CONTAINERS):
                picked.add(id(child))
            else:
                visit(child)

    visit(model)
    return picked


def _large(model: nn.Module, least: int) -> set[int]:
    """The innermost modules with so many parameters that no unit inside them has."""
    picked: set[int] = set()
    seen: set[int] = set()

    def left(module: nn.Module, new: Callable[[nn.Parameter], bool]) -> int:
        count = sum(p.numel() for p in module.parameters(recurse=False) if new(p))
        count += sum(left(child, new) for child in module.children())
        if count >= least and module is not model and not isinstance(module, _CONTAINERS):
            picked.add(id(module))
            return 0
        return count

    def new(param: nn.Parameter) -> bool:
        known = id(param) in seen
        seen.add(id(param))
        return not known

    left(model, new)
    return picked

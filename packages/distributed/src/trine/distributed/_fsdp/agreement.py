"""Agreement: at the first forward, ranks make sure that they sharded the same model alike.

Buffers and the order of collectives follow from what is compared here. A difference would
otherwise show as a hang, or as rows that land in another parameter.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields

import torch

from trine.distributed._fsdp.errors import rank_list
from trine.distributed._fsdp.labels import debug_limit_s
from trine.distributed._fsdp.meeting import meetings
from trine.distributed._fsdp.param import ShardedParam
from trine.distributed._fsdp.param_group import ParamGroup
from trine.distributed._fsdp.state import FSDPState
from trine.distributed.mesh import MeshAxes
from trine.distributed.process_groups import debugging

__all__ = ["agree_on_layout", "difference"]

_Facts = dict[str, str]
_Layout = dict[str, _Facts]
"""Facts by the name of the unit or parameter; order counts."""

_MEND = (
    "Every rank must build the same model, make the same calls of fully_shard in the same order, "
    "and set the same things on it before its first forward."
)

_POLICY = ("param_dtype", "reduce_dtype", "output_dtype", "cast_forward_inputs")


def agree_on_layout(root: FSDPState, units: Sequence[tuple[str, FSDPState]]) -> None:
    """Compare the layout of a tree of sharded modules with the other ranks of its root's mesh.

    Args:
        root: the outermost module.
        units: it and those below it by their full names, in order; parameters are renamed.

    Raises:
        RanksDisagree: on every rank of the mesh, naming what differs and who has what.
        CommError: if a rank of the mesh does not come.
    """
    if len(root.axes.peers) == 1:
        return
    met = meetings()
    if met is None:
        return
    met.meet(
        root.axes.peers,
        "the first forward of a sharded model",
        detail=json.dumps(_layout(units)),
        compare=difference,
        limit_s=debug_limit_s() if debugging() else None,
        mend=_MEND,
    )


def _layout(units: Sequence[tuple[str, FSDPState]]) -> _Layout:
    found: _Layout = {}
    for name, state in units:
        name = name or "(root)"
        found[f"unit {name}"] = _unit_facts(state)
    for name, state in units:
        for number, group in enumerate(state.groups):
            for param in group.params:
                of = f"unit {name or '(root)'}, group {number}"
                found[f"parameter {param.fqn}"] = _param_facts(param, group) | {"owner": of}
    return found


def _unit_facts(state: FSDPState) -> _Facts:
    facts = {"modules": str(len(state.modules)), "mesh": _mesh(state.axes)}
    facts |= {name: _plain(getattr(state.policy, name)) for name in _POLICY}
    # What a user sets for order and reduction decides which collectives follow, and when.
    for settings in (state.settings, state.reduce_settings):
        facts |= {each.name: _plain(getattr(settings, each.name)) for each in fields(settings)}
    facts["TRINE_DEBUG"] = str(int(debugging()))
    return facts


def _param_facts(param: ShardedParam, group: ParamGroup) -> _Facts:
    held = param.slots[0].get()
    return {
        "shape": str(param.shape),
        "dtype": _plain(param.dtype if held is None else held.dtype),
        "on the meta device": str(held is not None and held.is_meta),
        # Gradients are laid into a buffer for those that are trained.
        "requires_grad": str((param.sharded if held is None else held).requires_grad),
        "cut along dim": str(param.dim),
        "mesh": _mesh(param.axes),
        "gathered for backward among": str(group.gathers_again_among),
        "collectives": f"{type(group.comm).__name__} ({group.comm.backend})",
    }


def _mesh(axes: MeshAxes) -> str:
    return (
        f"{axes.shard_size} shards x {axes.replicate_size} copies on {axes.device_type} "
        f"(axes {axes.mesh.mesh_dim_names})"
    )


def _plain(value: object) -> str:
    """A setting in words that are the same on every rank."""
    if isinstance(value, (list, tuple)):
        return str([getattr(each, "name", str(each)) for each in value])
    if value is None or isinstance(value, (bool, int, float, str, torch.dtype)):
        return str(value).removeprefix("torch.")
    return "set"


def difference(details: Mapping[int, str]) -> str:
    """Words for how layouts differ: by name, or, if all names and facts are equal, by order.

    Args:
        details: by rank, what `agree_on_layout` sends.
    """
    layouts: dict[int, _Layout] = {rank: json.loads(text) for rank, text in details.items()}
    names = list(dict.fromkeys(name for layout in layouts.values() for name in layout))
    found: list[str] = []
    for name in names:
        missing = [rank for rank, layout in layouts.items() if name not in layout]
        if missing:
            present = [rank for rank in layouts if rank not in missing]
            found.append(f"{name} is there on {rank_list(present)}, not on {rank_list(missing)}")
            continue
        for fact in layouts[next(iter(layouts))][name]:
            if fact == "owner" and found:
                continue  # mostly because of a unit that is missing
            values: dict[str, list[int]] = {}
            for rank, layout in layouts.items():
                values.setdefault(layout[name].get(fact, "not known"), []).append(rank)
            if len(values) > 1:
                each = "; ".join(f"{value} on {rank_list(who)}" for value, who in values.items())
                found.append(f"{name}: {fact} is {each}")
    if not found:
        orders: dict[tuple[str, ...], list[int]] = {}
        for rank, layout in layouts.items():
            orders.setdefault(tuple(layout), []).append(rank)
        first = next(
            position for position, at in enumerate(zip(*orders, strict=True)) if len(set(at)) > 1
        )
        each = "; ".join(f"{order[first]} on {rank_list(who)}" for order, who in orders.items())
        found.append(f"the order: number {first} is {each}")
    more = f"\n  and {len(found) - 5} more" if len(found) > 5 else ""
    lines = "".join(f"\n  {line}" for line in found[:5])
    return f"The ranks of this model did not shard it alike:{lines}{more}"

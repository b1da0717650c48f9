"""plan: from a model and a request to the bytes of one rank. It puts the parts in order."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import nn

from trine.core.planning import Plan, PlanError, PlanRequest, UnitPlan, Usage
from trine.distributed._fsdp.arguments import as_reshard
from trine.distributed._fsdp.layout import ShardLayout
from trine.distributed._fsdp.schedule import Schedule, UnitSettings
from trine.distributed.planning.activations import Activations, saved_by
from trine.distributed.planning.optimizer_state import StateSizes
from trine.distributed.planning.rehearsal import Memory, PlannedUnit, Ranks
from trine.distributed.planning.units import Owned, Tree, units_of

__all__ = ["plan"]

_KINDS = ("sharded", "unsharded", "gradients", "optimizer", "activations", "communication")


def plan(model: nn.Module, request: PlanRequest) -> Plan:
    """What training a model takes of one rank, in its second step, when steps have become alike.

    Gradients are taken to be freed before the forward (`optimizer.zero_grad()`), and units to
    compute in the order in which the model has them.

    Args:
        model: on the meta device; not changed.
        request: how it is to be trained.

    Raises:
        PlanError: if it cannot be trained so; the message says why.
    """
    tree = units_of(model, request.units, request.shard)
    reshards, again_among = _reshard(request)
    ranks = Ranks(request.shard, request.replicate, request.backend, again_among, request.offload)
    memory = Memory()
    held = sum(buffer.nbytes for buffer in model.buffers())
    memory.add("replicated", "", held)
    settings = UnitSettings(reshard_after_forward=reshards)
    schedule = Schedule()
    schedule.free_idle = memory.pool.free_idle
    groups: dict[str, list[PlannedUnit]] = {}
    for unit in _all_of(tree):
        groups[unit.name] = [
            _planned(unit.name, params, ranks, request, memory) for params in _by_dtype(unit.params)
        ]
        for group in groups[unit.name]:
            schedule.add(group, settings, is_root=unit is tree)
    state, host = _rest(tree, groups, request)
    saved = _activations(model, tree, request)
    step = _Step(schedule, memory, groups, saved)
    step.run(tree)
    for name, nbytes in state.items():
        memory.add("optimizer", name, 0 if request.offload else nbytes)
    step.zero_grad()
    memory.forget_peak()
    between = _usage(memory.usage())
    step.run(tree)
    sent: dict[str, int] = defaultdict(int)
    for (_, collective), nbytes in memory.sent.items():
        sent[collective] += nbytes
    return Plan(
        request=request,
        units=tuple(_unit(unit, memory, request) for unit in _all_of(tree)),
        peak=_usage(memory.peak_by_kind),
        peak_at=memory.peak_at,
        between_steps=between,
        host=host,
        sent=dict(sent),
        notes=tuple(_notes(request)),
    )


def _reshard(request: PlanRequest) -> tuple[bool | None, int | None]:
    try:
        reshards, again = as_reshard(
            request.reshard_after_forward, {request.shard: "parameters are sharded over"}
        )
    except (TypeError, ValueError) as error:
        raise PlanError(str(error)) from error
    return reshards, None if again is None or again >= request.shard else again


def _all_of(tree: Tree) -> Iterator[Tree]:
    yield tree
    for below in tree.inside:
        yield from _all_of(below)


def _by_dtype(params: list[Owned]) -> list[list[Owned]]:
    found: dict[torch.dtype, list[Owned]] = {}
    for each in params:
        found.setdefault(each.dtype, []).append(each)
    return list(found.values())


def _planned(
    name: str, params: list[Owned], ranks: Ranks, request: PlanRequest, memory: Memory
) -> PlannedUnit:
    dtype = params[0].dtype
    gather = (request.param_dtype or dtype) if dtype.is_floating_point else dtype
    reduce = (request.reduce_dtype or gather) if dtype.is_floating_point else dtype
    return PlannedUnit(name, params, ranks, gather, reduce, memory)


def _rows(each: Owned, request: PlanRequest) -> tuple[int, ...]:
    return () if each.is_number else ShardLayout(each.shape, request.shard).shape_of(request.rank)


def _rest(
    tree: Tree, groups: dict[str, list[PlannedUnit]], request: PlanRequest
) -> tuple[dict[str, int], Usage]:
    """Bytes of optimizer state by unit, and what is in host memory."""
    sizes = StateSizes(request.optimizer)
    state = {
        unit.name: sum(sizes.of(_rows(p, request), p.dtype) for p in unit.params if p.trained)
        for unit in _all_of(tree)
    }
    if not request.offload:
        return state, Usage()
    every = [group for below in groups.values() for group in below]
    return state, Usage(
        sharded=sum(group.shard_nbytes for group in every),
        gradients=sum(group.grad_shard_nbytes for group in every),
        optimizer=sum(state.values()),
    )


def _activations(model: nn.Module, tree: Tree, request: PlanRequest) -> Activations:
    if not request.inputs:
        return {}
    inside = {
        ("" if unit is tree else unit.name): [below.name for below in unit.inside]
        for unit in _all_of(tree)
    }
    return saved_by(model, inside, request.inputs, request.param_dtype)


class _Step:
    """One training step: what the hooks would tell the schedule, in the order of the model."""

    def __init__(
        self,
        schedule: Schedule,
        memory: Memory,
        groups: dict[str, list[PlannedUnit]],
        saved: Activations,
    ) -> None:
        self._schedule = schedule
        self._memory = memory
        self._groups = groups
        self._saved = saved

    def run(self, tree: Tree) -> None:
        self._schedule.begin_forward()
        self._forward(tree)
        self._schedule.end_forward()
        self._backward(tree)
        self._end_backward(tree)

    def zero_grad(self) -> None:
        for groups in self._groups.values():
            for group in groups:
                group.zero_grad()

    def _forward(self, unit: Tree) -> None:
        groups = self._groups[unit.name]
        self._memory.moment = f"in forward of {unit.name}"
        for group in groups:
            self._schedule.pre_forward(group)
        for position, below in enumerate(unit.inside):
            self._save(unit, position)
            self._forward(below)
            self._memory.moment = f"in forward of {unit.name}"
        self._save(unit, len(unit.inside))
        for group in groups:
            self._schedule.post_forward(group, grads_wanted=True)

    def _save(self, unit: Tree, position: int, *, sign: int = 1) -> None:
        name = "" if unit.name == "(root)" else unit.name
        nbytes = self._saved.get(name, {}).get(position, 0)
        self._memory.add("activations", unit.name, sign * nbytes)

    def _backward(self, unit: Tree) -> None:
        self._memory.moment = f"in backward of {unit.name}"
        for group in self._groups[unit.name]:
            self._schedule.pre_backward(group)
        self._save(unit, len(unit.inside), sign=-1)
        for position in reversed(range(len(unit.inside))):
            below = unit.inside[position]
            self._backward(below)
            self._finish(below)
            self._memory.moment = f"in backward of {unit.name}"
            self._save(unit, position, sign=-1)

    def _finish(self, unit: Tree) -> None:
        groups = self._groups[unit.name]
        self._memory.moment = f"at the end of backward of {unit.name}"
        for group in groups:
            group.compute_grads()
        for group in groups:
            self._schedule.post_backward(group)

    def _end_backward(self, root: Tree) -> None:
        self._memory.moment = "at the end of backward"
        for group in self._groups[root.name]:
            group.compute_grads()
        self._schedule.end_backward()


def _usage(by_kind: dict[str, int]) -> Usage:
    return replace(Usage(), **{kind: nbytes for kind, nbytes in by_kind.items() if nbytes})


def _unit(unit: Tree, memory: Memory, request: PlanRequest) -> UnitPlan:
    own = 0
    for each in unit.params:
        first, end = ShardLayout(each.shape, request.shard).rows_of(request.rank)
        own += (end - first) * ShardLayout(each.shape, request.shard).row_numel
    return UnitPlan(
        unit=unit.name,
        parameters=sum(each.numel for each in unit.params),
        own=own,
        most=_usage({kind: memory.most[kind, unit.name] for kind in _KINDS}),
        sent={
            collective: nbytes
            for (name, collective), nbytes in memory.sent.items()
            if name == unit.name
        },
    )


def _notes(request: PlanRequest) -> Iterator[str]:
    if request.inputs:
        yield "activations are those that autograd saves, without a loss and temporaries"
    else:
        yield "activations are not counted: give the shape of a batch"
    yield "not counted: temporaries of kernels and of the optimizer, the allocator's own"

"""What the engine reports of its memory, on real ranks, against the sizes of the model."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from trine.core import tracing
from trine.core.tracing import TraceEvent, add_sink, remove_sink
from trine.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from trine.distributed.testing import run_on_ranks

ROWS = (7, 5, 6)  # of the three layers: uneven over 2 ranks
SIZES = (4, *ROWS)
UNITS = ("0", "1", "(root)")
NUMELS = {unit: ROWS[i] * (SIZES[i] + 1) for i, unit in enumerate(UNITS)}

Key = tuple[str, str]  # kind and unit


def part_numel(unit: str, world_size: int) -> int:
    """Elements of one rank's part of a layer: weight and bias, cut by rows, padded."""
    index = UNITS.index(unit)
    return -(-ROWS[index] // world_size) * (SIZES[index] + 1)


class Keep:
    def __init__(self) -> None:
        self.events: list[TraceEvent] = []

    def record(self, event: TraceEvent) -> None:
        self.events.append(event)


def train(
    param_dtype: torch.dtype | None = None,
) -> tuple[dict[Key, int], dict[Key, int], dict[str, int]]:
    """The largest and the last value of each counter of the second step, and states' elements."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(SIZES[i], SIZES[i + 1]) for i in range(3)))
    policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=torch.float32)
    for module in (model[0], model[1], model):
        fully_shard(module, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters())
    keep = Keep()
    add_sink(keep)
    for step in range(2):
        tracing.set_step(step)
        optimizer.zero_grad()
        model(torch.ones(2, 4)).float().sum().backward()
        optimizer.step()
    remove_sink(keep)
    peaks: dict[Key, int] = {}
    last: dict[Key, int] = {}
    for event in keep.events:
        if event.kind == "counter" and event.step == 1:
            assert event.category == "mem"
            key = event.name.removeprefix("memory."), event.unit
            last[key] = int(event.value)
            peaks[key] = max(peaks.get(key, 0), last[key])
    own = {
        unit: sum(
            param.to_local().numel()
            for param in model[index].parameters()
            if isinstance(param, DTensor)
        )
        for index, unit in enumerate(UNITS)
    }
    return peaks, last, own


@pytest.mark.parametrize("param_dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("world_size", [1, 2])
def test_each_unit_reports_the_bytes_that_follow_from_its_sizes(
    world_size: int, param_dtype: torch.dtype | None
) -> None:
    computed = 2 if param_dtype is torch.bfloat16 else 4

    for peaks, last, own in run_on_ranks(train, world_size, param_dtype):
        for unit in UNITS:
            part = part_numel(unit, world_size)
            assert peaks["sharded", unit] == last["sharded", unit] == 4 * part
            assert peaks["unsharded", unit] == computed * world_size * part
            assert last["unsharded", unit] == 0
            assert peaks["gradients", unit] == max(computed * NUMELS[unit], 4 * part)
            assert last["gradients", unit] == 4 * part
            # Two moments for each element, and a count of steps for weight and bias.
            assert last["optimizer", unit] == 4 * (2 * own[unit] + 2)


@pytest.mark.parametrize("world_size", [1, 2])
def test_borrowed_buffers_are_their_units_and_idle_ones_nobodys(world_size: int) -> None:
    for peaks, last, _ in run_on_ranks(train, world_size):
        for unit in UNITS:
            # What is sent, with a mark for weight and bias each; and what gloo receives.
            sent = 4 * world_size * (part_numel(unit, world_size) + 2)
            assert peaks["communication", unit] == (sent if world_size == 1 else 2 * sent)
            assert last["communication", unit] == 0
        assert peaks["communication", ""] > 0
        assert last["communication", ""] == 0


def test_gradients_and_whole_parameters_are_seen_at_once_where_a_backward_ends() -> None:
    body = run_on_ranks(moments, 1)[0]

    assert ("unsharded", 4 * NUMELS["0"]) in body
    assert ("gradients", 4 * NUMELS["0"]) in body
    grown = body.index(("gradients", 4 * NUMELS["0"]))
    freed = [i for i, each in enumerate(body) if each == ("unsharded", 0)]
    assert grown < freed[-1]


def moments() -> list[tuple[str, int]]:
    """What unit 0 reports of parameters and gradients, in order."""
    model = nn.Sequential(nn.Linear(SIZES[0], SIZES[1]))
    fully_shard(model[0])
    fully_shard(model)
    keep = Keep()
    add_sink(keep)
    model(torch.ones(2, 4)).sum().backward()
    remove_sink(keep)
    return [
        (event.name.removeprefix("memory."), int(event.value))
        for event in keep.events
        if event.kind == "counter" and event.unit == "0"
    ]


def two_dtypes() -> list[int]:
    """What a unit with two groups of parameters reports of its shards."""
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False).double())
    fully_shard(model)
    keep = Keep()
    add_sink(keep)
    with contextlib.suppress(RuntimeError):  # two dtypes in one product, after the gather
        model(torch.ones(2, 4))
    remove_sink(keep)
    return [int(event.value) for event in keep.events if event.name == "memory.sharded"]


def test_groups_of_one_unit_are_told_together() -> None:
    assert run_on_ranks(two_dtypes, 1)[0][-1] == 16 * (4 + 8)

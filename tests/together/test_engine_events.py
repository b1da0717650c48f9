"""What the engine emits on real ranks: names, bytes and order against closed forms."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import nn

from trine.core import tracing
from trine.core.tracing import TraceEvent, add_sink, remove_sink
from trine.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from trine.distributed.testing import run_on_ranks

STEPS = 3
ROWS = (7, 5, 6)  # of the three layers: uneven over 2 and 3 ranks


def build() -> nn.Sequential:
    torch.manual_seed(0)
    sizes = (4, *ROWS)
    return nn.Sequential(*(nn.Linear(sizes[i], sizes[i + 1]) for i in range(3)))


def part_numels(world_size: int) -> list[int]:
    """Elements of one rank's part of each layer: weight and bias, cut by rows, padded."""
    sizes = (4, *ROWS)
    return [-(-sizes[i + 1] // world_size) * (sizes[i] + 1) for i in range(3)]


class Keep:
    def __init__(self) -> None:
        self.events: list[TraceEvent] = []

    def record(self, event: TraceEvent) -> None:
        self.events.append(event)


def train(param_dtype: torch.dtype | None = None) -> list[tuple[str, str, int, int, int, int]]:
    """(name, unit, step, nbytes, start, end) of every communication of STEPS steps."""
    model = build()
    policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=torch.float32)
    fully_shard(model[0], mp_policy=policy)
    fully_shard(model[1], mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    keep = Keep()
    add_sink(keep)
    for step in range(STEPS):
        tracing.set_step(step)
        model(torch.ones(2, 4)).float().sum().backward()
    remove_sink(keep)
    return [
        (e.name, e.unit, e.step, e.nbytes, e.start_ns, e.end_ns)
        for e in keep.events
        if e.kind == "async" and e.category == "comm"
    ]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_each_unit_gathers_twice_and_reduces_once_a_step_and_the_root_gathers_once(
    world_size: int,
) -> None:
    for events in run_on_ranks(train, world_size):
        counts = Counter((name, unit, step) for name, unit, step, *_ in events)
        for step in range(STEPS):
            assert counts["all_gather", "0", step] == counts["all_gather", "1", step] == 2
            assert counts["all_gather", "(root)", step] == 1
            for unit in ("0", "1", "(root)"):
                assert counts["reduce_scatter", unit, step] == 1


@pytest.mark.parametrize("param_dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_bytes_are_the_least_that_sharding_needs(
    world_size: int, param_dtype: torch.dtype | None
) -> None:
    gathered = 2 if param_dtype is torch.bfloat16 else 4
    for events in run_on_ranks(train, world_size, param_dtype):
        for name, unit, _, nbytes, *_ in events:
            part = part_numels(world_size)[{"0": 0, "1": 1, "(root)": 2}[unit]]
            if name == "all_gather":
                assert nbytes == (world_size - 1) * part * gathered
            else:
                # One mark for each of the two parameters goes along; sums are in fp32.
                assert nbytes == (world_size - 1) * (part + 2) * 4


def starts(events: list[tuple[str, str, int, int, int, int]], step: int) -> list[str]:
    this_step = [e for e in events if e[2] == step]
    return [f"{name} {unit}" for name, unit, *_ in sorted(this_step, key=lambda e: e[4])]


def test_collectives_start_in_the_same_order_on_every_rank_and_in_every_step() -> None:
    orders = [[starts(events, step) for step in range(STEPS)] for events in run_on_ranks(train, 2)]

    assert orders[0] == orders[1]
    backward = [
        "all_gather 1",
        "all_gather 0",
        "reduce_scatter 1",
        "reduce_scatter 0",
        "reduce_scatter (root)",
    ]
    forward = ["all_gather (root)", "all_gather 0", "all_gather 1"]
    assert orders[0] == [forward + backward] * STEPS


def test_a_communication_ends_after_it_starts() -> None:
    for events in run_on_ranks(train, 2):
        assert events
        for *_, start_ns, end_ns in events:
            assert start_ns < end_ns

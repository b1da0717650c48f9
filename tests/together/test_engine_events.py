"""What the engine emits on real ranks: names, bytes and order against closed forms."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from trine.core import tracing
from trine.core.tracing import TraceEvent, add_sink, remove_sink
from trine.distributed.fsdp import MixedPrecisionPolicy, clip_grad_norm_, fully_shard
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


Row = tuple[str, str, str, int, int, int, dict[str, Any]]
"""Kind, name, unit, step, start, end and attributes of an event."""


def train_and_clip() -> list[Row]:
    """Every communication event of STEPS steps that clip gradients."""
    model = build()
    fully_shard(model[0])
    fully_shard(model)
    keep = Keep()
    add_sink(keep)
    for step in range(STEPS):
        tracing.set_step(step)
        model(torch.ones(2, 4)).sum().backward()
        clip_grad_norm_(model.parameters(), 1.0)
    remove_sink(keep)
    return [
        (e.kind, e.name, e.unit, e.step, e.start_ns, e.end_ns, dict(e.args or {}))
        for e in keep.events
        if e.category == "comm"
    ]


def test_each_collective_is_reported_as_it_starts_is_waited_for_and_is_through() -> None:
    for events in run_on_ranks(train_and_clip, 2):
        by_number: dict[tuple[str, int], list[Row]] = {}
        for event in events:
            by_number.setdefault((event[6]["group"], event[6]["seq"]), []).append(event)

        assert {group for group, _ in by_number} == {events[0][6]["group"]}
        assert sorted(number for _, number in by_number) == list(range(1, len(by_number) + 1))
        for start, wait, through in by_number.values():
            operation = start[6]["op"]
            assert [start[0], wait[0], through[0]] == ["instant", "span", "async"]
            assert start[1] == f"start {operation}"
            assert wait[1] == f"wait {operation}"
            assert through[1] == operation
            assert start[2] == wait[2] == through[2]
            asked_ns = through[6]["enqueue_ns"]
            assert start[4] <= asked_ns <= through[4] <= through[5]
            assert asked_ns <= wait[4]
            for name in ("op", "dtype", "backend"):
                assert start[6][name] == wait[6][name] == through[6][name]


def test_the_norm_of_the_gradients_is_a_collective_of_no_unit() -> None:
    for events in run_on_ranks(train_and_clip, 2):
        norms = [event for event in events if event[6]["op"] == "all_reduce"]

        assert [event[0] for event in norms] == ["instant", "span", "async"] * STEPS
        assert {event[2] for event in norms} == {""}


def test_the_start_says_what_moves_and_once_for_each_step_among_whom() -> None:
    for events in run_on_ranks(train_and_clip, 2):
        starts = [event for event in events if event[0] == "instant"]

        gather = next(e for e in starts if e[1] == "start all_gather" and e[2] == "0")
        assert gather[6]["elements"] == 2 * part_numels(2)[0]
        members = [(event[3], event[6]["ranks"]) for event in starts if "ranks" in event[6]]
        assert members == [(step, [0, 1]) for step in range(STEPS)]


def test_one_rank_alone_names_no_group() -> None:
    (events,) = run_on_ranks(train_and_clip, 1)

    assert events
    assert all("group" not in event[6] and "seq" not in event[6] for event in events)


def begin_without_rank_1() -> list[Row]:
    """What rank 0 has reported when rank 1 does not come to a gather."""
    model = build()
    fully_shard(model)
    keep = Keep()
    add_sink(keep)
    model(torch.ones(2, 4))  # all compare what they have sharded
    model.reshard()  # type: ignore[operator]  # of FSDPModule
    before = len(keep.events)
    if dist.get_rank() == 0:
        model.unshard(async_op=True)  # type: ignore[operator]
    seen = [event for event in keep.events[before:] if event.category == "comm"]
    if dist.get_rank() == 1:
        model.unshard(async_op=True)  # type: ignore[operator]
    model.reshard()  # type: ignore[operator]
    remove_sink(keep)
    return [(e.kind, e.name, e.unit, e.step, 0, 0, dict(e.args or {})) for e in seen]


def test_what_was_begun_is_known_before_it_ends() -> None:
    rank_0, rank_1 = run_on_ranks(begin_without_rank_1, 2)

    assert [event[:3] for event in rank_0] == [("instant", "start all_gather", "(root)")]
    assert rank_1 == []

"""Layout is integers: these tests need no ranks, and tensors only to ask torch."""

from __future__ import annotations

from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trine.distributed._fsdp.layout import GroupLayout, ShardLayout

shapes = st.lists(st.integers(0, 9), min_size=1, max_size=3).map(tuple)


def test_seven_rows_over_three_ranks_leave_the_last_one_short() -> None:
    layout = ShardLayout((7, 2), world_size=3)

    assert [layout.rows_of(rank) for rank in range(3)] == [(0, 3), (3, 6), (6, 7)]
    assert layout.chunk_numel == 6
    assert layout.shape_of(2) == (1, 2)


def test_fewer_rows_than_ranks_leave_empty_shards() -> None:
    layout = ShardLayout((2,), world_size=4)

    assert [layout.shape_of(rank) for rank in range(4)] == [(1,), (1,), (0,), (0,)]


@given(shapes, st.integers(1, 7))
def test_every_row_is_held_by_exactly_one_rank(shape: tuple[int, ...], world_size: int) -> None:
    layout = ShardLayout(shape, world_size)

    held = [row for rank in range(world_size) for row in range(*layout.rows_of(rank))]

    assert held == list(range(shape[0]))


@given(shapes, st.integers(1, 7))
def test_rows_are_dealt_as_by_torch_chunk(shape: tuple[int, ...], world_size: int) -> None:
    layout = ShardLayout(shape, world_size)

    chunks = [tuple(chunk.shape) for chunk in torch.empty(shape).chunk(world_size)]

    # torch.chunk leaves empty chunks out, except that it makes one of a tensor without rows.
    chunks += [(0, *shape[1:])] * (world_size - len(chunks))
    assert [layout.shape_of(rank) for rank in range(world_size)] == chunks


@given(shapes, st.integers(1, 7))
def test_no_rank_holds_more_than_a_chunk(shape: tuple[int, ...], world_size: int) -> None:
    layout = ShardLayout(shape, world_size)

    for rank in range(world_size):
        assert prod(layout.shape_of(rank)) <= layout.chunk_numel
    assert layout.chunk_numel * world_size >= layout.numel


@given(st.lists(shapes, min_size=1, max_size=5), st.integers(1, 5), st.integers(0, 3))
def test_chunks_of_a_group_lie_end_to_end_with_the_extra_elements_behind(
    group: list[tuple[int, ...]], world_size: int, extra: int
) -> None:
    layout = GroupLayout([ShardLayout(shape, world_size) for shape in group], extra)

    ends = [
        offset + numel for offset, numel in zip(layout.offsets, layout.chunk_numels, strict=True)
    ]

    assert layout.offsets == [0, *ends[:-1]]
    assert layout.shard_numel == ends[-1]
    assert layout.part_numel == ends[-1] + extra


@given(st.lists(shapes, min_size=1, max_size=5), st.integers(1, 5))
def test_no_two_parameters_share_an_element_of_a_buffer(
    group: list[tuple[int, ...]], world_size: int
) -> None:
    layout = GroupLayout([ShardLayout(shape, world_size) for shape in group])

    for rank in range(world_size):
        held = [
            element
            for shard, offset in zip(layout.shards, layout.offsets, strict=True)
            for element in range(offset, offset + prod(shard.shape_of(rank)))
        ]
        assert len(held) == len(set(held))
        assert all(0 <= element < layout.shard_numel for element in held)


def test_a_parameter_without_dims_is_refused() -> None:
    with pytest.raises(ValueError, match="without dims"):
        ShardLayout((), world_size=2)


def test_a_world_without_ranks_is_refused() -> None:
    with pytest.raises(ValueError, match="world_size must be at least 1, got 0"):
        ShardLayout((3,), world_size=0)

"""init_mesh: the ranks of the world on named axes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from trine.distributed import destroy_process_group, init_mesh, init_process_group
from trine.distributed.mesh import MeshAxes

RunOnRanks = Callable[..., list[Any]]


@pytest.fixture(autouse=True)
def world_of_one() -> Iterator[None]:
    init_process_group("gloo")
    yield
    destroy_process_group()


def coordinates(axes: dict[str, int] | None) -> tuple[tuple[str, ...], list[int]]:
    mesh = init_mesh(axes)
    assert mesh.mesh_dim_names is not None
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    return mesh.mesh_dim_names, list(coordinate)


def test_by_default_every_rank_is_on_the_shard_axis(run_on_ranks: RunOnRanks) -> None:
    names_and_coordinates = run_on_ranks(coordinates, 3, None)

    assert names_and_coordinates == [(("shard",), [rank]) for rank in range(3)]


def test_the_last_axis_holds_neighbouring_ranks(run_on_ranks: RunOnRanks) -> None:
    results = run_on_ranks(coordinates, 4, {"replicate": 2, "shard": 2})

    assert [coordinate for _, coordinate in results] == [[0, 0], [0, 1], [1, 0], [1, 1]]


def test_a_mesh_uses_the_device_that_its_backend_moves() -> None:
    assert init_mesh().device_type == "cpu"


def test_a_mesh_starts_the_process_group_if_nobody_has() -> None:
    destroy_process_group()

    mesh = init_mesh(device="cpu")

    assert dist.get_backend() == "gloo"
    assert mesh.size() == 1


@pytest.mark.parametrize(
    ("axes", "told"),
    [
        ({"shard": 2}, r"\(shard=2\) holds 2 ranks, but the world has 1\. Start 2"),
        ({"replicate": 2, "shard": 3}, r"\(replicate=2 x shard=3\) holds 6 ranks"),
        ({"shard": 0}, r"\(shard=0\) is empty"),
        ({}, "is empty"),
    ],
)
def test_a_mesh_that_does_not_fit_the_world_is_refused(axes: dict[str, int], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        init_mesh(axes)


@pytest.mark.parametrize(
    ("rank", "axis", "neighbours"),
    [(0, "inner", [0, 1]), (3, "inner", [2, 3]), (6, "inner", [6, 7]), (7, "outer", [5, 7])],
)
def test_a_subgroup_is_of_neighbours_on_the_shard_axis_and_made_once(
    rank: int, axis: str, neighbours: list[int]
) -> None:
    destroy_process_group()
    # Eight ranks, of which only this one exists: nothing is sent.
    dist.init_process_group("fake", rank=rank, world_size=8, store=FakeStore())
    sizes = {"inner": {"copies": 2, "inner": 4}, "outer": {"outer": 4, "copies": 2}}
    mesh = init_mesh(sizes[axis], device="cpu")[axis]

    subgroup = MeshAxes.of(mesh).shard_subgroup(2)

    assert dist.get_process_group_ranks(subgroup) == neighbours
    assert MeshAxes.of(mesh).shard_subgroup(2) is subgroup

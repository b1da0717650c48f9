"""Both kinds of Comm against closed forms, on every world size."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from trine.distributed import testing
from trine.distributed._fsdp.buffers import BufferPool
from trine.distributed._fsdp.collectives import (
    LARGE_NBYTES,
    C10dComm,
    Comm,
    GlooComm,
    LocalComm,
    MPIComm,
    comm_for,
)

RunOnRanks = Callable[..., list[Any]]
CPU = torch.device("cpu")
LARGE = LARGE_NBYTES  # elements of any dtype, in rows that travel otherwise than small ones

everywhere = pytest.mark.parametrize("world_size", [1, 2, 3, 4])
every_comm = pytest.mark.parametrize(
    "kind",
    [MPIComm, C10dComm] if os.environ.get("TRINE_TEST_BACKEND") == "mpi" else [GlooComm, C10dComm],
)


def world_group() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def gather(kind: type[GlooComm] | type[C10dComm], columns: int, in_place: bool) -> None:
    comm = kind(world_group(), BufferPool())
    out = torch.full((comm.world_size, columns), -1.0)
    shard = out[comm.rank] if in_place else torch.empty(columns)
    pattern = torch.arange(columns) % 7
    shard.copy_(pattern + 10 * comm.rank)

    comm.all_gather(out, shard).wait()

    expected = pattern + 10 * torch.arange(float(comm.world_size))[:, None]
    torch.testing.assert_close(out, expected, rtol=0, atol=0)


@everywhere
@every_comm
@pytest.mark.parametrize("columns", [5, LARGE])
@pytest.mark.parametrize("in_place", [True, False])
def test_row_r_of_an_all_gather_is_the_shard_of_rank_r(
    run_on_ranks: RunOnRanks, world_size: int, kind: type[Comm], columns: int, in_place: bool
) -> None:
    run_on_ranks(gather, world_size, kind, columns, in_place)


def reduce(
    kind: type[GlooComm] | type[C10dComm], columns: int, sent: torch.dtype, wanted: torch.dtype
) -> None:
    comm = kind(world_group(), BufferPool())
    ranks = comm.world_size
    rows = comm.pool.acquire((ranks, columns), sent, CPU)
    # Small integers: exact in every dtype here. Row q of rank r holds r + 10 q + column % 4.
    pattern = torch.arange(columns) % 4
    rows.copy_(comm.rank + 10 * torch.arange(ranks)[:, None] + pattern[None])
    out = torch.empty(columns, dtype=wanted)

    reduction = comm.reduce_scatter(rows)
    reduction.wait()
    reduction.sum_into(out, 1 / ranks)

    mean_rank = sum(range(ranks)) / ranks
    expected = (mean_rank + 10 * comm.rank + pattern.float()).to(wanted)
    torch.testing.assert_close(out, expected)


def gather_from_others() -> None:
    comm = GlooComm(world_group(), BufferPool())
    shard = torch.full((LARGE,), float(comm.rank))
    out = torch.full((comm.world_size - 1, LARGE), -1.0)
    assert comm.gathers_others_only(shard)

    comm.all_gather(out, shard).wait()

    others = [float(rank) for rank in range(comm.world_size) if rank != comm.rank]
    assert (out == torch.tensor(others)[:, None]).all()


def test_a_large_all_gather_of_gloo_can_do_without_the_own_row(run_on_ranks: RunOnRanks) -> None:
    run_on_ranks(gather_from_others, 3)


@everywhere
@every_comm
@pytest.mark.parametrize(
    ("sent", "wanted"),
    [
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.float64, torch.float64),
    ],
)
@pytest.mark.parametrize("columns", [4, LARGE])
def test_a_reduce_scatter_gives_each_rank_the_scaled_sum_of_its_row(
    run_on_ranks: RunOnRanks,
    world_size: int,
    kind: type[Comm],
    columns: int,
    sent: torch.dtype,
    wanted: torch.dtype,
) -> None:
    run_on_ranks(reduce, world_size, kind, columns, sent, wanted)


def sum_in_fp32() -> None:
    comm = comm_for(world_group(), BufferPool(), "cpu")
    # In bf16 256 + 1 is 256 again: a sum formed there would lose two of three ranks.
    value = 256.0 if comm.rank == 0 else 1.0
    rows = torch.full((3, 1), value, dtype=torch.bfloat16)
    out = torch.empty(1)

    comm.reduce_scatter(rows).sum_into(out, 1 / 3)

    assert out.item() == pytest.approx(258 / 3)


def test_half_types_are_summed_in_fp32(run_on_ranks: RunOnRanks) -> None:
    run_on_ranks(sum_in_fp32, 3)


def sum_to_the_bit(columns: int) -> None:
    comm = comm_for(world_group(), BufferPool(), "cpu")
    torch.manual_seed(0)
    for sent in (torch.float32, torch.bfloat16, torch.float64):
        everyone = torch.randn(3, 3, columns, dtype=torch.float64).to(sent)  # rank, row, column
        exact = torch.promote_types(sent, torch.float32)
        first, second, third = everyone[:, comm.rank].to(exact)
        total = (first + second + third) * (1 / 3)
        for wanted in (torch.float32, torch.bfloat16, torch.float64):
            rows = comm.pool.acquire((3, columns), sent, CPU)
            rows.copy_(everyone[comm.rank])
            out = torch.empty(columns, dtype=wanted)

            comm.reduce_scatter(rows).sum_into(out, 1 / 3)

            torch.testing.assert_close(out, total.to(wanted), rtol=0, atol=0)


@pytest.mark.parametrize("columns", [4, LARGE])
def test_sums_are_formed_in_the_order_of_ranks_scaled_and_rounded_once(
    run_on_ranks: RunOnRanks, columns: int
) -> None:
    run_on_ranks(sum_to_the_bit, 3, columns)


def reuse_buffers() -> int:
    comm = comm_for(world_group(), BufferPool(), "cpu")
    seen = set()
    for _ in range(5):
        rows = comm.pool.acquire((2, 1000), torch.float32, CPU).fill_(1.0)
        seen.add(rows.data_ptr())
        comm.reduce_scatter(rows).sum_into(torch.empty(1000), 0.5)
    return len(seen)


def test_a_reduction_gives_its_buffers_back(run_on_ranks: RunOnRanks) -> None:
    # One to send and one to receive, taking turns.
    assert all(count <= 2 for count in run_on_ranks(reuse_buffers, 2))


def buffers_of_a_large_reduction() -> int:
    comm = GlooComm(world_group(), BufferPool(keep_nbytes=2**30))
    rows = comm.pool.acquire((3, 2**20), torch.uint8, CPU).fill_(1)

    comm.reduce_scatter(rows).sum_into(torch.empty(2**20), 1.0)

    return comm.pool.idle_nbytes


def test_gloo_leaves_the_own_row_of_a_large_reduction_where_it_is(
    run_on_ranks: RunOnRanks,
) -> None:
    # Three rows to send, of which one stays, and room for two to come.
    assert run_on_ranks(buffers_of_a_large_reduction, 3) == [5 * 2**20] * 3


def chosen() -> str:
    return type(comm_for(world_group(), BufferPool(), "cpu")).__name__


def chosen_for_a_backend_for_each_kind() -> list[tuple[str, str]]:
    group = dist.new_group(backend="cpu:gloo,cuda:fake")
    assert isinstance(group, dist.ProcessGroup)
    comms = [comm_for(group, BufferPool(), kind) for kind in ("cpu", "cuda")]
    return [(type(comm).__name__, comm.backend) for comm in comms]


def test_groups_get_the_collectives_made_for_their_backend(
    run_on_ranks: RunOnRanks, backend: str
) -> None:
    assert run_on_ranks(chosen, 2) == [{"gloo": "GlooComm", "mpi": "MPIComm"}[backend]] * 2


def test_groups_with_several_backends_get_those_for_the_one_at_work() -> None:
    expected = [("GlooComm", "gloo"), ("C10dComm", "fake")]

    found = testing.run_on_ranks(chosen_for_a_backend_for_each_kind, 2)
    assert found == [expected, expected]


def test_a_rank_on_its_own_sends_nothing(run_on_ranks: RunOnRanks) -> None:
    assert run_on_ranks(chosen, 1) == ["LocalComm"]


def test_a_rank_on_its_own_gathers_and_sums_what_it_has() -> None:
    comm = LocalComm(BufferPool())
    out, summed = torch.empty(1, 3), torch.empty(3)

    comm.all_gather(out, torch.arange(3.0)).wait()
    rows = comm.pool.acquire((1, 3), torch.bfloat16, CPU).fill_(2.0)
    comm.reduce_scatter(rows).sum_into(summed, 0.5)

    assert out.tolist() == [[0.0, 1.0, 2.0]]
    assert summed.tolist() == [1.0, 1.0, 1.0]

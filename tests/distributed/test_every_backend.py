"""What holds on every backend, nccl too: tensors are made where the backend wants them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.distributed.small_training import train_like_the_unsharded_model
from trine.distributed.testing import most_ranks

RunOnRanks = Callable[..., list[Any]]

pytestmark = pytest.mark.devices
everywhere = pytest.mark.parametrize("world_size", [1, 2, 3, 4])


@pytest.fixture
def ranks(backend: str, world_size: int) -> int:
    """How many ranks; skips, and says so, where the machine cannot have them."""
    most = most_ranks(backend)
    if world_size > most:
        pytest.skip(f"{world_size} ranks over {backend}: this machine can run {most}")
    return world_size


def own_device() -> torch.device:
    on_gpu = dist.get_backend() == "nccl"
    return torch.device("cuda", dist.get_rank()) if on_gpu else torch.device("cpu")


def collectives() -> None:
    rank, ranks, device = dist.get_rank(), dist.get_world_size(), own_device()
    numbers = torch.arange(5.0, device=device)
    rows = [numbers + 10 * each for each in range(ranks)]  # what each rank holds

    total = rows[rank].clone()
    dist.all_reduce(total)
    assert torch.equal(total, torch.stack(rows).sum(0))

    gathered = [torch.empty(5, device=device) for _ in range(ranks)]
    dist.all_gather(gathered, rows[rank])
    assert torch.equal(torch.stack(gathered), torch.stack(rows))

    summed = torch.empty(5, device=device)
    dist.reduce_scatter(summed, [part + rank for part in rows])
    assert torch.equal(summed, ranks * rows[rank] + sum(range(ranks)))

    received = torch.empty(ranks, device=device)
    dist.all_to_all_single(received, torch.arange(ranks, device=device) + 10.0 * rank)
    assert torch.equal(received, 10.0 * torch.arange(ranks, device=device) + rank)

    last = rows[rank].clone()
    dist.broadcast(last, ranks - 1)
    assert torch.equal(last, rows[-1])


@everywhere
def test_collectives_give_what_they_promise(run_on_ranks: RunOnRanks, ranks: int) -> None:
    run_on_ranks(collectives, ranks)


def train() -> None:
    train_like_the_unsharded_model(own_device())


@everywhere
def test_a_sharded_model_trains_like_the_unsharded_one(
    run_on_ranks: RunOnRanks, ranks: int
) -> None:
    run_on_ranks(train, ranks)

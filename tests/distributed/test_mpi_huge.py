"""More than MPI can count in a C int: messages over 2 GiB, on two ranks, one after the other."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.distributed.test_c10d import all_gather_single, reduce_scatter_single

pytestmark = [
    pytest.mark.huge,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        os.environ.get("TRINE_TEST_BACKEND") != "mpi", reason="needs mpi4py and an MPI library"
    ),
]

NBYTES = 5 * 2**29  # 2.5 GiB
PERIOD = 251  # of what is sent; divides no power of two, so that a piece in a wrong place shows
CHUNK = PERIOD * 2**16  # is looked at at once: a copy of everything would take too much memory


def values(dtype: torch.dtype, seed: int, first: int = 0) -> Tensor:
    """Small numbers, `first` elements from the begin, for as many as a chunk."""
    return ((torch.arange(CHUNK) + first) % PERIOD + seed).remainder(100).to(dtype)


def filled(nbytes: int, dtype: torch.dtype, seed: int) -> Tensor:
    tensor = torch.empty(nbytes // dtype.itemsize, dtype=dtype)
    chunk = values(dtype, seed)
    for part in torch.split(tensor, CHUNK):
        part.copy_(chunk[: len(part)])
    return tensor


def assert_holds(tensor: Tensor, chunk: Tensor) -> None:
    assert all(torch.equal(part, chunk[: len(part)]) for part in torch.split(tensor, CHUNK))


def broadcast(rank: int) -> None:
    tensor = filled(NBYTES, torch.uint8, seed=rank)
    dist.broadcast(tensor, 1)
    assert_holds(tensor, values(torch.uint8, seed=1))


def message(rank: int) -> None:
    tensor = filled(NBYTES, torch.uint8, seed=rank)
    if rank == 1:
        dist.send(tensor, 0)
    else:
        dist.recv(tensor, 1)
    assert_holds(tensor, values(torch.uint8, seed=1))


def all_gather(rank: int) -> None:
    out = torch.empty(NBYTES, dtype=torch.uint8)
    all_gather_single(out, filled(NBYTES // 2, torch.uint8, seed=rank))
    for other, part in enumerate(out.chunk(2)):
        assert_holds(part, values(torch.uint8, seed=other))


def reduce_scatter(rank: int) -> None:
    rows = filled(NBYTES, torch.float32, seed=rank)
    out = torch.empty(rows.numel() // 2)
    reduce_scatter_single(out, rows)
    first = rank * out.numel()
    assert_holds(out, values(rows.dtype, 0, first) + values(rows.dtype, 1, first))


def all_reduce(rank: int) -> None:
    tensor = filled(NBYTES, torch.float32, seed=rank)
    dist.all_reduce(tensor)
    assert_holds(tensor, values(tensor.dtype, 0) + values(tensor.dtype, 1))


OPERATIONS = {each.__name__: each for each in (broadcast, message, all_gather)}
OPERATIONS |= {each.__name__: each for each in (reduce_scatter, all_reduce)}


def run(name: str) -> None:
    OPERATIONS[name](dist.get_rank())


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_message_of_more_than_2_gib_arrives_whole(
    run_on_ranks: Callable[..., list[Any]], name: str
) -> None:
    run_on_ranks(run, 2, name, timeout_s=600)

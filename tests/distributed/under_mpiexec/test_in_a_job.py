"""What runs in a job under mpiexec, against what MPI itself says and the unsharded model.

Each rank is a process of pytest: `mpiexec -n 3 python -m pytest --with-mpi` on this folder.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist

from tests.distributed.small_training import train_like_the_unsharded_model

if TYPE_CHECKING:
    from mpi4py import MPI

pytestmark = pytest.mark.mpi
NUMEL = 1000


@pytest.fixture
def comm() -> MPI.Intracomm:
    """All ranks, as mpi4py has them."""
    # Not at the top: importing it starts MPI, which only the ranks of a job may.
    from mpi4py import MPI

    return MPI.COMM_WORLD


def held(rank: int) -> array[float]:
    """What a rank holds; every value and every sum over ranks is exact in fp32."""
    return array("f", (float((7 * k + rank) % 50) for k in range(NUMEL)))


def tensor(values: array[float]) -> torch.Tensor:
    return torch.tensor(values.tolist())


def test_ranks_have_the_numbers_that_mpi_gave_them(comm: MPI.Intracomm) -> None:
    assert dist.get_backend() == "mpi4py"
    assert (dist.get_rank(), dist.get_world_size()) == (comm.rank, comm.size)


@pytest.mark.parametrize("name", ["SUM", "MAX", "MIN"])
def test_all_reduce_gives_what_mpi_gives(comm: MPI.Intracomm, name: str) -> None:
    from mpi4py import MPI

    expected = array("f", bytes(4 * NUMEL))
    comm.Allreduce(held(comm.rank), expected, op=getattr(MPI, name))
    own = tensor(held(comm.rank))

    dist.all_reduce(own, getattr(dist.ReduceOp, name))

    assert own.tolist() == expected.tolist()


def test_all_gather_gives_what_mpi_gives(comm: MPI.Intracomm) -> None:
    expected = comm.allgather(held(comm.rank).tolist())
    parts = [torch.empty(NUMEL) for _ in range(comm.size)]

    dist.all_gather(parts, tensor(held(comm.rank)))

    assert [part.tolist() for part in parts] == expected


def test_reduce_scatter_gives_what_mpi_gives(comm: MPI.Intracomm) -> None:
    whole = array("f", held(comm.rank).tolist() * comm.size)
    expected = array("f", bytes(4 * NUMEL))
    comm.Reduce_scatter_block(whole, expected)
    summed = torch.empty(NUMEL)

    dist.reduce_scatter(summed, list(torch.split(tensor(whole), NUMEL)))

    assert summed.tolist() == expected.tolist()


def test_all_to_all_gives_what_mpi_gives(comm: MPI.Intracomm) -> None:
    sent = [[float(comm.rank), float(to)] for to in range(comm.size)]
    expected = comm.alltoall(sent)
    received = torch.empty(comm.size, 2)

    dist.all_to_all_single(received, torch.tensor(sent))

    assert received.tolist() == expected


def test_broadcast_gives_what_mpi_gives_from_every_rank(comm: MPI.Intracomm) -> None:
    for root in range(comm.size):
        expected = comm.bcast(held(comm.rank).tolist(), root)
        own = tensor(held(comm.rank))

        dist.broadcast(own, root)

        assert own.tolist() == expected


@pytest.mark.mpi(min_size=2)
def test_messages_around_a_ring_arrive_as_over_mpi(comm: MPI.Intracomm) -> None:
    to, source = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    expected = comm.sendrecv(held(comm.rank).tolist(), to, source=source)
    received = torch.empty(NUMEL)

    sending = dist.isend(tensor(held(comm.rank)), to)
    dist.recv(received, source)

    assert sending is not None
    sending.wait()
    assert received.tolist() == expected


@pytest.mark.mpi(min_size=3)
def test_a_group_of_some_ranks_is_the_one_that_mpi_makes(comm: MPI.Intracomm) -> None:
    colour = comm.rank % 2
    expected = comm.Split(colour, comm.rank).allreduce(comm.rank)
    groups = [dist.new_group(list(range(c, comm.size, 2))) for c in (0, 1)]
    total = torch.tensor([comm.rank])

    dist.all_reduce(total, group=groups[colour])

    assert total.item() == expected


def test_objects_are_gathered_as_over_mpi(comm: MPI.Intracomm) -> None:
    own = {"rank": comm.rank, "text": "x" * comm.rank}
    gathered: list[Any] = [None] * comm.size

    dist.all_gather_object(gathered, own)

    assert gathered == comm.allgather(own)


def test_a_sharded_model_trains_like_the_unsharded_one() -> None:
    train_like_the_unsharded_model(torch.device("cpu"))

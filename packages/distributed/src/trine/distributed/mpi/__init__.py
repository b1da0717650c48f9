"""MPI as a backend of c10d, through mpi4py: for stock wheels of torch, which lack torch's own.

Nothing here is imported before a process group over MPI is asked for.
"""

from __future__ import annotations

from datetime import timedelta
from functools import cache
from typing import Any

import torch.distributed as dist
from mpi4py import MPI

from trine.core import TrineError
from trine.distributed.mpi.job import job
from trine.distributed.mpi.process_group import NAME, MPIProcessGroup, tag_of

__all__ = ["NAME", "end_is_reported", "join", "leave", "rank", "world_size"]


def rank() -> int:
    """Which rank of the job this process is."""
    return int(MPI.COMM_WORLD.rank)


def world_size() -> int:
    """How many ranks mpiexec has started; 1 without it."""
    return int(MPI.COMM_WORLD.size)


def end_is_reported() -> None:
    """Tell the other ranks that this one ends, and that whoever started it knows why."""
    job().end_is_reported()


def leave() -> None:
    """Say goodbye to the other ranks and to mpiexec, in a process that does not end as programs do.

    Programs do that as they end, by themselves.
    """
    job().leave()
    MPI.Finalize()


def join(timeout: timedelta) -> None:
    """Make the ranks of the job torch's default process group.

    Args:
        timeout: how long an operation may take, and one rank wait for another at the end.
    """
    _register()
    here = job()
    here.timeout = timeout
    dist.init_process_group(
        NAME,
        store=here.meeting_point(timeout),
        rank=rank(),
        world_size=world_size(),
        timeout=timeout,
    )
    # After torch has set its own, which prints into a buffer to name the rank.
    here.end_if_raised()


@cache
def _register() -> None:
    # With the plain form of a device, torch registers its letters.
    dist.Backend.register_backend(NAME, _make, extended_api=True, devices=["cpu"])


def _make(options: Any, _: object) -> MPIProcessGroup:
    """The group of some ranks; called on these only."""
    ranks = list(options.global_ranks_in_group)
    world = MPI.COMM_WORLD
    if ranks:
        # Groups of other ranks may be made at the same time; the tag keeps them apart.
        tag = tag_of(options.group_id)
        comm = world.Create_group(world.Get_group().Incl(ranks), tag)
    else:
        comm = world.Dup()
    if comm.rank != options.group_rank:
        raise TrineError(
            f"The ranks of the group {ranks or 'of all'} are in another order for MPI: rank "
            f"{options.group_rank} is {comm.rank} there. List ranks in ascending order."
        )
    return MPIProcessGroup(comm, options.timeout, options.store, job().progress)

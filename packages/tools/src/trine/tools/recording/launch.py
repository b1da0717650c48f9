"""Which rank this process is, from whoever knows: torch.distributed or the launcher."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Final

__all__ = ["find_rank", "launched_rank"]

_VARIABLES: Final = (
    ("RANK", "WORLD_SIZE"),  # torchrun
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),  # Open MPI
    ("PMI_RANK", "PMI_SIZE"),  # MPICH and Intel MPI
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),  # srun
)


def find_rank() -> tuple[int, int]:
    """This process's rank and the size of its world; 0 of 1 if nobody knows."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return launched_rank(os.environ) or (0, 1)


def launched_rank(environ: Mapping[str, str]) -> tuple[int, int] | None:
    """Rank and size of the world by the launcher's variables, None if it set none."""
    for rank_name, size_name in _VARIABLES:
        rank, size = environ.get(rank_name, ""), environ.get(size_name, "")
        if rank.isdecimal() and size.isdecimal() and int(rank) < int(size):
            return int(rank), int(size)
    return None

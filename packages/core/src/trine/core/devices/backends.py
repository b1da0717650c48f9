"""Which process group backend suits a device: by its kind, what is installed, who launched us.

Reads the launcher's environment and imports nothing to find out. It must not start
anything: that is trine.distributed's affair.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib.util import find_spec

import torch.distributed as dist

__all__ = ["BACKEND_VARIABLE", "accelerator_backend", "cpu_backend", "launched_by_mpi"]

BACKEND_VARIABLE = "TRINE_DIST_BACKEND"

_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# Open MPI; MPICH, Intel MPI and others of its family; launchers that speak PMIx.
_MPIEXEC = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MPI_LOCALNRANKS", "PMIX_RANK")


def launched_by_mpi(environ: Mapping[str, str] | None = None) -> bool:
    """Whether mpiexec started this process, and torchrun did not.

    Torchrun under mpiexec hands on mpiexec's variables, so torchrun's own decide. A script
    that sets them from mpiexec's wants torch's meeting point as well.
    """
    environ = os.environ if environ is None else environ
    if all(environ.get(name) for name in _TORCHRUN):
        return False
    return any(environ.get(name) for name in _MPIEXEC)


def cpu_backend() -> str:
    """`mpi` where mpiexec launched us and MPI can be reached, otherwise `gloo`."""
    if not launched_by_mpi():
        return "gloo"
    built_in = dist.is_available() and dist.is_mpi_available()
    return "mpi" if built_in or find_spec("mpi4py") is not None else "gloo"


def accelerator_backend(device_type: str) -> str:
    """The backend that torch has for this kind of device, or `gloo`."""
    if not dist.is_available():
        return "gloo"
    if device_type == "cuda":
        return "nccl" if dist.is_nccl_available() else "gloo"
    try:
        backend = dist.get_default_backend_for_device(device_type)
    except (ValueError, RuntimeError):  # no backend registered; a kind unknown to this torch
        return "gloo"
    return backend if dist.is_backend_available(backend) else "gloo"

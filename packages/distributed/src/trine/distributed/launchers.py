"""Which rank the launcher gave to this process, and where its ranks meet.

Known are torchrun and its variables, the mpiexec of Open MPI and of MPICH and its kin (Hydra),
and SLURM's srun. A plain `python` is one rank. Reads the environment; starts nothing.
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["Launch", "read_launch"]

_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_FIRST_PORT, _PORTS = 20_000, 12_000  # below what systems hand out by themselves


@dataclass(frozen=True)
class Launch:
    """What the launcher says.

    Attributes:
        launcher: its name, for messages.
        rank: of this process.
        world_size: how many ranks there are.
        local_rank: which of the ranks on this host; None if it does not say.
        local_world_size: how many of the ranks are on this host; None if it does not say.
        address: where the ranks meet; None if the launcher does not say.
        port: the same.
        job: what the ranks of this job, and of no other on this host, have in common; None if
            the ranks meet at `address`, or are not all on one host.
        by_variables: it sets the variables that torch itself reads, as torchrun does.
    """

    launcher: str
    rank: int
    world_size: int
    local_rank: int | None = None
    address: str | None = None
    port: int | None = None
    job: str | None = None
    by_variables: bool = False
    local_world_size: int | None = None


def read_launch(environ: Mapping[str, str] | None = None) -> Launch | None:
    """What launched this process; None for nothing that gives ranks.

    Args:
        environ: the environment; None for this process's.

    Raises:
        ValueError: if the variables contradict each other, or some of them are missing.
    """
    env = {key: value for key, value in (environ or os.environ).items() if value}
    found = _torchrun(env) or _open_mpi(env) or _hydra(env) or _slurm(env)
    if found is None:
        given = [name for name in _TORCHRUN if name in env]
        if given:
            missing = [name for name in _TORCHRUN if name not in env]
            raise ValueError(
                f"The environment sets {', '.join(given)} but not {', '.join(missing)}. Start the "
                "program with torchrun, which sets all four, or unset them all to run one rank."
            )
        return None
    if not 0 <= found.rank < found.world_size:
        raise ValueError(
            f"{found.launcher} gives this process the rank {found.rank} of {found.world_size}. "
            "Ranks count from 0 to the number of ranks minus 1: correct the variables, or start "
            "the program with torchrun, mpiexec or srun."
        )
    return found


def _torchrun(env: Mapping[str, str]) -> Launch | None:
    if "RANK" not in env or "WORLD_SIZE" not in env:
        return None
    if "MASTER_ADDR" not in env or "MASTER_PORT" not in env:
        return None
    address, port = _given_address(env)
    return Launch(
        "The environment (RANK, WORLD_SIZE)",
        _integer("RANK", env),
        _integer("WORLD_SIZE", env),
        _integer("LOCAL_RANK", env) if "LOCAL_RANK" in env else None,
        address,
        port,
        by_variables=True,
        local_world_size=_integer("LOCAL_WORLD_SIZE", env) if "LOCAL_WORLD_SIZE" in env else None,
    )


def _open_mpi(env: Mapping[str, str]) -> Launch | None:
    if "OMPI_COMM_WORLD_RANK" not in env or "OMPI_COMM_WORLD_SIZE" not in env:
        return None
    size = _integer("OMPI_COMM_WORLD_SIZE", env)
    here = _integer("OMPI_COMM_WORLD_LOCAL_SIZE", env, -1)
    address, port = _given_address(env)
    return Launch(
        "mpiexec of Open MPI",
        _integer("OMPI_COMM_WORLD_RANK", env),
        size,
        _integer("OMPI_COMM_WORLD_LOCAL_RANK", env, 0),
        address,
        port,
        env.get("PMIX_NAMESPACE", str(os.getppid())) if here == size else None,
        local_world_size=here if here > 0 else None,
    )


def _hydra(env: Mapping[str, str]) -> Launch | None:
    if "PMI_RANK" not in env or "PMI_SIZE" not in env:
        return None
    size = _integer("PMI_SIZE", env)
    here = _integer("MPI_LOCALNRANKS", env, -1)
    address, port = _given_address(env)
    return Launch(
        "mpiexec (Hydra)",
        _integer("PMI_RANK", env),
        size,
        _integer("MPI_LOCALRANKID", env, 0),
        address,
        port,
        # All ranks on one host are children of one proxy.
        f"hydra-{os.getppid()}" if here == size else None,
        local_world_size=here if here > 0 else None,
    )


def _slurm(env: Mapping[str, str]) -> Launch | None:
    # In a batch script, beside srun, SLURM_PROCID and SLURM_NTASKS are set too; this is not.
    if "SLURM_STEP_NUM_TASKS" not in env or "SLURM_PROCID" not in env:
        return None
    step = f"{env.get('SLURM_JOB_ID', '')}.{env.get('SLURM_STEP_ID', '')}"
    address, port = _given_address(env)
    nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST") or "localhost"
    if address is None:
        address = _first_host(nodes)
    if port is None:
        port = _FIRST_PORT + zlib.crc32(step.encode()) % _PORTS
    return Launch(
        "srun",
        _integer("SLURM_PROCID", env),
        _integer("SLURM_STEP_NUM_TASKS", env),
        _integer("SLURM_LOCALID", env, 0),
        address,
        port,
    )


def _first_host(nodes: str) -> str:
    """The first host of a list as SLURM writes it: `gpu[003-005,9],login1` begins with gpu003."""
    found = re.match(r"([^\[,]*)(?:\[([^\]\-,]*)[^\]]*\])?([^\[,]*)", nodes)
    assert found is not None
    return "".join(part or "" for part in found.groups())


def _given_address(env: Mapping[str, str]) -> tuple[str | None, int | None]:
    port = _integer("MASTER_PORT", env) if "MASTER_PORT" in env else None
    if port is not None and not 0 < port < 2**16:
        raise ValueError(f"MASTER_PORT={port} is not a port: expected a number from 1 to 65535.")
    return env.get("MASTER_ADDR"), port


def _integer(name: str, env: Mapping[str, str], default: int | None = None) -> int:
    if default is not None and name not in env:
        return default
    try:
        return int(env[name])
    except ValueError:
        raise ValueError(
            f"The environment sets {name}={env[name]!r}, which is not a whole number."
        ) from None

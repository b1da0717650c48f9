"""Run code on several ranks of this machine, as tests and small programs need it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, TypeVarTuple

from trine.distributed._launch import RanksFailed, check_world_size, launch, most_ranks

__all__ = ["RanksFailed", "check_world_size", "most_ranks", "run_on_ranks"]

R = TypeVar("R")
Ts = TypeVarTuple("Ts")


def run_on_ranks(
    body: Callable[[*Ts], R],
    world_size: int,
    *args: *Ts,
    backend: str = "gloo",
    timeout_s: float | None = 60.0,
) -> list[R]:
    """Call `body(*args)` in one new process per rank and collect what the ranks return.

    A process group is running while the body runs. The launcher's variables (`RANK`,
    `WORLD_SIZE`, ...) are set as under torchrun, or, over MPI, as under mpiexec. Each
    rank computes with one thread unless `OMP_NUM_THREADS` is set. Whatever happens, no
    process is left behind: ranks are stopped when one fails, at the time limit, on
    Ctrl-C, and when the launching process dies.

    A script that calls this needs `if __name__ == "__main__":` around the call, because
    the ranks import it to find the body.

    Args:
        body: a function at the top level of a module; test modules are fine.
        world_size: how many ranks to start.
        *args: what to call it with; must pickle, as must what it returns.
        backend: of the process group; over `"mpi"` the ranks are a job of `mpiexec`.
        timeout_s: how long all of it may take, in seconds; None sets no limit.

    Returns:
        What each rank returned, in the order of the ranks.

    Raises:
        RanksFailed: if a rank raises, dies, or is not done in time. The message starts
            with the rank that failed first and its traceback.
        ValueError: if the body cannot be found by name, or this machine cannot run so
            many ranks.
    """
    return launch(body, world_size, args, backend=backend, timeout_s=timeout_s)

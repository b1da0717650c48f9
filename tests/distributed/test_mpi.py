"""Jobs under mpiexec: they end as a whole, whatever happens to one rank, and say why."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.matrix.plugin import note_launch
from trine.distributed import init_mesh
from trine.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from trine.distributed.testing import run_on_ranks

pytestmark = pytest.mark.skipif(
    os.environ.get("TRINE_TEST_BACKEND") != "mpi", reason="needs mpi4py and an MPI library"
)

TIMEOUT_S = 6
PROGRAM = """
import os, signal, sys, time
from datetime import timedelta
import torch, torch.distributed as dist
from trine.distributed import init_process_group
init_process_group(os.environ.get("BACKEND"), timeout=timedelta(seconds={timeout}))
dist.barrier()
{rest}
"""


def mpiexec(world_size: int, rest: str, **environ: str) -> tuple[int, str, float]:
    """Run a program; returns its status, what it printed, and how long it took."""
    beside = Path(sys.executable).parent / "mpiexec"
    program = str(beside) if beside.exists() else shutil.which("mpiexec")
    assert program is not None
    started = time.monotonic()
    ended = subprocess.run(
        [program, "-n", str(world_size), sys.executable, "-c", code(rest)],
        env=os.environ
        | {"OMP_NUM_THREADS": "1", "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe"}
        | environ,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    if environ.get("BACKEND") != "gloo":
        note_launch("mpi", world_size)
    return ended.returncode, ended.stdout + ended.stderr, time.monotonic() - started


def code(rest: str) -> str:
    return PROGRAM.format(timeout=TIMEOUT_S, rest=rest)


def left_behind() -> set[str]:
    """Shared memory that no process will remove, since none has it; other jobs may run."""
    files = {file.name for file in Path("/dev/shm").iterdir()}
    mapped = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with suppress(OSError):  # ended meanwhile, or somebody else's
            mapped |= set(re.findall(r"/dev/shm/(\S+)", maps.read_text(errors="replace")))
    names = [name for name in files - mapped if "mpich" in name or "ompi" in name]
    return {name for name in names if Path("/dev/shm", name).exists()}


@pytest.mark.parametrize("backend", ["", "mpi", "gloo"], ids=["chosen", "over mpi", "over gloo"])
def test_the_script_for_torchrun_runs_under_mpiexec(backend: str) -> None:
    status, printed, _ = mpiexec(
        3,
        "t = torch.ones(()); dist.all_reduce(t)\n"
        "print(f'rank {dist.get_rank()}: {t.item():g} over {dist.get_backend()}')",
        **({"BACKEND": backend} if backend else {}),
    )

    assert status == 0, printed
    name = "gloo" if backend == "gloo" else "mpi4py"
    found = sorted(re.findall(r"rank \d: 3 over (?:gloo|mpi4py)", printed))
    assert found == [f"rank {rank}: 3 over {name}" for rank in range(3)]


ENDS = {
    "raises": ("raise RuntimeError('planted')", r"RuntimeError: planted"),
    "exits with 3": ("os._exit(3)", ""),
    "leaves early": ("sys.exit(0)", r"barrier #\d+ of group"),
    "is killed": ("os.kill(os.getpid(), signal.SIGKILL)", ""),
    "stays behind": ("time.sleep(1000)", r"barrier #\d+ of group \S+ \(3 ranks\) on rank [02]"),
}


@pytest.mark.parametrize("how", ENDS)
def test_a_rank_that_fails_ends_the_job_in_time(how: str) -> None:
    action, said = ENDS[how]
    before = left_behind()

    status, printed, took_s = mpiexec(
        3, f"if dist.get_rank() == 1:\n    {action}\nfor _ in range(3): dist.barrier()"
    )

    assert status != 0, printed
    assert re.search(said, printed), printed
    # Python and torch take seconds to start on a busy machine, before the time counts.
    assert took_s < TIMEOUT_S + 10 + 40
    assert left_behind() - before == set()


def test_after_a_failure_a_group_refuses_further_work_and_says_why() -> None:
    status, printed, _ = mpiexec(
        2,
        "if dist.get_rank() == 1: time.sleep(1000)\n"
        "try: dist.barrier()\nexcept dist.DistBackendError as error: print('first:', error)\n"
        "try: dist.all_reduce(torch.ones(1))\n"
        "except dist.DistBackendError as error: print('second:', error)",
    )

    assert status != 0
    assert re.search(r"first: mpi: barrier #1 of group .* was not complete after 6 s", printed)
    assert re.search(r"second: mpi: all_reduce #2 .* was refused, because barrier #1", printed)


def train(steps: int, reduce_dtype: torch.dtype | None) -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 17), nn.Tanh(), nn.Linear(17, 5), nn.Tanh(), nn.Linear(5, 1))
    policy = MixedPrecisionPolicy(reduce_dtype=reduce_dtype)
    mesh = init_mesh()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(steps):
        torch.manual_seed(10 * step + dist.get_rank())
        loss = model(torch.randn(8, 6)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("reduce_dtype", [None, torch.bfloat16])
def test_training_gives_the_same_bits_as_over_gloo(
    world_size: int, reduce_dtype: torch.dtype | None
) -> None:
    over_mpi = run_on_ranks(train, world_size, 4, reduce_dtype, backend="mpi")
    over_gloo = run_on_ranks(train, world_size, 4, reduce_dtype, backend="gloo")

    # The engine adds up in the order of ranks, on both.
    assert over_mpi == over_gloo


def test_a_composite_with_another_device_is_refused_in_words() -> None:
    from trine.distributed import init_process_group

    with pytest.raises(ValueError, match="cannot be combined with one of another device"):
        init_process_group("cpu:mpi,cuda:nccl")


def several_groups() -> float:
    total = torch.ones(())
    for _ in range(20):
        group = dist.new_group([0, 1])
        dist.all_reduce(total, group=group)
        dist.destroy_process_group(group)
    return total.item()


def test_groups_can_be_made_and_given_back(run_on_ranks: Callable[..., list[Any]]) -> None:
    assert run_on_ranks(several_groups, 2) == [2.0**20, 2.0**20]

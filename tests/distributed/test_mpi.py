"""Jobs under mpiexec: they end as a whole, whatever happens to one rank, and say why."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.matrix.plugin import note_launch
from trine.core import tracing
from trine.distributed import init_mesh
from trine.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from trine.distributed.testing import run_on_ranks

pytestmark = pytest.mark.skipif(
    os.environ.get("TRINE_TEST_BACKEND") != "mpi", reason="needs mpi4py and an MPI library"
)

TIMEOUT_S = 6
PROGRAM = """
import os, re, signal, sys, time
from datetime import timedelta
import torch, torch.distributed as dist
from trine.distributed import init_process_group
exec(os.environ.get("BEFORE", ""))
init_process_group(os.environ.get("BACKEND"), timeout=timedelta(seconds={timeout}))
print(set(re.findall(r"/dev/shm/[^ ]*", open("/proc/self/maps").read())), flush=True)
dist.barrier()
print(f"began at {{time.monotonic()}}", flush=True)
{rest}
"""


@contextmanager
def started(world_size: int, rest: str, **given: str) -> Iterator[subprocess.Popen[str]]:
    """A program under mpiexec; ended with the block."""
    beside = Path(sys.executable).parent / "mpiexec"
    program = str(beside) if beside.exists() else shutil.which("mpiexec")
    assert program is not None
    code = PROGRAM.format(timeout=TIMEOUT_S, rest=rest)
    environ = {"OMP_NUM_THREADS": "1", "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe"}
    with subprocess.Popen(
        [program, "-n", str(world_size), sys.executable, "-c", code],
        env=os.environ | environ | given,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()
    if given.get("BACKEND") != "gloo":
        note_launch("mpi", world_size)


def mpiexec(world_size: int, rest: str, **environ: str) -> tuple[int, str, float]:
    """Run a program; its status, what it printed, and how long it took once its ranks had met."""
    with started(world_size, rest, **environ) as process:
        printed, _ = process.communicate(timeout=100)
    began = max(float(at) for at in re.findall(r"began at ([\d.]+)", printed))
    return process.returncode, printed, time.monotonic() - began


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "in vain"
        time.sleep(0.05)


def left_behind(printed: str) -> list[str]:
    """What is left of the shared memory of the ranks that printed this."""
    shared = re.findall(r"/dev/shm/\w[\w.]*", printed)
    assert shared, "the ranks were to say which it is"
    return [name for name in shared if Path(name).exists()]


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


GONE = r"Rank 1 of 3 has ended before .* barrier #\d+ of group \S+ \(3 ranks\) on rank 0 waits"
ENDS = {
    "raises": ("raise RuntimeError('planted')", r"RuntimeError: planted"),
    "exits with 3": ("os._exit(3)", GONE),
    "exits with 0": ("os._exit(0)", GONE),
    "leaves early": ("sys.exit(0)", r"barrier #\d+ of group"),
    "is killed": ("os.kill(os.getpid(), signal.SIGKILL)", GONE),
    "stays behind": ("time.sleep(1000)", r"barrier #\d+ of group \S+ \(3 ranks\) on rank [02]"),
}


@pytest.mark.parametrize("how", ENDS)
def test_a_rank_that_fails_ends_the_job_in_time(how: str) -> None:
    action, said = ENDS[how]

    status, printed, took_s = mpiexec(
        3, f"if dist.get_rank() == 1:\n    {action}\nfor _ in range(3): dist.barrier()"
    )

    assert status != 0, printed
    assert re.search(said, printed), printed
    assert took_s < TIMEOUT_S + 10
    assert not left_behind(printed)


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


def test_a_rank_that_stays_behind_in_a_forward_is_waited_for_with_the_name_of_the_unit() -> None:
    status, printed, _ = mpiexec(
        2,
        "from torch import nn\nfrom trine.distributed.fsdp import fully_shard\n"
        "model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))\n"
        "for layer in model: fully_shard(layer)\n"
        "fully_shard(model)\n"
        "if dist.get_rank() == 1: model[0].register_forward_hook(lambda *_: time.sleep(1000))\n"
        "try: model(torch.ones(2, 4))\n"
        "except Exception as error: print(type(error).__name__, error)\n"
        "dist.barrier()",
    )

    assert status != 0
    waited = r"all_gather #\d+ \(FSDP unit 1\) of group \S+ \(2 ranks\) on rank 0 was not complete"
    missing = r"rank 0 of 2 \(#\d+ of group 0, ranks 0, 1\): rank 1 runs, but has not come"
    told = rf"CommError all_gather of 1 failed on {missing}.*mpi: {waited} after 6 s"
    assert re.search(told, printed, re.DOTALL), printed
    # And what the backend says by itself names the unit too.
    assert re.search(rf"DistBackendError: mpi: barrier .* was refused, because {waited}", printed)


@pytest.mark.parametrize("given", ["", "timeout=timedelta(seconds=2)"])
def test_a_monitored_barrier_names_the_ranks_that_have_not_come(given: str, tmp_path: Path) -> None:
    status, printed, _ = mpiexec(
        4,
        "from trine.distributed import monitored_barrier\nmonitored_barrier()\n"
        "if dist.get_rank() in (1, 3): time.sleep(1000)\n"
        f"try: monitored_barrier({given})\n"
        "except dist.DistBackendError as error: print('told:', error, flush=True)\n"
        # The first to go on ends the job: both must have told.
        f"from pathlib import Path; told = Path({str(tmp_path)!r})\n"
        "(told / str(dist.get_rank())).touch()\n"
        "while len(list(told.iterdir())) < 2: time.sleep(0.01)\n"
        "dist.barrier()",
    )

    assert status != 0
    seconds = 2 if given else 6
    for rank in (0, 2):
        assert re.search(
            rf"told: mpi: monitored_barrier #\d of group 0 \(4 ranks\) on rank {rank} was not "
            rf"complete after {seconds} s\. Ranks 1, 3 have not come",
            printed,
        ), printed
    assert re.search(r"barrier #\d .* was refused, because monitored_barrier #\d", printed)


def test_the_death_of_mpiexec_ends_the_ranks_and_leaves_no_shared_memory(tmp_path: Path) -> None:
    with started(
        2,
        "import pathlib\n"
        f"pathlib.Path({str(tmp_path)!r}, f'{{os.getpid()}}').touch()\n"
        "dist.recv(torch.ones(1), 1 - dist.get_rank())",
    ) as mpiexec:
        wait_until(lambda: len(list(tmp_path.iterdir())) == 2)

        mpiexec.kill()

        printed, _ = mpiexec.communicate(timeout=60)  # until no rank has it open any more
        ranks = [Path("/proc", file.name) for file in tmp_path.iterdir()]
        wait_until(lambda: not any(rank.exists() for rank in ranks))
        assert not left_behind(printed)


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


class Through:
    """Keeps when the collectives were asked for, taken up and complete."""

    def __init__(self) -> None:
        self.times_ns: list[tuple[int, int, int]] = []

    def record(self, event: tracing.TraceEvent) -> None:
        if event.kind == "async" and event.args is not None:
            asked_ns = event.args["enqueue_ns"]
            assert isinstance(asked_ns, int)
            self.times_ns.append((asked_ns, event.start_ns, event.end_ns))


def times_of_gathers_that_queue() -> list[tuple[int, int, int]]:
    through = Through()
    tracing.add_sink(through)
    model = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    model(torch.ones(1, 256))  # the second is asked for while the first is waited for
    tracing.remove_sink(through)
    return through.times_ns


def test_a_collective_is_reported_to_start_when_the_one_before_it_is_over() -> None:
    for first, second in run_on_ranks(times_of_gathers_that_queue, 2, backend="mpi"):
        assert first[0] <= first[1] <= first[2]
        assert second[0] <= second[1] <= second[2]
        assert first[2] <= second[1]


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


def destroy_with_work_queued() -> list[float]:
    tensors = [torch.full((100_000,), float(each)) for each in range(5)]
    for tensor in tensors:
        dist.all_reduce(tensor, async_op=True)
    dist.destroy_process_group()
    return [tensor[-1].item() for tensor in tensors]


def test_destroying_a_group_waits_for_the_work_that_is_queued(
    run_on_ranks: Callable[..., list[Any]],
) -> None:
    assert run_on_ranks(destroy_with_work_queued, 2) == [[0.0, 2.0, 4.0, 6.0, 8.0]] * 2


def test_groups_can_be_made_and_given_back(run_on_ranks: Callable[..., list[Any]]) -> None:
    assert run_on_ranks(several_groups, 2) == [2.0**20, 2.0**20]


def test_workers_that_fail_and_exceptions_that_were_caught_leave_the_job_alone() -> None:
    status, printed, _ = mpiexec(
        2,
        "import multiprocessing\n"
        "from trine.distributed.mpi.job import job\n"
        "for end in (lambda: 1 / 0, sys.exit, job().leave):\n"
        "    worker = multiprocessing.get_context('fork').Process(target=end)\n"
        "    worker.start(); worker.join()\n"
        "try: 1 / 0\n"
        "except ZeroDivisionError: sys.excepthook(*sys.exc_info())\n"
        "dist.barrier()\n"
        "print(f'rank {dist.get_rank()} went on')",
    )

    assert status == 0, printed
    assert set(re.findall(r"rank (\d) went on", printed)) == {"0", "1"}


@pytest.mark.parametrize("end", ["os._exit(3)", "time.sleep(1000)"])
def test_a_rank_that_never_comes_is_not_waited_for_for_ever(end: str) -> None:
    variables = ("PMI_RANK", "OMPI_COMM_WORLD_RANK")
    never = f"if '1' in map(os.environ.get, {variables}): {end}"

    with started(2, "", BEFORE=never) as process:
        printed, _ = process.communicate(timeout=100)

    assert process.returncode != 0, printed
    if "sleep" in end:  # else mpiexec may notice first
        assert "in _meet_all_ranks_over_mpi" in printed


CHANGES = {
    "p.requires_grad_(False)": "reduce_scatter of 0 (10 elements of float32)",
    "m.double()": "all_gather of 0 (72 elements of float64)",
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_size_that_one_rank_changes_is_refused_before_mpi_sees_it(change: str) -> None:
    status, printed, _ = mpiexec(
        2,
        "from torch import nn\n"
        "from trine.distributed.fsdp import fully_shard\n"
        "m = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))\n"
        "for layer in m: fully_shard(layer)\n"
        "fully_shard(m)\n"
        "def train(): m(torch.ones(2, 8)).sum().backward()\n"
        "train(); p = next(m.parameters())\n"
        f"if dist.get_rank() == 1: {change}\n"
        "for _ in range(3): train()",
    )

    # Some MPI libraries move what they are told, and let the larger part keep what it held.
    assert status != 0, printed
    assert f"rank 1: {CHANGES[change]}" in printed

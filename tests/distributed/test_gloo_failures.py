"""A rank that fails ends the whole gloo job in time, and the others say who, where and what.

The faults are planted in a training run, see `faulty`; the jobs are started by torchrun and,
without a launcher, as plain processes.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tests.distributed import faulty
from trine.distributed import testing
from trine.distributed.fsdp import (
    CommError,
    FullyShardedDataParallel,
    RanksDisagree,
    fully_shard,
)
from trine.distributed.ledger import ledgers

TIMEOUT_S = 5
START_S = 90  # for Python to import torch on all ranks of a busy machine
END_S = TIMEOUT_S + 10
BUSY_S = 10  # more, for the processes to be scheduled on such a machine


@dataclass
class Ended:
    """What is left of a job: exit statuses and what was printed, by process.

    Attributes:
        took_s: from the fault to the end of the last process.
    """

    statuses: list[int]
    said: list[str]
    left_in_tmp: list[str]
    took_s: float

    @property
    def all_said(self) -> str:
        return "\n".join(self.said)


def run_faulty(
    tmp_path: Path, fault: str, place: str, rank: int, world_size: int, copies: int, torchrun: bool
) -> Ended:
    """The job, which has to end by itself within the limits."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    program = [faulty.__file__, fault, place, str(rank), str(copies), str(TIMEOUT_S)]
    (tmp_path / "tmp").mkdir()
    environ = os.environ | {"OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path / "tmp")}
    commands = [[sys.executable, *program]] * world_size
    if torchrun:
        # It ends the survivors as soon as it has looked: looking less often than ten times a
        # second leaves them the time to notice by themselves, on a full machine too.
        launcher = ["-m", "torch.distributed.run", "--standalone", "--monitor-interval", "2"]
        commands = [[sys.executable, *launcher, "--nproc-per-node", str(world_size), *program]]
    else:
        environ |= {"WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    files = [(tmp_path / str(number)).open("w") for number in range(len(commands))]
    processes = [
        subprocess.Popen(
            command,
            env=environ | ({} if torchrun else {"RANK": str(number)}),
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        for number, (command, file) in enumerate(zip(commands, files, strict=True))
    ]
    deadline = time.monotonic() + START_S + END_S + BUSY_S
    try:
        statuses = [each.wait(max(0.1, deadline - time.monotonic())) for each in processes]
        ended_s = time.monotonic()  # the clock of all processes of a machine
        for each in processes:
            with pytest.raises(ProcessLookupError):  # nobody is left of its session
                os.killpg(each.pid, 0)
    finally:
        for each in processes:
            with suppress(ProcessLookupError):
                os.killpg(each.pid, signal.SIGKILL)
            each.wait()
        for file in files:
            file.close()
    said = [(tmp_path / str(number)).read_text() for number in range(len(commands))]
    # Caches of torch, and the empty log folder of torchrun, are theirs.
    left = [each.name for each in (tmp_path / "tmp").iterdir()]
    ours = [name for name in left if not name.startswith("torch")]
    planted = re.search(r"fault planted at (\S+)", "".join(said))
    assert planted, said
    return Ended(statuses, said, ours, ended_s - float(planted[1]))


GONE = r"rank {rank} did not answer: ended, killed, or out of reach"
RAISED = r"rank {rank} has ended, it raised ValueError: planted"
LATE = r"rank {rank} runs, but has not come"


@pytest.mark.parametrize(
    "torchrun",
    # Under torchrun only the last of it differs, and each job takes a quarter of a minute.
    [False, pytest.param(True, marks=pytest.mark.grid)],
    ids=["plain", "torchrun"],
)
@pytest.mark.parametrize(
    ("fault", "place", "operation", "cause"),
    [
        ("kill", "first gather", "all_gather of layers", GONE),
        ("raise", "gather", "all_gather of layers", RAISED),
        pytest.param(
            "exit 0",
            "reduce",
            "reduce_scatter of layers|all_gather of layers",
            GONE,
            marks=pytest.mark.grid,
        ),
        ("sleep", "reduce", "reduce_scatter of layers", LATE),
        pytest.param(
            "exit 3", "clip", "all_reduce of the gradient norm", GONE, marks=pytest.mark.grid
        ),
    ],
)
def test_the_job_ends_and_names_rank_operation_number_group_and_unit(
    tmp_path: Path, fault: str, place: str, operation: str, cause: str, torchrun: bool
) -> None:
    job = run_faulty(tmp_path, fault, place, 1, 3, copies=1, torchrun=torchrun)

    assert job.took_s < END_S + BUSY_S
    survivors = [status for rank, status in enumerate(job.statuses) if torchrun or rank != 1]
    assert all(survivors), job
    # A survivor says it in its exception or, if that comes too late, its watch does.
    assert re.search(cause.format(rank=1), job.all_said), job.all_said
    assert re.search(rf"({operation}).* (as |\()#\d+ of group 0", job.all_said), job.all_said
    assert job.left_in_tmp == []


def test_the_rank_that_holds_the_store_is_named_though_nobody_can_be_asked(tmp_path: Path) -> None:
    job = run_faulty(tmp_path, "kill", "gather", 0, 3, copies=1, torchrun=False)

    for rank in (1, 2):
        assert job.statuses[rank] == 1
        assert "rank 0 has ended or was killed, and the store that it held" in job.said[rank]


@pytest.mark.grid
def test_a_rank_of_another_copy_is_named_by_those_that_wait_for_it_in_the_all_reduce(
    tmp_path: Path,
) -> None:
    job = run_faulty(tmp_path, "sleep", "reduce", 1, 4, copies=2, torchrun=False)

    assert job.took_s < END_S + BUSY_S
    assert all(job.statuses)
    assert re.search(r"failed on rank 3 of 4 \(#\d+ of group \d+, ranks 1, 3\)", job.said[3])
    assert "trine: rank" in job.said[1]  # the sleeper, ended by its own watch


def test_a_rank_that_raises_before_the_first_forward_is_named_at_once(tmp_path: Path) -> None:
    job = run_faulty(tmp_path, "raise", "start", 0, 2, copies=1, torchrun=False)

    assert job.statuses == [1, 1]
    assert re.search(
        r"CommError: the first forward of a sharded model \(number 0 among ranks 0, 1\): "
        r"rank 1 waited for others, but rank 0 has ended, it raised ValueError: planted",
        job.said[1],
    )


def test_a_rank_that_fails_behind_the_last_collective_fails_the_job(tmp_path: Path) -> None:
    job = run_faulty(tmp_path, "exit 3", "end", 1, 2, copies=1, torchrun=True)

    assert job.statuses == [1]


def disagree_about_a_size() -> str:
    try:
        dist.all_reduce(torch.ones(3 + dist.get_rank()))
    except RuntimeError as error:
        return str(error)
    return "nothing"


def test_while_debugging_collectives_of_the_program_itself_are_compared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TRINE_DEBUG", "1")

    for said in testing.run_on_ranks(disagree_about_a_size, 2):
        assert said.startswith("Detected mismatch between collectives on ranks")


# --- after an error ----------------------------------------------------------------------


def net() -> nn.Sequential:
    made = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    for layer in made:
        fully_shard(layer)
    return fully_shard(made)


def train(model: nn.Module) -> None:
    model(torch.ones(2, 8)).sum().backward()


def train_some_steps(model: nn.Module) -> None:
    for _ in range(3):  # what was in the sockets already may still arrive
        train(model)


def go_on_after_a_failure() -> None:
    model = net()
    train(model)
    if dist.get_rank() == 1:
        os._exit(0)
    with pytest.raises(CommError, match="failed on rank 0 of 2"):
        train_some_steps(model)
    begun = time.monotonic()
    with pytest.raises(CommError) as refusal:
        train(model)
    assert time.monotonic() - begun < 1  # nobody is asked again
    raise ValueError(str(refusal.value))


def test_after_an_error_the_group_refuses_work_and_says_what_failed_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("trine.distributed._launch._GRACE_S", 20.0)

    with pytest.raises(testing.RanksFailed) as failure:
        testing.run_on_ranks(go_on_after_a_failure, 2)

    assert re.search(
        r"was refused on rank 0, because (all_gather|reduce_scatter) of \d \(#\d+\) failed: "
        r"rank 1 did not answer.*The ranks of group 0 \(ranks 0, 1\) may be out of step",
        str(failure.value),
    ), failure.value


# --- sizes that only one rank changes ------------------------------------------------------


def freeze(model: nn.Module) -> None:
    next(model.parameters()).requires_grad_(False)


def cast(model: nn.Module) -> None:
    model.double()


def load_another_dtype(model: nn.Module) -> None:
    values = {name: value.double() for name, value in model.state_dict().items()}
    model.load_state_dict(values, assign=True)


def change_on_one_rank(change: Callable[[nn.Module], None]) -> str:
    model = net()
    train(model)
    if dist.get_rank() == 1:
        change(model)
        with pytest.raises(RanksDisagree) as disagreement:
            train(model)
        return str(disagreement.value)
    try:
        train_some_steps(model)
    except CommError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize(
    ("change", "other"),
    [
        (freeze, r"reduce_scatter of 0 \(10 elements of float32\)"),
        (cast, r"all_gather of 0 \(72 elements of float64\)"),
        (load_another_dtype, r"all_gather of 0 \(72 elements of float64\)"),
    ],
)
def test_a_size_that_one_rank_changes_is_an_error_of_python_before_gloo_sees_it(
    change: Callable[[nn.Module], None], other: str
) -> None:
    waits, changed = testing.run_on_ranks(change_on_one_rank, 2, change)

    assert re.search(rf"rank 1: {other}", changed), changed
    assert "Do the same on every rank" in changed
    assert "failed on rank 0 of 2" in waits


def whole_of(value: Tensor) -> Tensor:
    assert isinstance(value, DTensor)
    return value.full_tensor()


def change_everywhere() -> tuple[Tensor, Tensor]:
    model, whole = net(), nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    train(model)
    model.zero_grad()
    freeze(model)
    model.double()
    values = {name: whole_of(value) for name, value in model.state_dict().items()}
    whole.double().load_state_dict(values)
    freeze(whole)
    for each in (model, whole):
        each(torch.ones(2, 8, dtype=torch.float64)).sum().backward()
    ours, expected = (list(each.parameters())[1].grad for each in (model, whole))
    assert isinstance(ours, DTensor)
    assert expected is not None
    return ours.full_tensor(), expected


def test_the_same_change_on_all_ranks_goes_on() -> None:
    for ours, whole in testing.run_on_ranks(change_everywhere, 2):
        torch.testing.assert_close(ours, whole)


# --- what one rank does alone --------------------------------------------------------------


def evaluate(model: nn.Module) -> None:
    with torch.no_grad():
        model(torch.ones(2, 8))


def infer(model: nn.Module) -> None:
    with torch.inference_mode():
        model(torch.ones(2, 8))


def look_at_whole(model: nn.Module) -> None:
    with FullyShardedDataParallel.summon_full_params(model):
        pass


def go_on_training(model: nn.Module) -> None:
    train(model)


def alone_on_one_rank(call: Callable[[nn.Module], None], train_first: bool) -> str:
    model = net()
    train(model)
    evaluate(model)
    if train_first:
        train(model)
    for group in ledgers().values():
        group._trusted_until = 0  # as if thousands of collectives had gone by
    if dist.get_rank() == 1:
        with pytest.raises(RanksDisagree) as disagreement:
            call(model)
        return str(disagreement.value)
    try:
        for _ in range(3):
            (train_some_steps if train_first else evaluate)(model)
    except (CommError, RanksDisagree) as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize(
    ("call", "train_first", "does", "advice"),
    [
        (evaluate, True, r"all_gather of \S+ \(\d+ elements of float32\), without", "evaluate and"),
        (infer, True, r"all_gather of \S+ \(\d+ elements of float32\), without", "evaluate and"),
        (look_at_whole, True, r"all_gather of 0.weight \(64 elements", "every rank must enter"),
        (look_at_whole, False, r"all_gather of 0.weight \(64 elements", "every rank must enter"),
        (go_on_training, False, r"all_gather of \S+ \(\d+ elements of float32\)\n", "evaluate and"),
    ],
)
def test_what_one_rank_does_alone_is_an_error_of_python_before_gloo_sees_it(
    call: Callable[[nn.Module], None], train_first: bool, does: str, advice: str
) -> None:
    waits, alone = testing.run_on_ranks(alone_on_one_rank, 2, call, train_first)

    assert re.search(rf"rank 1: {does}", alone), alone
    assert advice in alone
    assert "rank 0" in waits, waits


def evaluate_when_the_other_has_gone() -> None:
    model = net()
    train(model)
    if dist.get_rank() == 1:
        os._exit(0)
    begun = time.monotonic()
    with pytest.raises(CommError, match="rank 1 did not answer: ended") as failure:
        evaluate(model)
    # Long before the timeout: its thread answers once a second, and is given five.
    assert time.monotonic() - begun < 20
    raise ValueError(str(failure.value))


def test_a_rank_that_has_gone_is_not_waited_for_before_a_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("trine.distributed._launch._GRACE_S", 30.0)

    with pytest.raises(testing.RanksFailed, match="failed on rank 0 of 2"):
        testing.run_on_ranks(evaluate_when_the_other_has_gone, 2)


def come_late_to_a_turn() -> None:
    model = net()
    train(model)
    if dist.get_rank() == 1:
        time.sleep(8)  # longer than a silent rank is given, and its thread answers meanwhile
    evaluate(model)
    train(model)


def test_a_rank_that_is_late_at_a_turn_is_waited_for() -> None:
    testing.run_on_ranks(come_late_to_a_turn, 2)


def all_ranks_turn() -> None:
    model = net()
    for _ in range(3):
        train(model)
        with FullyShardedDataParallel.summon_full_params(model):
            (w1, b1), (w2, b2) = (list(layer.parameters()) for layer in model)
            expected = (torch.ones(2, 8) @ w1.T + b1) @ w2.T + b2
        for group in ledgers().values():
            group._trusted_until = 0
        with torch.no_grad():
            torch.testing.assert_close(model(torch.ones(2, 8)), expected)


def test_all_ranks_turn_and_look_together() -> None:
    testing.run_on_ranks(all_ranks_turn, 2)

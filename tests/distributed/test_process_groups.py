"""init_process_group: who may start it, and what it says when it cannot."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.distributed.recording_device import RecordingDevice
from trine.core import TrineError
from trine.distributed import destroy_process_group, init_mesh, init_process_group
from trine.distributed._fsdp.state import state_of
from trine.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from trine.distributed.process_groups import available_backends, launched

RunOnRanks = Callable[..., list[Any]]

LAUNCHER = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture(autouse=True)
def unlaunched(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No launcher before, no process group after."""
    for name in (*LAUNCHER, "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    yield
    destroy_process_group()


def launch_as(monkeypatch: pytest.MonkeyPatch, **variables: str) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


def test_a_plain_python_process_becomes_a_world_of_one() -> None:
    device = init_process_group("gloo")

    total = torch.tensor(3.0)
    dist.all_reduce(total)
    assert (dist.get_rank(), dist.get_world_size(), total.item()) == (0, 1, 3.0)
    assert device.kind == "cpu"
    assert not launched()


@pytest.mark.skipif(torch.cuda.device_count() > 0, reason="a GPU changes the default")
def test_the_backend_follows_the_device() -> None:
    init_process_group()

    assert dist.get_backend() == "gloo"


def test_the_device_of_the_rank_becomes_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    device, current = RecordingDevice(), list[str]()
    monkeypatch.setattr(device, "make_current", lambda: current.append(device.kind))

    found = init_process_group(device=device)

    assert found is device
    assert dist.get_backend() == "gloo"  # the one that this device asks for
    assert current == [device.kind]


def test_asking_again_for_what_is_running_changes_nothing() -> None:
    init_process_group("gloo")
    group = dist.group.WORLD

    init_process_group("GLOO")

    assert dist.group.WORLD is group


def test_asking_for_another_backend_than_the_running_one_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    init_process_group("gloo")
    monkeypatch.setattr(dist, "get_backend", lambda: "nccl")  # no second one works everywhere

    with pytest.raises(TrineError, match=r"'nccl' is running already, and 'gloo' was asked for"):
        init_process_group("gloo")


def test_destroying_without_a_group_changes_nothing() -> None:
    destroy_process_group()

    assert not dist.is_initialized()


def sum_through_the_public_function() -> tuple[int, float]:
    init_process_group()  # what a program written for torchrun does
    total = torch.tensor(1.0)
    dist.all_reduce(total)
    return dist.get_rank(), total.item()


def test_a_program_that_starts_its_own_group_also_runs_as_a_body(run_on_ranks: RunOnRanks) -> None:
    assert run_on_ranks(sum_through_the_public_function, 2) == [(0, 2.0), (1, 2.0)]


def test_the_ranks_of_torchrun_join_one_world() -> None:
    program = (
        "import torch, torch.distributed as dist; from trine.distributed import *\n"
        "init_process_group(); t = torch.ones(()); dist.all_reduce(t)\n"
        "print(f'rank {dist.get_rank()}: {t.item():g}'); destroy_process_group()\n"
    )
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]

    run = subprocess.run(
        [*launcher, "--nproc-per-node=2", "--no-python", sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=90,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )

    assert run.returncode == 0, run.stderr
    assert sorted(re.findall(r"rank \d: \d", run.stdout)) == ["rank 0: 2", "rank 1: 2"]


def test_an_unknown_backend_is_answered_with_those_there_are() -> None:
    with pytest.raises(ValueError, match=r"Unknown backend 'glue'. Backends .*: .*gloo"):
        init_process_group("glue")


@pytest.mark.skipif(torch.cuda.device_count() > 0, reason="needs a machine without a GPU")
def test_nccl_is_refused_where_it_cannot_work() -> None:
    with pytest.raises(ValueError, match=r"'nccl'.* Backends that work here: .*gloo"):
        init_process_group("nccl")

    assert "nccl" not in available_backends()


@pytest.mark.parametrize(
    ("variables", "told"),
    [
        ({"RANK": "0"}, "sets RANK but not WORLD_SIZE, MASTER_ADDR, MASTER_PORT"),
        ({"MASTER_PORT": "1"}, "sets MASTER_PORT but not RANK, WORLD_SIZE, MASTER_ADDR"),
        (
            {"RANK": "2", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"},
            "gives this process the rank 2 of 2",
        ),
        (
            {"RANK": "one", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"},
            "sets RANK='one', which is not a whole number",
        ),
        (
            {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "65536"},
            "MASTER_PORT=65536 is not a port",
        ),
    ],
)
def test_a_launcher_environment_that_makes_no_sense_is_explained(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], told: str
) -> None:
    launch_as(monkeypatch, **variables)

    with pytest.raises(ValueError, match=re.escape(told)):
        init_process_group("gloo")


def test_a_port_that_is_taken_is_named_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("", 0)) as other:
        port = other.getsockname()[1]
        launch_as(
            monkeypatch, RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
        )

        with pytest.raises(TrineError, match=rf"Port {port} \(MASTER_PORT\) is taken.*Set"):
            init_process_group("gloo")


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.0 400 Bad Request\r\n\r\n"])
def test_a_port_of_another_program_is_not_waited_for_without_end(
    monkeypatch: pytest.MonkeyPatch, answer: bytes
) -> None:
    def serve() -> None:
        with suppress(OSError):  # until the listener is closed
            while True:
                connection, _ = other.accept()
                connections.append(connection)
                if answer:
                    connection.sendall(answer)

    connections: list[socket.socket] = []
    with ExitStack() as closed_at_the_end, socket.create_server(("127.0.0.1", 0)) as other:
        threading.Thread(target=serve, daemon=True).start()
        port = str(other.getsockname()[1])
        launch_as(monkeypatch, RANK="1", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
        began = time.monotonic()

        with pytest.raises(TrineError, match=rf"Rank 1 of 2 could not reach .* 127.0.0.1:{port}"):
            init_process_group("gloo", timeout=timedelta(seconds=1))

        assert time.monotonic() - began < 10
        other.shutdown(socket.SHUT_RDWR)
        for connection in connections:
            closed_at_the_end.enter_context(connection)


def test_a_backend_that_only_pretends_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'fake' moves no data.* Backends .*: .*gloo"):
        init_process_group("fake")

    assert "fake" not in available_backends()


def test_a_meeting_point_that_nobody_opened_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("", 0)) as other:
        port = other.getsockname()[1]  # closed again: nobody listens there
    launch_as(monkeypatch, RANK="1", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))

    with pytest.raises(TrineError, match=rf"Rank 1 of 2 could not reach .* 127.0.0.1:{port}"):
        init_process_group("gloo", timeout=timedelta(seconds=1))


def left_and_joined_again(backend: str) -> list[float]:
    sums = []
    late = dist.get_rank() == 1
    for _ in range(3):
        destroy_process_group()
        if late:
            time.sleep(0.2)  # so that the other rank would find where this one listened before
        init_process_group(backend, timeout=timedelta(seconds=20))
        ones = torch.ones(1)
        dist.all_reduce(ones)
        sums.append(ones.item())
    return sums


@pytest.mark.only_gloo("MPI starts once in a process")
def test_a_world_can_be_left_and_joined_again_at_the_same_address(
    run_on_ranks: RunOnRanks, backend: str
) -> None:
    assert run_on_ranks(left_and_joined_again, 2, backend) == [[2.0] * 3] * 2


def limit_of(group: dist.ProcessGroup | None) -> timedelta:
    assert group is not None
    if dist.get_backend(group) == "mpi4py":
        ours: timedelta = group._timeout  # type: ignore[attr-defined]  # of our backend
        return ours
    made: Any = group._get_backend(torch.device("cpu"))
    gloos: timedelta = made.options._timeout
    return gloos


def groups_made_later(backend: str) -> list[timedelta]:
    destroy_process_group()
    init_process_group(backend, timeout=timedelta(seconds=37))
    mesh = init_mesh({"replicate": 1, "shard": 2})
    wrapped = FullyShardedDataParallel(
        nn.Linear(2, 2), sharding_strategy=ShardingStrategy.HYBRID_SHARD
    )
    model: Any = fully_shard(nn.Linear(2, 2), mesh=mesh)
    model.set_separate_reduce_scatter_group()
    state = state_of(model)
    assert state is not None
    apart = state.groups[0]._reducer.comm.group
    return [limit_of(each) for each in (mesh.get_group(1), wrapped.process_group, apart)]


def test_groups_that_are_made_later_wait_as_long_as_the_world(
    run_on_ranks: RunOnRanks, backend: str
) -> None:
    for limits in run_on_ranks(groups_made_later, 2, backend):
        assert limits == [timedelta(seconds=37)] * 3

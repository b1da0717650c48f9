"""How programs leave the world: in time, with the status that they chose, and no abort."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from trine.core import TrineError
from trine.distributed import destroy_process_group, init_mesh
from trine.distributed.fsdp import fully_shard

RunOnRanks = Callable[..., list[Any]]

PROGRAM = """
import sys, time
import torch, torch.distributed as dist
from trine.distributed import destroy_process_group, init_mesh, init_process_group
init_process_group("gloo")
mesh = init_mesh()  # which would keep the group until the interpreter is gone
# The thread that carried the last collective needs the GIL to drop its tensors. Where it
# does not get it by chance, one run in five aborts if nothing waits for that thread.
sys.setswitchinterval(60)
"""
GATHER = "dist.all_gather_object([None] * 2, dist.get_rank())\n"


@contextmanager
def two_ranks(program: str) -> Iterator[list[subprocess.Popen[str]]]:
    """Two ranks that run `program` and are gone afterwards."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    launcher = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM + program],
            env=os.environ | launcher | {"RANK": str(rank), "OMP_NUM_THREADS": "1"},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        yield ranks
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()


@pytest.mark.parametrize(
    "ending",
    [
        pytest.param("", id="without a word"),
        pytest.param("destroy_process_group()", id="destroyed"),
        pytest.param("dist.destroy_process_group()", id="destroyed by torch's function"),
        pytest.param("group = dist.group.WORLD\ndestroy_process_group()", id="destroyed but kept"),
    ],
)
def test_a_program_may_end_right_after_a_collective(ending: str) -> None:
    with two_ranks(GATHER + ending) as ranks:
        told = [rank.communicate(timeout=60)[1] for rank in ranks]

        assert told == ["", ""]
        assert [rank.returncode for rank in ranks] == [0, 0]


@pytest.mark.parametrize("keeps", ["", "group = dist.group.WORLD\n"])
def test_a_rank_that_fails_does_not_wait_for_ranks_that_go_on(keeps: str) -> None:
    program = keeps + (
        "if dist.get_rank() == 0:\n"
        "    time.sleep(600)\n"
        "work = dist.all_reduce(torch.ones(3), async_op=True)\n"
        "sys.exit(3)\n"
    )
    with two_ranks(program) as (goes_on, fails):
        told = fails.communicate(timeout=60)[1]

        assert goes_on.poll() is None
        assert fails.returncode == 3
        assert keeps or "This process ends before it has left its process groups" in told


def destroy_below_a_model() -> tuple[bool, str]:
    group = weakref.ref(dist.distributed_c10d._get_default_group())
    model = nn.Linear(4, 4)
    fully_shard(model, mesh=init_mesh())
    model(torch.ones(2, 4)).sum().backward()

    destroy_process_group()

    with pytest.raises(TrineError) as refusal:
        model(torch.ones(2, 4))
    return group() is None, str(refusal.value)


def test_destroying_ends_the_groups_of_models_that_live_on(run_on_ranks: RunOnRanks) -> None:
    for ended, refusal in run_on_ranks(destroy_below_a_model, 2):
        assert ended
        assert "The process group of this model was destroyed." in refusal

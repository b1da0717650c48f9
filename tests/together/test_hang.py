"""A real job whose rank stops coming: `trine trace hang` names it from the files left."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.together import stuck
from trine.tools.cli import main

LIMIT_S = 120  # for Python to import torch on all ranks of a busy machine


def run_stuck(folder: Path, fault: str) -> None:
    """The job, which ends by itself."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    environ = os.environ | {
        "OMP_NUM_THREADS": "1",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    processes = [
        subprocess.Popen(
            [sys.executable, stuck.__file__, str(folder), fault],
            env=environ | {"RANK": str(rank)},
            stderr=subprocess.DEVNULL,
        )
        for rank in range(2)
    ]
    try:
        for process in processes:
            process.wait(LIMIT_S)
    finally:
        for process in processes:
            process.kill()
            process.wait()


def hang(folder: Path) -> str:
    result = CliRunner().invoke(main, ["trace", "hang", str(folder)])
    print(result.output)
    assert result.exit_code == 1
    return result.output


def test_a_killed_rank_is_named_with_the_collective_it_did_not_come_to(tmp_path: Path) -> None:
    run_stuck(tmp_path, "kill")

    said = hang(tmp_path)

    assert "no end in the file of rank 1: killed, or still running" in said
    # A step has three gathers in forward, three in backward and three reductions.
    assert "Rank 1 did not come to #19 of group 0, all_gather of layers.0 (72 elements" in said
    assert re.search(r"^  rank 1 on \S+ in step 2$", said, re.MULTILINE)
    assert "last began #18 of group 0, reduce_scatter of layers.0, which is through" in said


@pytest.mark.grid  # as the killed one, but for what its file says
def test_a_rank_that_left_the_loop_is_named_with_what_it_did_then(tmp_path: Path) -> None:
    run_stuck(tmp_path, "leave")

    said = hang(tmp_path)

    assert "Rank 1 did not come to #19 of group 0, all_gather of layers.0" in said
    assert "last finished 'evaluate'" in said
    assert "its program ended" in said


@pytest.mark.grid
def test_ranks_that_do_different_things_are_told_apart(tmp_path: Path) -> None:
    run_stuck(tmp_path, "other")

    said = hang(tmp_path)

    # The ranks part in the backward of the third step: rank 1 has no layers.1 in it.
    assert "Ranks disagree at #23 of group 0, in unit:" in said
    assert "rank 0: all_gather of layers.1" in said
    assert "rank 1: all_gather of layers.0" in said

"""Tests that are run by all ranks of a job: what fails on one ends it, and is read first."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.matrix.plugin import note_launch

pytestmark = [
    pytest.mark.skipif(
        os.environ.get("TRINE_TEST_BACKEND") != "mpi", reason="needs mpi4py and an MPI library"
    ),
    pytest.mark.timeout(300),  # three processes import torch, on a machine that may be busy
]

ROOT = Path(__file__).parents[2]
CONFTEST = "from tests.matrix.mpi_job import *\n"
HEAD = """
import time
import pytest
import torch
import torch.distributed as dist

pytestmark = pytest.mark.mpi

def test_that_passes():
    total = torch.ones(())
    dist.all_reduce(total)
    assert total == dist.get_world_size()
"""
FAILS = """
def test_that_fails_on_the_last_rank():
    last = dist.get_world_size() - 1
    assert dist.get_rank() != last, "planted"
    dist.all_reduce(torch.ones(()))

def test_that_is_never_reached():
    pass
"""
HANGS = """
@pytest.mark.timeout(5)
def test_that_hangs_on_rank_0():
    if dist.get_rank() == 0:
        time.sleep(1000)
"""


def run_in_a_job(folder: Path, code: str, *options: str) -> tuple[int, str, list[list[str]]]:
    """Run a file's tests on 3 ranks; returns the status, what is printed, and outcomes."""
    (folder / "conftest.py").write_text(CONFTEST, encoding="utf-8")
    (folder / "pytest.ini").write_text("[pytest]\ntimeout_method = thread\n", encoding="utf-8")
    (folder / "test_made.py").write_text(HEAD + code, encoding="utf-8")
    results = folder / "results.jsonl"
    beside = Path(sys.executable).parent / "mpiexec"
    program = str(beside) if beside.exists() else shutil.which("mpiexec")
    assert program is not None
    plugins = ["-p", "tests.matrix.plugin", "-p", "no:cacheprovider", f"--results={results}"]
    ended = subprocess.run(
        [program, "-n", "3", sys.executable, "-m", "pytest", *plugins, *options, "test_made.py"],
        cwd=folder,
        env=os.environ
        | {
            "OMP_NUM_THREADS": "1",
            "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        },
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    note_launch("mpi", 3)
    lines = map(json.loads, results.read_text(encoding="utf-8").splitlines())
    tests = [line for line in lines if "test" in line]
    outcomes = [[line["test"].partition("::")[2], line["outcome"]] for line in tests]
    return ended.returncode, ended.stdout + ended.stderr, outcomes


def test_all_ranks_run_the_tests_and_one_of_them_speaks(tmp_path: Path) -> None:
    status, printed, outcomes = run_in_a_job(tmp_path, "", "--with-mpi")

    assert status == 0, printed
    assert len(re.findall("1 passed", printed)) == 1
    assert outcomes == [["test_that_passes", "started"], ["test_that_passes", "passed"]]


def test_the_report_of_the_rank_that_failed_is_read_and_the_job_ends(tmp_path: Path) -> None:
    status, printed, outcomes = run_in_a_job(tmp_path, FAILS, "--with-mpi")

    assert status != 0
    assert "test_that_fails_on_the_last_rank failed first on rank 2 of 3" in printed
    assert "AssertionError: planted" in printed
    # Ranks 0 and 1 wait in a collective, and are ended before they say that nobody comes.
    assert "DistBackendError" not in printed
    assert outcomes[-1] == ["test_that_fails_on_the_last_rank", "failed"]


def test_a_test_that_hangs_ends_within_its_timeout(tmp_path: Path) -> None:
    status, printed, outcomes = run_in_a_job(tmp_path, HANGS, "--with-mpi")

    assert status != 0
    assert "Timeout" in printed
    assert "DistBackendError" not in printed  # the test's 5 s, not the group's 30
    assert outcomes[-1] == [
        "test_that_hangs_on_rank_0",
        "started",
    ]  # which the table counts as failed


def test_without_the_option_tests_skip_and_the_run_fails(tmp_path: Path) -> None:
    status, printed, _ = run_in_a_job(tmp_path, "")

    assert status != 0
    assert "no test had ranks on mpi" in printed

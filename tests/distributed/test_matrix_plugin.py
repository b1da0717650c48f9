"""The count of tests on ranks: pytest runs in a process of its own, on files made here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
ON_RANKS = """
import torch.distributed as dist
from trine.distributed.testing import run_on_ranks

def body(fails):
    assert not fails, "planted"

def test_on_two_ranks():
    run_on_ranks(body, 1, False)
    run_on_ranks(body, 2, False)

def test_fails_on_ranks():
    run_on_ranks(body, 1, True)
"""
WITHOUT_RANKS = """
import pytest
from trine.distributed.testing import run_on_ranks

def test_of_arithmetic():
    assert 1 + 1 == 2

def test_never_starts_its_ranks():
    with pytest.raises(TypeError):
        run_on_ranks("no function", 2)

def test_skips_itself():
    pytest.skip("no MPI")
"""


def run_pytest(folder: Path, code: str, *options: str) -> tuple[int, str, list[dict[str, Any]]]:
    """Run the tests of a file on gloo; returns the status, what is printed and what is noted."""
    (folder / "test_made.py").write_text(code, encoding="utf-8")
    results = folder / "results.jsonl"
    plugins = ["-p", "tests.matrix.plugin", "-p", "no:cacheprovider", f"--results={results}"]
    arguments = [*plugins, "--import-mode=importlib", *options, "test_made.py"]
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", *arguments],
        cwd=folder,
        env=os.environ
        | {
            "TRINE_TEST_BACKEND": "gloo",
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    lines = results.read_text(encoding="utf-8").splitlines() if results.exists() else []
    return ended.returncode, ended.stdout + ended.stderr, [json.loads(line) for line in lines]


def test_tests_on_ranks_are_counted_and_noted_as_they_end(tmp_path: Path) -> None:
    status, printed, noted = run_pytest(tmp_path, ON_RANKS)

    assert status == 1  # of the test that fails
    assert "2 tests had ranks on gloo." in printed
    ended = [(each["outcome"], each["ranks"]) for each in noted if "ranks" in each]
    # A failure is noted at once, and again when the test ends.
    assert ended == [("passed", 2), ("failed", 1), ("failed", 1)]
    assert noted[0] == {"collected": 2}


def test_workers_count_together_what_each_has_run(tmp_path: Path) -> None:
    pytest.importorskip("xdist")

    status, printed, noted = run_pytest(tmp_path, ON_RANKS, "-n", "2")

    assert status == 1  # of the test that fails
    assert "2 tests had ranks on gloo." in printed
    ended = sorted((each["outcome"], each["ranks"]) for each in noted if "ranks" in each)
    assert ended == [("failed", 1), ("failed", 1), ("passed", 2)]
    assert [each for each in noted if "collected" in each] == [{"collected": 2}]


def test_workers_that_run_nothing_on_ranks_fail_together(tmp_path: Path) -> None:
    pytest.importorskip("xdist")

    status, printed, _ = run_pytest(tmp_path, WITHOUT_RANKS, "-n", "2")

    assert status == pytest.ExitCode.TESTS_FAILED
    assert "no test had ranks on gloo" in printed


def test_a_run_without_ranks_on_the_backend_fails_and_says_so(tmp_path: Path) -> None:
    status, printed, noted = run_pytest(tmp_path, WITHOUT_RANKS)

    sentence = "no test had ranks on gloo, so this run shows nothing of it and fails"
    assert status == pytest.ExitCode.TESTS_FAILED
    assert "2 passed, 1 skipped" in printed
    assert sentence in printed
    assert noted[-1] == {"error": sentence}


def test_ranks_on_another_backend_do_not_count(tmp_path: Path) -> None:
    noting = (
        "from tests.matrix.plugin import note_launch\ndef test_it():\n    note_launch('mpi', 2)"
    )

    status, printed, _ = run_pytest(tmp_path, noting)

    assert status == pytest.ExitCode.TESTS_FAILED
    assert "no test had ranks on gloo" in printed


def test_collecting_only_proves_nothing_and_does_not_fail(tmp_path: Path) -> None:
    status, printed, _ = run_pytest(tmp_path, WITHOUT_RANKS, "--collect-only")

    assert status == 0
    assert "had ranks" not in printed

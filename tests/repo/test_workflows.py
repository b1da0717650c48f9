from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from functools import cache
from typing import Any

import pytest
import yaml

from tests.repo.tree import ROOT

WORKFLOWS = sorted(path.name for path in (ROOT / ".github" / "workflows").iterdir())
PINNED = re.compile(r"[\w.-]+/[\w./-]+@[0-9a-f]{40}")
LISTING = re.compile(r'echo "sessions=\$\((nox --list --json [^)]*)\)" >> "\$GITHUB_OUTPUT"')


def test_the_matrix_holds_every_default_session() -> None:
    # `cpu` is the tag in ci.yml; a default session without it would never run there. It also
    # holds those that take too long for a plain `nox`.
    (listing,) = [hit.group(1) for line in commands("ci.yml") if (hit := LISTING.fullmatch(line))]

    in_matrix = nox_sessions(*shlex.split(listing)[3:])

    assert set(in_matrix) >= set(nox_sessions())
    long = {"tests_browser", "tests_grid", "tests_mpi(openmpi)", "tests_mpi(mpich)"}
    assert long <= set(in_matrix)


def test_the_matrix_is_handed_to_nox_unchanged() -> None:
    job = workflow("ci.yml")["jobs"]["session"]

    matrix = job["strategy"]["matrix"]["task"]
    (step,) = [step for step in job["steps"] if step.get("run", "").startswith("nox")]

    assert matrix == "${{ fromJSON(needs.sessions.outputs.list) }}"
    assert step["run"] == 'nox -s "$SESSION"'
    assert step["env"]["SESSION"] == "${{ matrix.task.session }}"


def test_every_session_that_checks_something_runs_in_a_workflow() -> None:
    by_hand = {
        "demo",
        "bench(openmpi)",
        "bench(mpich)",
    }  # what they print is for somebody who looks
    calls = [shlex.split(line) for name in WORKFLOWS for line in commands(name)]
    tags = {call[2] for call in calls if call[0] == "nox" and call[1] in ("-t", "--tags")} | {"cpu"}

    run = frozenset[str]().union(*(nox_sessions("--tags", tag) for tag in tags))

    assert all_sessions() - by_hand == run


def test_the_matrix_tries_every_backend_with_every_torch_and_ends_with_the_table() -> None:
    noxfile = (ROOT / "noxfile.py").read_text(encoding="utf-8")
    (listed,) = re.findall(r"^OTHER_TORCHES = \((.*?)\)", noxfile, re.MULTILINE)
    torches = re.findall(r'"(.*?)"', listed)
    backends = ("gloo", "openmpi", "mpich")

    in_matrix = in_order("--tags", "matrix")

    default = ["tests_gloo", "tests_mpi(openmpi)", "tests_mpi(mpich)", "tests_nccl"]
    others = [f"tests_torch({torch}, {backend})" for torch in torches for backend in backends]
    assert sorted(in_matrix[:-1]) == sorted(default + others)
    assert in_matrix[-1] == "matrix"


def test_what_takes_long_or_wants_more_is_out_of_the_default_run() -> None:
    default = nox_sessions()

    assert "tests_gloo" in default
    assert not any(name.startswith(("tests_mpi", "tests_nccl", "tests_torch")) for name in default)


@pytest.mark.parametrize("name", WORKFLOWS)
def test_every_session_that_a_workflow_names_exists(name: str) -> None:
    calls = [shlex.split(line) for line in commands(name) if line.startswith("nox ")]
    chosen = [call[1 : call.index("--") if "--" in call else None] for call in calls]

    # Nox fails when a name or a tag selects nothing. `$SESSION` is the matrix's.
    selected = [nox_sessions(*args) for args in chosen if args != ["-s", "$SESSION"]]

    assert calls
    assert all(selected)


@pytest.mark.parametrize("name", WORKFLOWS)
def test_workflows_call_nox_and_nothing_else(name: str) -> None:
    setup = {"python -m pip install nox", "exit 1"}

    others = [
        line
        for line in commands(name)
        if line not in setup and not LISTING.fullmatch(line) and not is_one_nox_call(line)
    ]

    assert others == []


@pytest.mark.parametrize("line", ["pytest", "nox && curl x", "nox -s a; rm b", "nox\nmake"])
def test_a_step_that_does_more_would_be_noticed(line: str) -> None:
    assert not is_one_nox_call(line)


@pytest.mark.parametrize("name", WORKFLOWS)
def test_workflows_grant_nothing_that_a_job_does_not_ask_for(name: str) -> None:
    assert workflow(name)["permissions"] == {}


@pytest.mark.parametrize("name", WORKFLOWS)
def test_actions_are_pinned_by_hash(name: str) -> None:
    uses = [step["uses"] for step in steps(name) if "uses" in step]

    assert [action for action in uses if not PINNED.fullmatch(action)] == []


def test_check_waits_for_every_other_job() -> None:
    jobs = workflow("ci.yml")["jobs"]

    assert list(jobs)[-1] == "check"
    assert set(jobs["check"]["needs"]) == set(jobs) - {"check"}
    for needed in jobs["check"]["needs"]:
        assert f"needs.{needed}.result != 'success'" in jobs["check"]["steps"][0]["if"]


def nox_sessions(*args: str) -> frozenset[str]:
    """Ask nox which sessions `args` select; without any, the default ones."""
    return frozenset(in_order(*args))


def all_sessions() -> frozenset[str]:
    """Every session, in the default run or not."""
    return nox_sessions("-k", "not no_session_has_this_name")


@cache
def in_order(*args: str) -> tuple[str, ...]:
    """The same as `nox_sessions`, in the order in which they run."""
    command = [sys.executable, "-m", "nox", "--list", "--json", *args]
    env = {**os.environ, "NOX_SCRIPT_MODE": "none"}
    listing = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert listing.returncode == 0, f"{shlex.join(command)} failed:\n{listing.stderr}"
    return tuple(task["session"] for task in json.loads(listing.stdout))


def is_one_nox_call(line: str) -> bool:
    return re.fullmatch(r"nox [^;&|`\n]*", line) is not None


def commands(name: str) -> list[str]:
    return [step["run"].strip() for step in steps(name) if "run" in step]


def steps(name: str) -> list[dict[str, Any]]:
    return [step for job in workflow(name)["jobs"].values() for step in job["steps"]]


def workflow(name: str) -> dict[str, Any]:
    text = (ROOT / ".github" / "workflows" / name).read_text(encoding="utf-8")
    content: dict[str, Any] = yaml.safe_load(text)
    return content

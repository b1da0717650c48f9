"""The doctor as a user meets it: its words, its JSON, its exit status, and that it cleans up."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

from trine.core import doctor
from trine.core.doctor import Check, Diagnosis, examination

OK = Check("python", "ok", "3.11")
ABSENT = Check("mpi", "absent", "no mpi4py")
WARNING = Check("cores", "warning", "too many threads", "Set OMP_NUM_THREADS=2.")
ERROR = Check("gloo", "error", "could not talk", "Set GLOO_SOCKET_IFNAME.")


def find(monkeypatch: pytest.MonkeyPatch, *checks: Check) -> None:
    """Let the examination find these and nothing else."""
    monkeypatch.setattr(examination, "_checks", lambda limit_s: iter(checks))


# The verdict.


@pytest.mark.parametrize(
    ("checks", "can_start", "verdict"),
    [
        ((OK, ABSENT), True, "Training can start."),
        ((OK, WARNING), True, "Training can start, with warnings: see cores."),
        ((OK, ERROR, WARNING, ERROR), False, "Training cannot start: see gloo."),
    ],
)
def test_only_an_error_keeps_training_from_starting(
    checks: tuple[Check, ...], can_start: bool, verdict: str
) -> None:
    diagnosis = Diagnosis(checks)

    assert (diagnosis.can_start, diagnosis.verdict) == (can_start, verdict)


@pytest.mark.parametrize("status", ["warning", "error"])
def test_what_is_wrong_has_to_say_how_to_mend_it(status: doctor.Status) -> None:
    with pytest.raises(ValueError, match=r"gloo.*needs a mend"):
        Check("gloo", status, "could not talk")


def test_a_finding_is_a_row_and_its_mend_stands_below_in_full() -> None:
    path = "/a/folder-with-hyphens/" + "x" * 120
    check = Check("gloo", "error", "could not talk", f"Remove {path} and start again.")

    lines = check.to_text().splitlines()

    assert lines[0] == "gloo      error    could not talk"
    assert lines[1].strip() == "-> Remove"
    assert lines[2].strip() == path  # not broken, so that it can be copied
    assert lines[3].strip() == "and start again."


# The command.


def test_the_command_prints_each_finding_and_the_verdict_and_returns_0(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find(monkeypatch, OK, WARNING)

    status = doctor.main([])

    assert status == 0
    assert capsys.readouterr().out.splitlines() == [
        "python    ok       3.11",
        "cores     warning  too many threads",
        "                   -> Set OMP_NUM_THREADS=2.",
        "",
        "Training can start, with warnings: see cores.",
    ]


def test_an_error_is_exit_status_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find(monkeypatch, OK, ERROR)

    assert doctor.main([]) == 1
    assert capsys.readouterr().out.endswith("\nTraining cannot start: see gloo.\n")


def test_json_is_one_object_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find(monkeypatch, Check("gloo", "error", "bad", "Mend.", {"errors": "a\nb"}))

    status = doctor.main(["--json"])

    assert status == 1
    assert json.loads(capsys.readouterr().out) == {
        "can_start": False,
        "verdict": "Training cannot start: see gloo.",
        "checks": [
            {
                "name": "gloo",
                "status": "error",
                "summary": "bad",
                "mend": "Mend.",
                "details": {"errors": "a\nb"},
            }
        ],
    }


def test_the_limit_reaches_the_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[float] = []

    def checks(limit_s: float) -> Iterator[Check]:
        limits.append(limit_s)
        yield OK

    monkeypatch.setattr(examination, "_checks", checks)

    doctor.main(["--limit", "2.5"])
    doctor.main([])

    assert limits == [2.5, 60.0]


@pytest.mark.parametrize("limit", ["0", "-1", "nan", "soon"])
def test_a_limit_that_is_no_time_is_refused_with_status_2(
    limit: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        doctor.main(["--limit", limit])

    assert ended.value.code == 2
    assert "--limit" in capsys.readouterr().err


# The examination.


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Replace looks of the examination by ones that find what they are told."""

    def replace(**found: Iterable[Check]) -> None:
        for name in (
            "python",
            "torch",
            "packages",
            "devices",
            "nccl",
            "gloo",
            "mpi",
            "world",
            "cores",
            "memory",
        ):
            checks = found.get(name, [])
            monkeypatch.setattr(examination, f"check_{name}", lambda *a, c=checks, **k: iter(c))

    return replace


def test_findings_keep_the_order_in_which_they_are_made(quick: Callable[..., None]) -> None:
    quick(memory=[OK], devices=[ERROR, WARNING], python=[ABSENT])

    assert doctor.examine().checks == (ABSENT, ERROR, WARNING, OK)


def broken() -> Iterator[Check]:
    yield OK
    raise OSError("no such file")


def test_a_look_that_raises_is_a_finding_and_the_examination_goes_on(
    quick: Callable[..., None],
) -> None:
    quick(world=broken(), memory=[ABSENT])

    first, failed, last = doctor.examine().checks
    assert (first, last) == (OK, ABSENT)
    assert failed.name == "world"
    assert failed.summary == "could not be examined: OSError: no such file"
    assert "report" in failed.mend


@pytest.mark.parametrize(
    ("look", "status"),
    [
        *((name, "error") for name in ("python", "torch", "packages", "devices")),
        *((name, "error") for name in ("nccl", "gloo", "world", "memory")),
        *((name, "warning") for name in ("mpi", "cores")),
    ],
)
def test_what_training_needs_does_not_pass_unexamined(
    quick: Callable[..., None], look: str, status: str
) -> None:
    quick(**{look: broken()})

    diagnosis = doctor.examine()

    assert [check.status for check in diagnosis.checks] == ["ok", status]
    assert diagnosis.can_start == (status == "warning")


def test_gloo_may_pass_unexamined_where_nccl_works(quick: Callable[..., None]) -> None:
    quick(nccl=[Check("nccl", "ok", "works")], gloo=broken())

    assert [check.status for check in doctor.examine().checks] == ["ok", "ok", "warning"]


@pytest.mark.parametrize(
    ("nccl", "needed"),
    [
        (Check("nccl", "ok", "works"), False),
        (Check("nccl", "absent", "no device"), True),
        (Check("nccl", "error", "broken", "Mend."), True),
    ],
)
def test_gloo_is_needed_unless_nccl_works(
    quick: Callable[..., None], monkeypatch: pytest.MonkeyPatch, nccl: Check, needed: bool
) -> None:
    asked: list[bool] = []

    def check_gloo(limit_s: float, *, needed: bool) -> list[Check]:
        asked.append(needed)
        return []

    quick(nccl=[nccl])
    monkeypatch.setattr(examination, "check_gloo", check_gloo)

    doctor.examine()

    assert asked == [needed]


# The real thing, in a process of its own.


def command(*options: str) -> list[str]:
    return [sys.executable, "-W", "ignore", "-m", "trine.core.doctor", *options]


def marked_environ(**more: str) -> tuple[dict[str, str], bytes]:
    """An environment by which the processes that inherit it can be found."""
    mark = uuid.uuid4().hex
    return os.environ | more | {"TRINE_TEST_MARK": mark}, f"TRINE_TEST_MARK={mark}".encode()


def processes(mark: bytes) -> list[int]:
    """The live processes whose environment carries the mark."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            ended = (folder / "stat").read_text().rpartition(")")[2].split()[0] in "ZX"
            if not ended and mark in (folder / "environ").read_bytes():
                found.append(int(folder.name))
        except OSError:
            continue
    return found


def wait_until(condition: Callable[[], bool], limit_s: float = 60.0) -> bool:
    deadline = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


needs_proc = pytest.mark.skipif(
    not Path("/proc/self/environ").exists(), reason="needs /proc to look for processes"
)


@needs_proc
def test_the_real_doctor_finds_gloo_working_and_leaves_neither_process_nor_file(
    tmp_path: Path,
) -> None:
    environ, mark = marked_environ(TMPDIR=str(tmp_path))
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GLOO_SOCKET_IFNAME"):
        environ.pop(name, None)

    ended = subprocess.run(
        command("--json"), env=environ, capture_output=True, text=True, timeout=110
    )

    said = json.loads(ended.stdout)
    status = {check["name"]: check["status"] for check in said["checks"]}
    assert ended.stderr == ""
    assert list(status) == [
        "python",
        "torch",
        "packages",
        "device",
        "nccl",
        "gloo",
        "mpi",
        "world",
        "cores",
        "memory",
    ]
    assert status["gloo"] == "ok"
    assert said["can_start"] == (ended.returncode == 0) == ("error" not in status.values())
    assert processes(mark) == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("options", [(), ("--json",)])
def test_a_reader_who_has_seen_enough_is_no_verdict_and_no_traceback(
    options: tuple[str, ...],
) -> None:
    reader, writer = os.pipe()
    os.close(reader)

    with os.fdopen(writer) as output:
        ended = subprocess.run(
            command(*options), stdout=output, stderr=subprocess.PIPE, text=True, timeout=110
        )

    assert (ended.returncode, ended.stderr) == (141, "")


@needs_proc
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_doctor_that_is_ended_while_ranks_run_takes_them_along(
    signum: signal.Signals, tmp_path: Path
) -> None:
    environ, mark = marked_environ(TMPDIR=str(tmp_path))

    with subprocess.Popen(
        command(), env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert wait_until(lambda: len(processes(mark)) == 3)  # the doctor and two ranks
        process.send_signal(signum)
        _, errors = process.communicate(timeout=60)

    assert process.returncode == (-9 if signum == signal.SIGKILL else 128 + signum)
    assert errors == ""
    assert wait_until(lambda: processes(mark) == [])
    assert list(tmp_path.iterdir()) == []

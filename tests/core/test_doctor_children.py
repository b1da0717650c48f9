"""Programs run side by side: their output, their end, and the end of whatever they started."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from trine.core.doctor.children import Ended, probe, run_together


def python(code: str, *args: str) -> list[str]:
    return [sys.executable, "-c", code, *args]


FOR_EVER = python("import time; time.sleep(3600)")


def test_what_each_program_wrote_is_kept_apart() -> None:
    one, other = run_together(
        [
            python("import sys; print('out'); print('err', file=sys.stderr)"),
            python("print('other')"),
        ],
        60,
    )

    assert one == Ended("exited", 0, "out\n", "err\n")
    assert other == Ended("exited", 0, "other\n", "")
    assert one.succeeded
    assert other.succeeded


def test_the_programs_run_at_the_same_time(tmp_path: Path) -> None:
    # Each waits for a file that the other makes.
    code = (
        "import sys, pathlib, time\n"
        "mine, theirs = map(pathlib.Path, sys.argv[1:])\n"
        "mine.touch()\n"
        "while not theirs.exists(): time.sleep(0.01)\n"
    )
    a, b = str(tmp_path / "a"), str(tmp_path / "b")

    ended = run_together([python(code, a, b), python(code, b, a)], 60)

    assert [each.how for each in ended] == ["exited", "exited"]


def test_more_output_than_a_pipe_holds_stops_nobody() -> None:
    (ended,) = run_together([python("print('x' * 1_000_000)")], 60)

    assert len(ended.output) == 1_000_001


def test_a_program_that_does_not_end_is_killed_at_the_limit() -> None:
    begin = time.monotonic()

    (ended,) = run_together([FOR_EVER], 0.5)

    assert (ended.how, ended.succeeded) == ("timed out", False)
    assert ended.reason == "did not end in time"
    assert time.monotonic() - begin < 30


def test_what_a_program_started_is_killed_with_it(tmp_path: Path) -> None:
    grandchild = tmp_path / "pid"
    code = (
        "import pathlib, subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(3600)'])\n"
        f"pathlib.Path({str(grandchild)!r}).write_text(str(child.pid))\n"
        "sys.exit(time.sleep(3600))\n"
    )

    (ended,) = run_together([python(code)], 2)

    assert ended.how == "timed out"
    pid = int(grandchild.read_text())
    deadline = time.monotonic() + 30
    while is_alive(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not is_alive(pid)


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        stat = Path(f"/proc/{pid}/stat")
        return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] != "Z"
    except ProcessLookupError:
        return False


def test_one_that_fails_has_the_others_stopped_long_before_the_limit() -> None:
    begin = time.monotonic()

    failed, other = run_together([python("raise SystemExit('no device')"), FOR_EVER], 600)

    assert time.monotonic() - begin < 60
    assert (failed.how, failed.status, failed.reason) == ("exited", 1, "no device")
    assert other.how == "stopped"
    assert other.reason == "was stopped because another process failed"


def test_a_program_that_cannot_be_started_leaves_the_others_ended(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        run_together([FOR_EVER, [str(tmp_path / "missing")]], 600)


@pytest.mark.parametrize(
    ("ended", "reason"),
    [
        (Ended("exited", -6, "", "core\n"), "was killed by SIGABRT"),
        (Ended("exited", -63, "", "core\n"), "core"),
        (Ended("exited", 3, "", ""), "ended with exit status 3"),
        (Ended("exited", 1, "", "Traceback\n  x\nValueError: bad\n\n"), "ValueError: bad"),
        (Ended("exited", 1, 'noise\n[1]\n{"error": "said"}\n', "ValueError: bad"), "said"),
    ],
)
def test_the_reason_is_the_most_telling_line(ended: Ended, reason: str) -> None:
    assert ended.reason == reason


def test_a_probe_that_hangs_ends_itself_and_says_where_it_stood(tmp_path: Path) -> None:
    # A torch that never finishes its import stands for any call that hangs.
    (tmp_path / "torch.py").write_text("import time\ntime.sleep(3600)\n")
    environ = os.environ | {"PYTHONPATH": str(tmp_path)}

    (ended,) = run_together([probe("accelerators", limit_s=1)], 100, environ)

    assert ended.how == "exited"
    assert ended.reason.startswith("did not end in time: it stood at File ")
    assert "torch.py" in ended.reason
    assert "line 2" in ended.reason


def test_a_probe_that_raises_says_so_without_the_frames_of_cpp(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise OSError('libcudart.so is missing\\nframe #0')\n")
    environ = os.environ | {"PYTHONPATH": str(tmp_path)}

    (ended,) = run_together([probe("accelerators", limit_s=60)], 61, environ)

    assert (ended.status, ended.reason) == (1, "OSError: libcudart.so is missing")


FAKE_TORCH = """
class _Tensor:
    def __init__(self, value): self.value = value
    def cpu(self): return self
    def item(self): return self.value
    def all(self): return self.value
    def __eq__(self, other): return _Tensor(self.value == other)
    def __getitem__(self, index): return self
    def __bool__(self): return self.value

class device:
    def __init__(self, type, index=0): self.type = type

full = lambda shape, value, device: _Tensor(value)
"""
FAKE_DISTRIBUTED = """
TCPStore = lambda *args, **kwargs: None
init_process_group = lambda *args, **kwargs: None
all_reduce = lambda tensor: None
"""


def test_a_collective_that_gives_a_wrong_sum_is_a_failure(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(FAKE_TORCH)
    (tmp_path / "torch" / "distributed.py").write_text(FAKE_DISTRIBUTED)
    environ = os.environ | {"PYTHONPATH": str(tmp_path)}

    command = probe("all_reduce", "gloo", 0, 2, 29500, "60", limit_s=60)
    (ended,) = run_together([command], 61, environ)

    assert (ended.status, ended.reason) == (1, "ValueError: the sum was 1, expected 3")

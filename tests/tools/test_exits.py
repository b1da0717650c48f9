"""However a process ends, its recording can be read, and says how it ended if it can."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from io import StringIO
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from tests.tools.events import event
from trine.tools.tracing import RankTrace, Recorder, read_rank_file

# Forked, since a new interpreter takes seconds to import torch. The children use no torch.
pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


def start(body: Callable[[Path], None], folder: Path) -> BaseProcess:
    process = multiprocessing.get_context("fork").Process(target=body, args=(folder,))
    process.start()
    return process


def trace_of(folder: Path) -> RankTrace:
    return read_rank_file(folder / "trace-rank00000.trine")


def wait_for_event(folder: Path, name: str) -> None:
    path = folder / "trace-rank00000.trine"
    deadline = time.monotonic() + 60
    while not path.exists() or not path.stat().st_size or name.encode() not in path.read_bytes():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def record(folder: Path) -> Recorder:
    recorder = Recorder(folder, rank=0, world_size=1)
    recorder.record(event("training", 1, 2))
    return recorder


def computes(folder: Path) -> None:
    record(folder)
    while True:
        time.sleep(0.01)


def hangs_in_a_collective(folder: Path) -> None:
    record(folder)
    hang()


def hang() -> None:
    """As a collective does: in C, where no handler of Python's can run."""
    libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_lock(mutex)  # never returns, whatever signal comes


def returns(folder: Path) -> None:
    record(folder)


def raises(folder: Path) -> None:
    record(folder)
    sys.stderr = StringIO()  # multiprocessing prints it there
    raise RuntimeError("training failed")


def has_its_own_handler(folder: Path) -> None:
    asked = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: asked.set())
    recorder = record(folder)
    asked.wait()
    recorder.record(event("checkpoint", 5, 6))


def closes_before_the_signal(folder: Path) -> None:
    record(folder).close()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    (folder / "closed").touch()
    while True:
        time.sleep(0.01)


def test_a_killed_process_leaves_what_it_recorded(tmp_path: Path) -> None:
    process = start(computes, tmp_path)
    wait_for_event(tmp_path, "training")

    process.kill()
    process.join()

    assert [made.name for made in trace_of(tmp_path).events] == ["training"]
    assert trace_of(tmp_path).end is None


def closes_on_another_thread_and_hangs(folder: Path) -> None:
    recorder = record(folder)
    thread = threading.Thread(target=recorder.close)
    thread.start()
    thread.join()
    (folder / "closed").touch()
    hang()


@pytest.mark.parametrize("body", [computes, hangs_in_a_collective])
def test_a_terminated_process_says_so_and_dies_of_it(
    tmp_path: Path, body: Callable[[Path], None]
) -> None:
    process = start(body, tmp_path)
    wait_for_event(tmp_path, "training")

    process.terminate()
    process.join(30)

    end = trace_of(tmp_path).end
    assert process.exitcode == -signal.SIGTERM
    assert end is not None
    assert (end.reason, end.events) == ("signal", 1)


@pytest.mark.parametrize("body", [returns, raises])
def test_what_nobody_closes_is_closed_at_the_end(
    tmp_path: Path, body: Callable[[Path], None]
) -> None:
    start(body, tmp_path).join()

    end = trace_of(tmp_path).end
    assert end is not None
    assert (end.reason, end.events) == ("exit", 1)


def test_a_program_with_a_handler_of_its_own_decides_what_comes_after(tmp_path: Path) -> None:
    process = start(has_its_own_handler, tmp_path)
    wait_for_event(tmp_path, "training")

    process.terminate()
    process.join(30)

    trace = trace_of(tmp_path)
    assert process.exitcode == 0
    assert [made.name for made in trace.events] == ["training", "checkpoint"]
    assert trace.end is not None
    assert trace.end.reason == "exit"


@pytest.mark.parametrize("body", [closes_before_the_signal, closes_on_another_thread_and_hangs])
def test_after_closing_the_signal_does_what_it_did_before(
    tmp_path: Path, body: Callable[[Path], None]
) -> None:
    process = start(body, tmp_path)
    while not (tmp_path / "closed").exists():
        time.sleep(0.005)

    process.terminate()
    process.join(30)

    assert process.exitcode == -signal.SIGTERM
    assert trace_of(tmp_path).end is not None


def test_an_uncaught_exception_ends_the_recording_of_a_script(tmp_path: Path) -> None:
    script = f"""
from pathlib import Path
from trine.core import tracing
from trine.tools.tracing import Recorder
tracing.add_sink(Recorder(Path({str(tmp_path)!r}), rank=0, world_size=1))
with tracing.span("training"):
    raise RuntimeError("training failed")
"""

    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)

    assert done.returncode == 1
    assert done.stderr.rstrip().endswith("RuntimeError: training failed")
    trace = trace_of(tmp_path)
    assert [made.name for made in trace.events] == ["training"]
    assert trace.end is not None
    assert trace.end.reason == "exit"


def test_a_forked_child_leaves_the_file_to_its_parent(tmp_path: Path) -> None:
    recorder = record(tmp_path)
    before = signal.getsignal(signal.SIGTERM)

    child = os.fork()
    if child == 0:  # what a data loader's worker does
        recorder.record(event("in the worker", 3, 4))
        recorder.close()
        as_before = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        os._exit(0 if as_before and signal.set_wakeup_fd(-1) == -1 else 1)
    _, status = os.waitpid(child, 0)
    recorder.record(event("in the parent", 5, 6))
    recorder.close()

    assert os.waitstatus_to_exitcode(status) == 0
    assert before is not signal.SIG_DFL  # the recorder's, until it was closed
    assert [made.name for made in trace_of(tmp_path).events] == ["training", "in the parent"]


def test_a_recorder_made_on_another_thread_touches_no_signal(tmp_path: Path) -> None:
    made: list[Recorder] = []
    thread = threading.Thread(target=lambda: made.append(record(tmp_path)))
    thread.start()
    thread.join()

    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    made[0].close()
    assert trace_of(tmp_path).end is not None

"""The recorder: what it keeps, what it drops, and the file it leaves."""

from __future__ import annotations

import errno
import json
import math
import os
import resource
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import trine.tools
from tests.tools.events import event
from trine.core import tracing
from trine.tools.tracing import (
    ClockReading,
    End,
    Recorder,
    TraceFileError,
    growing_file,
    read_rank_file,
)
from trine.tools.tracing import recorder as recorder_module


def wait_until(true: Callable[[], bool]) -> None:
    """Until what another thread does has been done."""
    deadline = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_spans_of_the_seam_arrive_in_the_file(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, rank=0, world_size=1)
    tracing.set_step(4)
    tracing.add_sink(recorder)

    with tracing.span("forward", category="compute", unit="blocks.0"):
        tracing.counter("loss", 2.5)
    tracing.remove_sink(recorder)
    trace = read_rank_file(recorder.close())

    counter, span = trace.events
    assert (counter.kind, counter.name, counter.value) == ("counter", "loss", 2.5)
    assert (span.kind, span.name, span.unit, span.step) == ("span", "forward", "blocks.0", 4)
    assert span.start_ns <= counter.start_ns <= span.end_ns
    assert span.thread == threading.get_ident()


def test_a_full_ring_keeps_the_last_events_and_counts_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on, written = threading.Event(), growing_file._write

    def write(file: int, data: bytes) -> None:
        assert go_on.wait(60)
        written(file, data)

    recorder = Recorder(tmp_path, rank=0, world_size=1, capacity=3)
    monkeypatch.setattr(growing_file, "_write", write)  # the disk is slow
    recorder.record(event("taken", 0))
    wait_until(lambda: not recorder._events)

    for number in range(10):
        recorder.record(event(f"event {number}", number))
    go_on.set()
    trace = read_rank_file(recorder.close())

    assert [kept.name for kept in trace.events] == ["taken", "event 7", "event 8", "event 9"]
    assert trace.dropped == 7


def test_no_event_of_any_thread_goes_uncounted(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, rank=0, world_size=1, capacity=1_000)
    made = event("x", 0)

    def record_many() -> None:
        for _ in range(20_000):
            recorder.record(made)

    threads = [threading.Thread(target=record_many) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    trace = read_rank_file(recorder.close())

    assert len(trace.events) + trace.dropped == 4 * 20_000


def test_the_header_pairs_the_two_clocks(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, rank=2, world_size=3)

    offset_before = time.time_ns() - time.perf_counter_ns()
    header = read_rank_file(recorder.close()).header
    offset_after = time.time_ns() - time.perf_counter_ns()

    slack_ns = 50_000_000  # a wall clock may be stepped a little meanwhile
    assert min(offset_before, offset_after) - slack_ns <= header.unix_ns - header.perf_counter_ns
    assert header.unix_ns - header.perf_counter_ns <= max(offset_before, offset_after) + slack_ns
    assert (header.rank, header.world_size) == (2, 3)


def test_closing_twice_changes_nothing(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, rank=0, world_size=1)
    recorder.record(event("kept", 0))
    path = recorder.close()
    content = path.read_bytes()

    recorder.record(event("too late", 1))

    assert recorder.close() == path
    assert path.read_bytes() == content


def test_closing_leaves_only_the_file(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "new folder", rank=12, world_size=13)

    path = recorder.close()

    assert path == tmp_path / "new folder" / "trace-rank00012.trine"
    assert list(path.parent.iterdir()) == [path]


def test_a_file_that_cannot_be_made_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("not a folder")

    with pytest.raises(TraceFileError, match="trace of rank 1 cannot be written"):
        Recorder(tmp_path / "taken", rank=1, world_size=2)


def test_a_link_in_the_place_of_the_file_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("precious")
    (tmp_path / "trace-rank00000.trine").symlink_to(tmp_path / "precious")

    path = Recorder(tmp_path, rank=0, world_size=1).close()

    assert (tmp_path / "precious").read_text() == "precious"
    assert not path.is_symlink()


def test_events_are_in_the_file_while_training_goes_on(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, rank=0, world_size=1)

    recorder.record(event("first", 0))

    wait_until(lambda: len(read_rank_file(recorder.path).events) == 1)
    assert read_rank_file(recorder.path).end is None
    recorder.close()
    assert read_rank_file(recorder.path).end == End(1, 0, "closed")


def test_a_full_file_keeps_the_last_events_and_counts_the_others(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, rank=0, world_size=1, max_bytes=100_000)
    recorder.add_reading(ClockReading(1, 2, 3))

    for number in range(20_000):
        recorder.record(event(f"layer {number % 30}", number, args={"number": number}))
        if number == 10_000:
            wait_until(lambda: not recorder._events)
            recorder.add_reading(ClockReading(4, 5, 6))
    path = recorder.close()

    trace = read_rank_file(path)
    kept = [(made.args or {})["number"] for made in trace.events]
    assert path.stat().st_size < 150_000
    assert len(kept) >= 400  # half of the file at least
    assert kept == list(range(20_000 - len(kept), 20_000))
    assert [made.name for made in trace.events][-1] == f"layer {19_999 % 30}"
    assert trace.dropped == 20_000 - len(kept)
    assert trace.readings == (ClockReading(1, 2, 3), ClockReading(4, 5, 6))
    assert list(tmp_path.iterdir()) == [path]


def test_a_full_disk_is_said_once_and_leaves_what_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = Recorder(tmp_path, rank=3, world_size=4)
    recorder.record(event("in time", 0))
    wait_until(lambda: len(read_rank_file(recorder.path).events) == 1)

    def write(file: int, data: bytes) -> None:
        os.write(file, data[:20])  # what still fits
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(growing_file, "_write", write)
    recorder.record(event("too late", 1))
    wait_until(lambda: "No space left" in caplog.text)
    for number in range(100):
        recorder.record(event("x", number))
    path = recorder.close()

    assert [made.name for made in read_rank_file(path).events] == ["in time"]
    assert caplog.text.count("The trace of rank 3 is not complete") == 1
    assert not recorder._events  # memory is given back


def test_a_folder_that_vanishes_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = Recorder(tmp_path / "run", rank=0, world_size=1)
    shutil.rmtree(tmp_path / "run")

    recorder.record(event("x", 0))
    recorder.close()

    assert caplog.text.count("is not complete") == 1
    assert "No such file or directory" in caplog.text


def test_a_recording_that_takes_the_place_of_another_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = Recorder(tmp_path, rank=0, world_size=1)
    second = Recorder(tmp_path, rank=0, world_size=1)

    second.close()
    assert caplog.text == ""
    first.close()

    assert caplog.text.count("The trace of rank 0 is not complete") == 1
    assert "another recording has taken its place" in caplog.text


def test_a_disk_that_is_full_from_the_start_leaves_no_empty_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(file: int, data: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(growing_file, "_write", write)

    with pytest.raises(TraceFileError, match="No space left on device"):
        Recorder(tmp_path, rank=0, world_size=1)

    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_hangs_does_not_keep_a_process_from_ending(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    go_on = threading.Event()
    monkeypatch.setattr(recorder_module, "_CLOSE_S", 0.05)
    recorder = Recorder(tmp_path, rank=0, world_size=1)
    monkeypatch.setattr(growing_file, "_write", lambda file, data: go_on.wait(60))

    recorder.record(event("x", 0))
    recorder.close()

    assert "nothing could be written" in caplog.text
    go_on.set()
    recorder._thread.join()


def test_what_is_no_event_does_not_take_others_with_it(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, rank=0, world_size=1)

    recorder.record(event("before", 0))
    recorder.record("not an event")  # type: ignore[arg-type]  # what a careless caller does
    recorder.record(event("after", 1))
    trace = read_rank_file(recorder.close())

    assert [made.name for made in trace.events] == ["before", "after"]
    assert trace.dropped == 1


def test_the_header_has_settings_and_no_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    monkeypatch.setenv("TRINE_API_TOKEN", "very secret")
    monkeypatch.setenv("HOME", "somebody")

    recorder = Recorder(tmp_path, rank=0, world_size=1)

    environment = read_rank_file(recorder.close()).header.environment
    assert environment["OMP_NUM_THREADS"] == "3"
    assert environment["GLOO_SOCKET_IFNAME"] == "eth7"
    assert environment["torch threads"] == str(torch.get_num_threads())
    assert environment["trine-tools"] == trine.tools.__version__
    assert "secret" not in str(environment)
    assert "HOME" not in environment


def test_attributes_that_json_does_not_know_do_not_lose_the_trace(tmp_path: Path) -> None:
    class Unspeakable:
        def __str__(self) -> str:
            raise RuntimeError("no")

    loop: list[object] = []
    loop.append(loop)
    recorder = Recorder(tmp_path, rank=0, world_size=1)

    recorder.record(
        event(
            "x",
            0,
            args={
                "path": Path("a/b"),
                "nan": float("nan"),
                "huge": 1 << 80,
                "nested": {"shape": (2, 3), 5: {1}},
                "object": Unspeakable(),
                "loop": loop,
            },
        )
    )
    path = recorder.close()

    args = read_rank_file(path).events[0].args
    assert args is not None
    assert args["path"] == "a/b"
    assert args["nan"] == "nan"
    assert args["huge"] == str(1 << 80)
    assert args["nested"] == {"shape": [2, 3], "5": "{1}"}
    assert args["object"] == "<Unspeakable>"
    json.dumps(args["loop"])  # of a finite depth


def test_numbers_beyond_what_a_reader_takes_do_not_lose_the_trace(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, rank=0, world_size=1)
    recorder.record(
        event("huge", 1, 2, kind="counter", nbytes=10**30, step=-(10**30), value=10**400)
    )
    recorder.record(event("kept", 1, 2, args={"n": -(2**63), "m": 2**63}))

    huge, kept = read_rank_file(recorder.close()).events

    assert (huge.nbytes, huge.step) == (2**63 - 1, -(2**63))
    assert math.isnan(huge.value)
    assert kept.args == {"n": -(2**63), "m": str(2**63)}


def test_an_event_too_large_for_a_line_keeps_its_times(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, rank=0, world_size=1)

    recorder.record(event("n" * 3_000_000, 5, 9, args={"blob": "b" * 3_000_000}))
    kept = read_rank_file(recorder.close()).events[0]

    assert (kept.start_ns, kept.end_ns) == (5_000, 9_000)
    assert kept.name == "n" * 1_000
    assert kept.args is not None
    assert "left_out" in kept.args


@pytest.mark.parametrize(("rank", "world_size"), [(-1, 2), (2, 2), (0, 0)])
def test_a_rank_outside_its_world_is_refused(tmp_path: Path, rank: int, world_size: int) -> None:
    with pytest.raises(ValueError, match="does not fit a world"):
        Recorder(tmp_path, rank=rank, world_size=world_size)


def test_a_recorder_that_may_keep_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="capacity is 0"):
        Recorder(tmp_path, rank=0, world_size=1, capacity=0)


def test_a_process_with_thousands_of_files_is_recorded(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 1_200:
        pytest.skip("more than 1,024 files are needed, and the system allows fewer")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 1_200), hard))
    files = [os.dup(0) for _ in range(1_030)]  # so that the recorder's have larger numbers
    try:
        recorder = Recorder(tmp_path, rank=0, world_size=1)
        recorder.record(event("x", 0))
        wait_until(lambda: len(read_rank_file(recorder.path).events) == 1)
        assert read_rank_file(recorder.close()).end is not None
    finally:
        for file in files:
            os.close(file)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_fault_of_our_own_is_said_once_and_leaves_what_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = Recorder(tmp_path, rank=0, world_size=1)

    def fail(reading: ClockReading) -> None:
        raise KeyError("a fault")

    monkeypatch.setattr(recorder._file, "add_reading", fail)
    recorder.add_reading(ClockReading(1, 2, 3))
    recorder.close()

    assert caplog.text.count("is not complete") == 1
    assert "KeyError: 'a fault'" in caplog.text
    assert len(read_rank_file(recorder.path).events) == 0

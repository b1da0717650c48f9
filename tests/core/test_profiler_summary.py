"""TimeSummary: right numbers, from any thread, from forked processes, and from the device."""

from __future__ import annotations

import gc
import math
import multiprocessing
import os
import statistics
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from trine.core.profiler import DictSummary, TimeSummary, time_summary
from trine.core.profiler.inbox import Inbox

FORK = multiprocessing.get_context("fork")


def in_a_fork(body: Callable[[], object]) -> int | None:
    """Run `body` in a forked process and say how that ended."""
    process = FORK.Process(target=body)
    process.start()
    process.join()
    return process.exitcode


def means(summary: TimeSummary, clear: bool = False) -> dict[str, float]:
    with summary.summary(clear) as (found, _):
        return found.compute_mean()


# The numbers.


def test_statistics_agree_with_the_standard_library() -> None:
    values = [0.5, 2.0, 1.25, 7.0]
    summary = TimeSummary(auto_init=False)

    for value in values:
        summary.add("step", value)

    with summary.summary() as (found, extremes):
        assert found.make_statistics() == pytest.approx(
            {"step": statistics.fmean(values), "step.std": statistics.pstdev(values)}
        )
        assert extremes == {"step.min": 0.5, "step.max": 7.0}


def test_the_deviation_survives_values_that_hardly_differ() -> None:
    summary = DictSummary()

    for value in (1e9, 1e9 + 1, 1e9 + 2):
        summary.add({"clock": value})

    # The difference of squares would give 0 or the root of a negative number here.
    assert summary.make_statistics()["clock.std"] == pytest.approx(math.sqrt(2 / 3))


def test_names_are_kept_apart_and_one_value_has_no_deviation() -> None:
    summary = DictSummary()

    summary.add({"a": 1, "b": 2})
    summary.add({"b": 4})

    assert summary.make_statistics() == {"a": 1.0, "a.std": 0.0, "b": 3.0, "b.std": 1.0}
    assert summary.extremes() == {"a.min": 1.0, "a.max": 1.0, "b.min": 2.0, "b.max": 4.0}


def test_what_was_handed_out_does_not_change_with_later_reports() -> None:
    summary = TimeSummary(auto_init=False)
    summary.add("step", 1.0)

    with summary.summary() as (found, extremes):
        summary.add("step", 3.0)

        assert found.compute_mean() == {"step": 1.0}
        assert extremes["step.max"] == 1.0
    assert means(summary) == {"step": 2.0}


def test_clear_begins_anew_even_if_the_block_raises() -> None:
    summary = TimeSummary(auto_init=False)
    summary.add("step", 1.0)

    with pytest.raises(RuntimeError), summary.summary(clear=True):
        raise RuntimeError

    assert means(summary) == {}


def test_no_report_is_lost_or_counted_twice_while_another_thread_clears() -> None:
    summary = TimeSummary(auto_init=False)
    per_thread, threads = 2000, 4
    total = 0.0

    def count() -> None:
        for _ in range(per_thread):
            summary.add("one", 1.0)

    workers = [threading.Thread(target=count) for _ in range(threads)]
    for worker in workers:
        worker.start()
    while any(worker.is_alive() for worker in workers):
        total += taken(summary)
    for worker in workers:
        worker.join()
    total += taken(summary)

    assert total == per_thread * threads


def taken(summary: TimeSummary) -> int:
    """How many values were in it; it is empty afterwards."""
    with summary.summary(clear=True) as (found, _):
        moments = found._moments.get("one")
        return moments.count if moments else 0


# Other processes.


def test_a_forked_process_reports_into_the_summary_it_inherited() -> None:
    summary = TimeSummary()

    def work() -> None:
        with summary.report("work"):
            pass
        summary.add("value", 5.0)

    assert in_a_fork(work) == 0
    summary.synchronize()

    found = means(summary)
    assert list(found) == ["work", "value"]
    assert found["value"] == 5.0
    summary.finalize()


def test_more_reports_than_a_pipe_holds_arrive_while_the_process_runs() -> None:
    summary = TimeSummary()
    gate = FORK.Event()

    def work() -> None:
        for _ in range(100):
            for _ in range(100):
                summary.add("one", 1.0)
            gate.wait()
            gate.clear()

    process = FORK.Process(target=work)
    process.start()
    total = 0
    for step in range(100):
        while total < 100 * (step + 1):
            summary.synchronize()
            total += taken(summary)
        gate.set()
    process.join()
    summary.finalize()

    assert total == 100 * 100


def test_a_process_whose_parent_reads_nothing_does_not_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    summary = TimeSummary()
    inbox = summary._inbox
    assert inbox is not None

    def work() -> None:
        for _ in range(10_000):  # several times what the pipe holds
            summary.add("one", 1.0)

    with inbox._lock:
        assert in_a_fork(work) == 0
    summary.synchronize()

    assert 0 < taken(summary) < 10_000
    summary.finalize()


def test_a_very_long_name_arrives_shortened() -> None:
    summary = TimeSummary()

    assert in_a_fork(lambda: summary.add("ä" * 10_000, 1.0)) == 0
    summary.synchronize()

    (name,) = means(summary)
    assert set(name) == {"ä"}
    assert len(name) < 10_000
    summary.finalize()


def test_a_process_that_cannot_report_is_told_what_to_call() -> None:
    summary = TimeSummary(auto_init=False)
    errors = FORK.SimpleQueue()

    def work() -> None:
        for attempt in (lambda: summary.add("one", 1.0), summary.initialize, summary.summary):
            try:
                attempt()
            except RuntimeError as error:
                errors.put(str(error))

    assert in_a_fork(work) == 0

    for _ in range(3):
        message = errors.get()
        assert f"belongs to process {os.getpid()}" in message
        assert "Call initialize() there" in message


def test_what_was_reported_stays_readable_after_finalize() -> None:
    summary = TimeSummary()
    summary.add("step", 1.0)

    summary.finalize()
    summary.finalize()
    summary.add("step", 3.0)

    assert means(summary) == {"step": 2.0}


def test_a_summary_can_listen_again_after_finalize() -> None:
    summary = TimeSummary()
    summary.finalize()
    summary.initialize()
    summary.initialize()

    assert in_a_fork(lambda: summary.add("one", 1.0)) == 0
    summary.synchronize()

    assert means(summary) == {"one": 1.0}
    summary.finalize()


def test_a_forgotten_summary_leaves_no_thread_and_no_descriptor() -> None:
    def descriptors() -> int:
        return len(list(Path("/dev/fd").iterdir()))

    gc.collect()
    threads, open_before = set(threading.enumerate()), descriptors()

    summary = TimeSummary()
    forgotten = weakref.ref(summary)
    during = descriptors()
    del summary
    gc.collect()

    assert forgotten() is None
    assert during == open_before + 4
    assert set(threading.enumerate()) == threads
    assert descriptors() == open_before


def test_closing_in_a_forked_process_leaves_the_owner_listening() -> None:
    received: list[str] = []
    inbox = Inbox(lambda name, value: received.append(name))

    assert in_a_fork(inbox.close) == 0
    assert in_a_fork(lambda: inbox.send("one", 1.0)) == 0
    inbox.close()

    assert received == ["one"]


def test_a_summary_collected_on_its_own_thread_ends_that_thread() -> None:
    def close(name: str, value: float) -> None:
        inbox.close()

    inbox = Inbox(close)

    inbox.send("one", 1.0)
    inbox._thread.join(60)

    assert not inbox._thread.is_alive()


def test_a_program_that_ends_with_a_summary_listening_ends() -> None:
    code = "from trine.core.profiler import TimeSummary; kept = TimeSummary(); print('end')"

    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=True
    )

    assert ended.stdout == "end\n"


# The device.


class FakeEvent:
    """Passed by the device when the clock of the test says so."""

    def __init__(self, device: FakeDevice) -> None:
        self.device = device
        self.at: int | None = None
        self.waited = False

    def record(self, stream: object = None) -> None:
        self.device.queued += 1
        self.at = self.device.queued

    def query(self) -> bool:
        assert self.at is not None
        return self.at <= self.device.reached

    def synchronize(self) -> None:
        assert self.at is not None
        if not self.query():
            self.device.waits += 1
            self.device.reached = self.at

    def elapsed_ms(self, end: FakeEvent) -> float:
        assert self.at is not None
        assert end.at is not None
        assert end.query()
        return (end.at - self.at) * 250.0


class FakeDevice:
    """A device whose events are 250 ms apart and passed only as far as `reached`."""

    def __init__(self) -> None:
        self.queued = 0
        self.reached = 0
        self.waits = 0

    def event(self, *, timing: bool = False) -> FakeEvent:
        assert timing
        return FakeEvent(self)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    device = FakeDevice()

    def get_device(spec: str) -> FakeDevice:
        assert spec == "cuda"
        return device

    monkeypatch.setattr(time_summary, "get_device", get_device)
    return device


def test_device_time_is_counted_beside_host_time_once_the_device_has_passed(
    device: FakeDevice,
) -> None:
    summary = TimeSummary(auto_init=False)

    with summary.report("step", use_cuda=True):
        pass
    before = list(means(summary))
    device.reached = device.queued
    after = means(summary)

    assert before == ["step"]
    assert list(after) == ["step", "step.cuda"]
    assert after["step.cuda"] == 0.25
    assert device.waits == 0


def test_reporting_never_waits_for_the_device_below_the_bound(device: FakeDevice) -> None:
    summary = TimeSummary(max_queue_size=3, auto_init=False)

    for _ in range(3):
        with summary.report("step", use_cuda=True):
            pass

    assert device.waits == 0
    assert list(means(summary)) == ["step"]


def test_beyond_the_bound_the_oldest_report_alone_is_waited_for(device: FakeDevice) -> None:
    summary = TimeSummary(max_queue_size=3, auto_init=False)

    for _ in range(4):
        with summary.report("step", use_cuda=True):
            pass

    assert device.waits == 1
    assert device.reached == 2  # the end of the first report


def test_synchronize_waits_for_all_that_was_reported(device: FakeDevice) -> None:
    summary = TimeSummary(auto_init=False)
    for _ in range(5):
        with summary.report("step", use_cuda=True):
            pass

    summary.synchronize()

    with summary.summary() as (found, _):
        assert found._moments["step.cuda"].count == 5
    assert device.reached == device.queued


def test_device_time_cannot_be_measured_in_a_forked_process(device: FakeDevice) -> None:
    summary = TimeSummary()
    errors = FORK.SimpleQueue()

    def work() -> None:
        try:
            summary.report("step", use_cuda=True)
        except RuntimeError as error:
            errors.put(str(error))

    assert in_a_fork(work) == 0
    summary.finalize()

    assert "measure device time" in errors.get()


def test_a_queue_without_room_is_refused() -> None:
    with pytest.raises(ValueError, match="max_queue_size=0"):
        TimeSummary(max_queue_size=0)


@pytest.mark.gpu
def test_device_time_of_a_matrix_product_is_positive_and_read_without_synchronize() -> None:
    summary = TimeSummary(auto_init=False)
    matrix = torch.ones(512, 512, device="cuda")

    with summary.report("product", use_cuda=True):
        matrix @ matrix
    summary.synchronize()

    assert means(summary)["product.cuda"] > 0

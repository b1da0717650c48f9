"""Recording a loop: the steps that were asked for, on every rank, whatever goes wrong."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.tools.events import write_rank_file
from trine.core import tracing
from trine.tools import Window, profile
from trine.tools.recording.profiler import Profile
from trine.tools.tracing import RankTrace, read_traces


@pytest.fixture(autouse=True)
def before_the_first_step(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(tracing, "_step", -1)
    yield
    assert tracing.sinks() == ()
    assert tracing._step_listeners == ()


def loop(running: Profile, steps: int) -> None:
    """A training loop that knows nothing of steps but their ends."""
    for number in range(steps):
        with tracing.span(f"batch {number}"):
            pass
        running.step()


def told_loop(steps: int, first: int = 0) -> None:
    """One that says where its steps begin, as the Trainer does."""
    for number in range(first, first + steps):
        tracing.set_step(number)
        with tracing.span("step", category="step"), tracing.span(f"batch {number}"):
            pass


def of(folder: Path) -> RankTrace:
    (trace,) = read_traces(folder)
    return trace


def names(folder: Path) -> list[tuple[str, int]]:
    return [(event.name, event.step) for event in of(folder).events]


def test_without_a_schedule_everything_is_recorded(tmp_path: Path) -> None:
    with profile(tmp_path) as running:
        loop(running, 2)
        tracing.instant("after")

    assert names(tmp_path) == [
        ("batch 0", 0),
        ("step", 0),
        ("batch 1", 1),
        ("step", 1),
        ("after", 2),
    ]
    assert of(tmp_path).end is not None


def test_a_step_lasts_from_one_call_to_the_next(tmp_path: Path) -> None:
    with profile(tmp_path) as running:
        loop(running, 3)

    events = of(tmp_path).events
    steps = events.where(events.is_category("step"))
    assert steps.start_ns[1:].tolist() == steps.end_ns[:-1].tolist()
    assert events.parents().tolist() == [1, -1, 3, -1, 5, -1]


def test_a_schedule_records_the_steps_it_chooses(tmp_path: Path) -> None:
    with profile(tmp_path, schedule=Window(skip=1, wait=1, warmup=1, record=2)) as running:
        loop(running, 10)

    assert names(tmp_path) == [("batch 3", 3), ("step", 3), ("batch 4", 4), ("step", 4)]


def test_nobody_listens_while_a_schedule_waits(tmp_path: Path) -> None:
    listening: list[bool] = []

    with profile(tmp_path, schedule=Window(wait=2, warmup=1, record=1, repeat=0)) as running:
        for _ in range(8):
            listening.append(tracing.enabled)
            running.step()

    assert listening == [False, False, True, True] * 2


def test_recordings_of_the_same_steps_agree_on_their_numbers(tmp_path: Path) -> None:
    with profile(tmp_path / "outer") as outer, profile(tmp_path / "inner") as inner:
        for _ in range(3):
            inner.step()
            outer.step()

    assert names(tmp_path / "outer") == [("step", 0), ("step", 1), ("step", 2)]
    assert names(tmp_path / "inner") == names(tmp_path / "outer")


def test_a_recording_goes_on_after_one_within_it(tmp_path: Path) -> None:
    schedule = Window(skip=1, record=3)
    with profile(tmp_path / "outer", schedule=schedule) as outer:
        loop(outer, 1)
        with profile(tmp_path / "inner") as inner:
            loop(inner, 2)
        loop(outer, 5)

    steps = [step for name, step in names(tmp_path / "inner") if name == "step"]
    assert steps == [1, 2]
    steps = [step for name, step in names(tmp_path / "outer") if name == "step"]
    assert steps == [1, 3, 4]


def test_a_recording_under_way_is_not_entered_again(tmp_path: Path) -> None:
    running = profile(tmp_path)
    with running:
        loop(running, 2)
        with pytest.raises(RuntimeError, match="is under way already"):
            running.__enter__()
        loop(running, 1)
    assert [step for name, step in names(tmp_path) if name == "step"] == [0, 1, 2]

    with running:
        loop(running, 1)
    assert len(names(tmp_path)) == 2


def test_the_schedule_of_another_profiler_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="schedule is function; expected a trine"):
        profile(tmp_path, schedule=torch.profiler.schedule(wait=1, warmup=1, active=2))  # type: ignore[arg-type]  # what is tested

    assert list(tmp_path.iterdir()) == []


def test_steps_that_are_told_are_followed(tmp_path: Path) -> None:
    with profile(tmp_path, schedule=Window(skip=2, record=2)):
        told_loop(6, first=100)

    assert names(tmp_path) == [("batch 102", 102), ("step", 102), ("batch 103", 103), ("step", 103)]


def test_steps_that_are_told_are_not_counted_twice(tmp_path: Path) -> None:
    with profile(tmp_path) as running:
        for number in range(3):
            told_loop(1, first=number)
            running.step()

    assert [step for name, step in names(tmp_path) if name == "step"] == [0, 1, 2]


def test_a_loop_that_fails_leaves_its_recording(tmp_path: Path) -> None:
    def fail() -> None:
        with profile(tmp_path) as running:
            loop(running, 1)
            raise RuntimeError("training failed")

    with pytest.raises(RuntimeError, match="training failed"):
        fail()

    assert names(tmp_path) == [("batch 0", 0), ("step", 0)]


def test_an_earlier_run_of_a_larger_world_is_gone(tmp_path: Path) -> None:
    for rank in range(3):
        write_rank_file(tmp_path, rank=rank, world_size=3)

    with profile(tmp_path):
        pass

    assert [trace.header.rank for trace in read_traces(tmp_path)] == [0]


def test_training_goes_on_where_nothing_can_be_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "taken").write_text("not a folder")

    with profile(tmp_path / "taken") as running:
        loop(running, 2)

    assert caplog.text.count("Training goes on without it") == 1


def train_as(rank: int, folder: Path) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2"}
    with profile(folder) as running:
        loop(running, 3)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_every_rank_writes_its_file_and_compares_its_clock(tmp_path: Path) -> None:
    fork = multiprocessing.get_context("fork")
    ranks = [fork.Process(target=train_as, args=(rank, tmp_path)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(60)

    first, second = read_traces(tmp_path)
    assert [rank.exitcode for rank in ranks] == [0, 0]
    assert (second.header.rank, second.header.world_size) == (1, 2)
    assert first.readings == ()
    for reading in second.readings:  # of one clock
        assert abs(reading.offset_ns) <= reading.error_ns
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "trace-rank00000.trine",
        "trace-rank00001.trine",
    ]

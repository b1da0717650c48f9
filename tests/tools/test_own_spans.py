"""Spans that `trine trace run` adds: none where the program reports its own."""

from __future__ import annotations

import os
from pathlib import Path
from time import perf_counter_ns
from typing import cast

import pytest

from tests.tools.events import event
from trine.core import tracing
from trine.core.tracing import Kind, TraceEvent
from trine.tools.recording.injected import Session
from trine.tools.recording.torch_compute import OwnSpans
from trine.tools.tracing import read_traces


class FakeRecording:
    def __init__(self) -> None:
        self.recording = True
        self.names: list[str] = []

    def report(self, event: TraceEvent) -> None:
        self.names.append(event.name)


class FakeSession:
    def __init__(self) -> None:
        self.recording: FakeRecording | None = FakeRecording()
        self.watches = True

    def running(self) -> FakeRecording | None:
        return self.recording

    def watch_no_more(self) -> None:
        self.watches = False


@pytest.fixture
def session() -> FakeSession:
    return FakeSession()


@pytest.fixture
def spans(session: FakeSession) -> OwnSpans:
    return OwnSpans(cast(Session, session))


def step(spans: OwnSpans, *, program_reports: bool = False) -> None:
    for name in ("forward", "backward", "optimizer"):
        spans.add(name, perf_counter_ns())
        if program_reports:
            spans.leave_to_program()  # its span ends after ours
    spans.end_of_step()


def test_a_program_without_spans_gets_ours(session: FakeSession, spans: OwnSpans) -> None:
    for _ in range(3):
        step(spans)

    assert session.recording is not None
    assert session.recording.names == ["forward", "backward", "optimizer"] * 3


def test_a_program_with_spans_keeps_its_own(session: FakeSession, spans: OwnSpans) -> None:
    for _ in range(3):
        step(spans, program_reports=True)

    assert session.recording is not None
    assert session.recording.names == []


def test_a_program_is_watched_for_spans_in_its_first_steps_only(
    session: FakeSession, spans: OwnSpans
) -> None:
    step(spans)
    watched = session.watches
    step(spans)

    assert watched
    assert not session.watches


def test_spans_of_a_first_step_without_an_end_are_not_lost(
    session: FakeSession, spans: OwnSpans
) -> None:
    spans.add("forward", perf_counter_ns())

    spans.flush()

    assert session.recording is not None
    assert session.recording.names == ["forward"]


def test_steps_outside_of_the_schedule_have_none(session: FakeSession, spans: OwnSpans) -> None:
    assert session.recording is not None
    session.recording.recording = False

    step(spans)

    assert session.recording.names == []


def test_a_process_that_is_not_recorded_has_none(session: FakeSession, spans: OwnSpans) -> None:
    session.recording = None

    step(spans)  # and nothing is raised
    assert session.watches


@pytest.mark.parametrize(("kind", "left"), [("span", True), ("instant", False)])
def test_a_span_of_the_program_and_no_mark_of_the_engine_means_that_it_reports_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Kind, left: bool
) -> None:
    monkeypatch.setattr(tracing, "_step", -1)
    monkeypatch.setenv("TRINE_TRACE_TAKEN", "")
    session = Session(tmp_path, None)

    session.record(event("backward", 0, 0, kind=kind, category="compute"))
    session.compute.add("forward", perf_counter_ns())
    session.finish()

    (trace,) = read_traces(tmp_path)
    assert [made.name for made in trace.events] == ["backward"] + ["forward"] * (not left)


def test_a_process_that_a_rank_started_is_not_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRINE_TRACE_TAKEN", f"0/1/{os.getpid() + 1}")

    assert Session(tmp_path, None).running() is None
    assert list(tmp_path.iterdir()) == []


def test_a_rank_that_was_thought_another_starts_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracing, "_step", -1)
    monkeypatch.setenv("TRINE_TRACE_TAKEN", "")
    session = Session(tmp_path, None)
    session.begin()  # before the process group was made

    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    session.rank_is_known()
    session.finish()

    assert [(trace.header.rank, trace.header.world_size) for trace in read_traces(tmp_path)] == [
        (1, 2)
    ]


def test_what_fails_ends_the_recording_and_not_the_program(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    session = Session(tmp_path, None)

    def fail() -> None:
        raise RuntimeError("no")

    guarded = session.guarded(fail)
    guarded()
    guarded()

    assert capsys.readouterr().err == "trine: recording ends: RuntimeError: no\n"
    assert session.running() is None

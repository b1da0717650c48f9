"""Spans that `trine trace run` adds: none where the program reports its own."""

from __future__ import annotations

from pathlib import Path
from time import perf_counter_ns
from typing import cast

import pytest

from trine.core.tracing import Kind, TraceEvent
from trine.tools.recording.injected import Session
from trine.tools.recording.torch_compute import OwnSpans


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


@pytest.mark.parametrize(("kind", "names"), [("instant", ["forward"]), ("span", [])])
def test_only_spans_tell_that_a_program_reports_its_computation(
    kind: Kind, names: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recording = FakeRecording()
    session = Session(tmp_path, None)
    monkeypatch.setattr(session, "running", lambda: recording)

    session.compute.add("forward", perf_counter_ns())
    session.record(TraceEvent(kind, "backward", "compute", "layers.0", 0, None, 1, 1))
    session.compute.flush()

    assert [name for name in recording.names if name == "forward"] == names


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

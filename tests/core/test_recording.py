"""Finding a recorder: the installed one, none, or one that is broken."""

from __future__ import annotations

import json
import logging
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace

import pytest

from trine.core import recording
from trine.core.recording import ENTRY_POINT_GROUP, Report, find_recorder


class FakeEntryPoint(SimpleNamespace):
    """An entry point whose `load` gives `target`, or raises it."""

    name: str
    value: str
    target: object

    def load(self) -> object:
        if isinstance(self.target, Exception):
            raise self.target
        return self.target


def install(monkeypatch: pytest.MonkeyPatch, *entries: FakeEntryPoint) -> None:
    """Make the metadata of the environment list these recorders and no others."""

    def entry_points(*, group: str) -> tuple[FakeEntryPoint, ...]:
        assert group == "trine.recorder"
        return entries

    monkeypatch.setattr(recording, "entry_points", entry_points)


def test_without_a_recorder_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)

    assert find_recorder() is None


def test_the_installed_recorder_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    target = object()
    install(monkeypatch, FakeEntryPoint(name="default", value="m", target=target))

    assert find_recorder() is target


def test_of_several_recorders_the_first_by_name_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = object(), object()
    install(
        monkeypatch,
        FakeEntryPoint(name="b", value="m2", target=second),
        FakeEntryPoint(name="a", value="m1", target=first),
    )

    assert find_recorder() is first


def test_a_recorder_that_cannot_be_imported_is_logged_and_passed_over(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    good = object()
    broken = FakeEntryPoint(name="a", value="missing.module", target=ImportError("no module"))
    install(monkeypatch, broken, FakeEntryPoint(name="b", value="m", target=good))

    with caplog.at_level(logging.ERROR, logger="trine.core.recording"):
        found = find_recorder()

    assert found is good
    assert [entry.getMessage() for entry in caplog.records] == [
        "recorder 'a' (missing.module) cannot be used"
    ]


def test_only_a_broken_recorder_is_the_same_as_none(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, FakeEntryPoint(name="a", value="m", target=RuntimeError("at import")))

    assert find_recorder() is None


def test_a_real_entry_point_of_the_group_is_loaded_as_a_module(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = EntryPoint(name="real", value="json", group=ENTRY_POINT_GROUP)
    monkeypatch.setattr(recording, "entry_points", lambda *, group: (real,))

    found: object = find_recorder()
    assert found is json


def test_a_report_is_empty_unless_told_otherwise() -> None:
    assert Report() == Report(files={}, dropped=0)
    assert Report(files={"timeline": Path("t.json")}).files["timeline"] == Path("t.json")

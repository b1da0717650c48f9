"""Finding a planner, and requests that make no sense."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from trine.core import planning
from trine.core.planning import PlanError, PlanRequest, Usage, find_planner


def install(monkeypatch: pytest.MonkeyPatch, *planners: Any) -> None:
    """Make the metadata list these planners; an exception is one that cannot be loaded."""

    def load(planner: Any) -> Any:
        if isinstance(planner, Exception):
            raise planner
        return planner

    entries = [
        SimpleNamespace(name=f"p{i}", value=f"package{i}", load=lambda p=planner: load(p))
        for i, planner in enumerate(planners)
    ]
    monkeypatch.setattr(planning, "entry_points", lambda *, group: entries)


def test_the_installed_planner_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    planner = object()
    install(monkeypatch, planner, object())

    assert find_planner() is planner


def test_without_a_planner_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)

    with pytest.raises(PlanError, match="Install trine-distributed"):
        find_planner()


def test_a_planner_that_cannot_be_loaded_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, ImportError("no numpy"))

    with pytest.raises(PlanError, match=r"'p0' \(package0\) cannot be loaded. ImportError: no n"):
        find_planner()


@pytest.mark.parametrize(
    ("request_", "message"),
    [({"shard": 0}, "shard is 0"), ({"shard": 2, "rank": -1}, "rank is -1")],
)
def test_a_request_of_no_ranks_is_refused(request_: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        PlanRequest(**request_)


def test_a_total_counts_each_kind_once() -> None:
    assert Usage(1, 2, 4, 8, 16, 32, 64).total == 127

"""What runs are compared by, from recordings and from summaries as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from tests.tools.events import US
from tests.tools.jobs import left
from tests.tools.training import recorded, train, write_run
from trine.tools import errors
from trine.tools.analysis.breakdown import break_down
from trine.tools.analysis.measured import Measured, measure
from trine.tools.analysis.saved import read_measured
from trine.tools.analysis.spread import Spread
from trine.tools.analysis.summary import summarize
from trine.tools.tracing import RankTrace


def measured(traces: list[RankTrace]) -> Measured:
    return measure(traces[0].header.world_size, break_down(traces).ranks)


def test_parts_are_medians_over_the_steps() -> None:
    run = measured(recorded(train(steps=5, load=lambda step: [90, 100, 110, 100, 900][step])))

    assert run.steps == 5
    assert run.parts["data"] == Spread(median=100 * US, mad=10 * US, count=5)
    assert run.parts["compute"] == Spread(400 * US, 0, 5)
    assert run.parts["exposed"] == Spread(50 * US, 0, 5)
    assert run.parts["step"].median == 550 * US
    assert run.parts["sent"] == Spread(1_000, 0, 5)
    assert run.parts["between"] == Spread(0, 0, 4)


def test_of_each_step_the_mean_over_the_ranks_counts() -> None:
    quick, slow = train(world_size=1)[0], train(world_size=1, load=lambda step: 300)[0]

    run = measured(recorded([quick, slow]))

    assert run.parts["data"] == Spread(200 * US, 0, 10)


def test_collectives_are_measured_by_unit() -> None:
    run = measured(recorded(train(units=("a", "b"), nbytes=700)))

    assert [(each.unit, each.operation) for each in run.collectives] == [
        ("a", "all_gather"),
        ("b", "all_gather"),
    ]
    assert run.collectives[1].numbers["in_flight_ns"].median == 50 * US
    assert run.collectives[1].numbers["nbytes"].median == 700
    assert run.collectives[1].numbers["count"].median == 1
    assert run.parts["sent"].median == 1_400


def test_without_steps_there_is_nothing_to_compare() -> None:
    assert measured([left(0, 2)]) == Measured(2, 0, 0, {}, [])


def summary_file(path: Path, version: object = 2) -> Path:
    summary = summarize(recorded(train()))
    data = {"format": "trine-summary", "version": version, **asdict(summary)}
    path.write_text(json.dumps(data))
    return path


def test_a_summary_as_json_says_the_same_as_its_recording(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", train())
    file = summary_file(tmp_path / "summary.json")

    assert read_measured(file) == read_measured(folder)


@pytest.mark.parametrize("version", [1, 3, None, "2", True])
def test_a_summary_of_another_version_is_refused(tmp_path: Path, version: object) -> None:
    file = summary_file(tmp_path / "summary.json", version)

    with pytest.raises(errors.NotComparableError, match="compares version 2: write it anew"):
        read_measured(file)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"parts": {"step"', '"parts": {"stop"'),
        ('"median": 1000.0', '"median": -1'),
        ('"median": 1000.0', '"median": NaN'),
        ('"median": 1000.0', '"median": 1e999'),
        ('"median": 1000.0', '"median": 1e308'),
        ('"median": 1000.0', '"median": 1e-320'),
        ('"median": 1000.0', f'"median": 1{"0" * 400}'),
        ('"median": 1000.0', '"median": "many"'),
        ('"median": 1000.0', '"median": true'),
        ('"count": 10', '"count": 1.5'),
        ('"unit": "layer", "operation"', '"unit": [], "operation"'),
        ('"per_step": {', '"per_step": [], "": {'),
        ('"collectives": [', '"collectives": {}, "": ['),
        ('"format": "trine-summary"', '"format": "trine-summary "'),
        ('"format"', "{"),
    ],
)
def test_a_damaged_summary_is_refused_in_one_sentence(tmp_path: Path, old: str, new: str) -> None:
    file = summary_file(tmp_path / "summary.json")
    text = file.read_text()
    assert old in text
    # The last one: what is compared stands at the end.
    file.write_text(new.join(text.rsplit(old, 1)))

    with pytest.raises(errors.TraceFileError, match=r"summary.json cannot be read: .*\.") as caught:
        read_measured(file)

    assert "\n" not in str(caught.value)


def test_a_deep_file_is_no_recursion(tmp_path: Path) -> None:
    file = tmp_path / "deep.json"
    file.write_text('{"format": "trine-summary", "deep": ' + "[" * 200_000)

    with pytest.raises(errors.TraceFileError, match="not JSON"):
        read_measured(file)

"""What changed between two hand-made runs."""

from __future__ import annotations

import io
import json
import random
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.tools.events import US
from tests.tools.test_measured import measured
from tests.tools.training import recorded, train, write_run
from trine.core.tracing import TraceEvent
from trine.tools.analysis.change import compare
from trine.tools.analysis.diff import Diff, diff
from trine.tools.analysis.spread import Spread
from trine.tools.cli import main
from trine.tools.reports.diff_table import print_diff

Run = list[list[TraceEvent]]


def changed(before: Run, after: Run) -> Diff:
    return diff(measured(recorded(before)), measured(recorded(after)))


def shown(before: Run, after: Run) -> str:
    out = io.StringIO()
    print_diff(changed(before, after), out)
    return out.getvalue()


@pytest.mark.parametrize(
    ("before", "after", "verdict"),
    [
        (Spread(100, 0, 10), Spread(110, 0, 10), "more"),
        (Spread(100, 0, 10), Spread(90, 0, 10), "less"),
        (Spread(100, 0, 10), Spread(102, 0, 10), "unchanged"),  # two percent
        (Spread(100, 0, 10), Spread(102.1, 0, 10), "more"),
        (Spread(100, 5, 10), Spread(110, 5, 10), "unchanged"),  # error 2.94 each, 12.5 in all
        (Spread(100, 5, 40), Spread(110, 5, 40), "more"),  # error 1.47 each, 6.2 in all
        (Spread(100, 0, 4), Spread(110, 0, 10), "unsure"),
        (Spread(100, 0, 4), Spread(100, 0, 4), "unchanged"),
        (None, Spread(100, 0, 10), "new"),
        (Spread(100, 0, 10), None, "gone"),
        (Spread(0, 0, 10), Spread(0, 0, 10), "unchanged"),
        (Spread(0, 0, 10), Spread(1, 0, 10), "unchanged"),  # two thousandths of the step
        (Spread(0, 0, 10), Spread(1.1, 0, 10), "more"),
    ],
)
def test_a_difference_counts_if_chance_does_not_explain_it(
    before: Spread | None, after: Spread | None, verdict: str
) -> None:
    assert compare(before, after, step=Spread(500, 0, 10)).verdict == verdict


def test_counted_numbers_differ_by_the_smallest_amount() -> None:
    assert compare(Spread(100, 0, 10), Spread(101, 0, 10)).verdict == "more"


def test_runs_that_differ_by_chance_alone_mostly_look_unchanged() -> None:
    chance = random.Random(3)

    def one() -> Spread:
        return Spread.of([chance.gauss(100, 10) for _ in range(30)])

    verdicts = [compare(one(), one(), one()).verdict for _ in range(500)]

    # Three errors of a median, itself known to some 20 % from 30 steps: about one in 100.
    assert verdicts.count("unchanged") >= 480


def test_the_part_that_grew_is_named_with_the_step() -> None:
    found = changed(train(), train(load=lambda step: 160))

    assert found.parts["step"].difference == 60 * US
    assert found.parts["step"].share == pytest.approx(60 / 550)
    assert found.parts["data"].verdict == found.parts["step"].verdict == "more"
    assert found.parts["compute"].verdict == "unchanged"
    assert found.parts["sent"].verdict == "unchanged"


def test_collectives_are_compared_by_unit_and_the_most_changed_comes_first() -> None:
    found = changed(
        train(units=("a", "b")), train(units=("b", "c"), nbytes=2_000, move=lambda step: 80)
    )

    verdicts = {each.unit: each.time.verdict for each in found.collectives}
    assert verdicts == {"a": "gone", "b": "more", "c": "new"}
    assert [each.unit for each in found.collectives] == ["c", "a", "b"]
    b = found.collectives[2]
    assert (b.time.difference, b.nbytes.verdict, b.count.verdict) == (30 * US, "more", "unchanged")


def test_the_text_says_what_got_slower() -> None:
    text = shown(train(units=("a",)), train(units=("b",), load=lambda step: 160))

    assert text.splitlines()[:5] == [
        "before: 2 ranks, 10 steps",
        "after:  2 ranks, 10 steps",
        "",
        "Steps got slower, from 550 us to 610 us, by 60.0 us (+10.9%); noise explains up to "
        "11.0 us.",
        "below: per step, median of the steps, mean over ranks",
    ]
    assert "data      100 us   160 us  +60.0 us  +60.0%  2.00 us  slower" in text
    last_but_one = text.splitlines()[-2].replace(" us", "us").replace(" B", "B")
    assert last_but_one.split() == ["a", "all_gather", "50.0us", "50.0us", "1000B", "1", "gone"]


@pytest.mark.parametrize(
    ("after", "said"),
    [
        (train(), "Steps take as long as before: 550 us, now 550 us."),
        (train(steps=3, load=lambda step: 500), "but there are too few to tell"),
        (train(world_size=4), "the runs have different numbers of ranks"),
        (train(compute=lambda step: 200), "Steps got faster, from 550 us to 350 us"),
        ([[], []], "No steps were recorded in one of the runs."),
    ],
)
def test_the_first_lines_say_how_the_runs_compare(after: Run, said: str) -> None:
    assert said in shown(train(), after)


def test_what_chance_may_explain_is_said_with_how_much() -> None:
    text = shown(
        train(compute=lambda step: 400 + 200 * (step % 2)),
        train(compute=lambda step: 440 + 200 * (step % 2)),
    )

    assert "Steps took 650 us, now 690 us (+6.2%), but noise explains up to 249 us" in text


def test_many_units_are_cut_short_on_the_screen() -> None:
    units = tuple(f"layers.{number}" for number in range(25))

    assert shown(train(units=units), train(units=units)).endswith(
        "and 5 more; --json has them all\n"
    )


def test_names_cannot_steer_the_terminal() -> None:
    text = shown(train(units=("\x1b[2J",)), train())

    assert "\x1b" not in text
    assert r"\x1b[2J" in text


def test_the_command_compares_folders(tmp_path: Path) -> None:
    before = write_run(tmp_path / "before", train())
    after = write_run(tmp_path / "after", train(load=lambda step: 160))

    text = CliRunner().invoke(main, ["trace", "diff", str(before), str(after)])
    as_json = CliRunner().invoke(main, ["trace", "diff", str(before), str(after), "--json"])

    assert text.exit_code == as_json.exit_code == 0
    assert "Steps got slower" in text.output
    data = json.loads(as_json.output)
    assert (data["format"], data["version"]) == ("trine-diff", 1)
    assert data["parts"]["step"]["difference"] == 60 * US
    assert data["parts"]["step"]["verdict"] == "more"

"""Whether a run is worse than its baseline, and what CI sees of it."""

from __future__ import annotations

import io
import json
import random
from dataclasses import asdict
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from tests.tools.test_measured import measured, summary_file
from tests.tools.training import Times, recorded, train, write_run
from trine.core.tracing import TraceEvent
from trine.tools.analysis.check import Check, check
from trine.tools.cli import main
from trine.tools.reports.check_table import print_check

Run = list[list[TraceEvent]]


def checked(run: Run, baseline: Run, **limits: float) -> Check:
    return check(measured(recorded(run)), measured(recorded(baseline)), limits)


def worse(found: Check) -> list[str]:
    return [each.name for each in found.worse]


def test_what_grew_by_more_than_its_limit_is_worse() -> None:
    slower = train(load=lambda step: 160)  # by 60 of 550 us, 10.9 %

    assert worse(checked(slower, train(), step=0.1)) == ["step"]
    assert worse(checked(slower, train(), step=0.11)) == []
    assert worse(checked(train(), slower, step=0.0)) == []


def test_each_part_has_its_own_limit() -> None:
    found = checked(
        train(load=lambda step: 160, nbytes=1_100), train(), step=0.2, data=0.5, sent=0.05
    )

    assert worse(found) == ["data", "sent"]
    assert [each.share for each in found.worse] == pytest.approx([0.6, 0.1])


def noisy(seed: int, extra: int = 0) -> Times:
    """400 us and noise of 10 % of that."""
    chance = random.Random(seed)
    values = [int(chance.gauss(400 + extra, 40)) for _ in range(30)]
    return values.__getitem__


def test_noise_does_not_fail() -> None:
    for seed in range(20):
        run = train(steps=30, compute=noisy(seed))
        baseline = train(steps=30, compute=noisy(1_000 + seed))

        assert worse(checked(run, baseline, step=0.0)) == []


def test_a_regression_is_seen_through_the_noise() -> None:
    run = train(steps=30, compute=noisy(1, extra=100))

    assert worse(checked(run, train(steps=30, compute=noisy(2)), step=0.05)) == ["step"]


def test_over_the_limit_and_within_noise_is_said_and_passes() -> None:
    times: Times = lambda step: 400 + 200 * (step % 2)  # noqa: E731
    longer: Times = lambda step: 440 + 200 * (step % 2)  # noqa: E731

    found = checked(train(compute=longer), train(compute=times), step=0.01)

    assert [each.outcome for each in found.checked] == ["within noise"]
    out = io.StringIO()
    print_check(found, out)
    assert "noise may be why: the step grew by 6.2% (limit 1%)." in out.getvalue()


def test_what_is_not_worth_a_thought_is_not_worse() -> None:
    """A part of 0 us became 1 us of a step of 551."""
    found = checked(train(move=lambda step: 1), train(move=lambda step: 0), exposed=0.05)

    assert worse(found) == []


def trine(*args: str | Path) -> Result:
    return CliRunner().invoke(main, ["trace", "check", *map(str, args)])


@pytest.fixture
def baseline(tmp_path: Path) -> Path:
    """The summary of a run as JSON, as CI keeps it."""
    return summary_file(tmp_path / "baseline.json")


def test_a_run_that_is_no_worse_passes(tmp_path: Path, baseline: Path) -> None:
    folder = write_run(tmp_path / "run", train(load=lambda step: 110))

    result = trine(folder, "--baseline", baseline)

    assert result.exit_code == 0
    assert result.output.startswith(
        "No worse than the baseline.\nCompared: medians of 10 steps against 10 of the baseline.\n"
    )


@pytest.mark.parametrize("limit", ["5%", "0.05", "step=5%", "step=0.05"])
def test_a_run_that_is_worse_fails_and_says_in_what(
    tmp_path: Path, baseline: Path, limit: str
) -> None:
    folder = write_run(tmp_path / "run", train(load=lambda step: 160))

    result = trine(folder, "--baseline", baseline, "--max-regression", limit)

    assert result.exit_code == 1
    assert result.output.startswith(
        "Worse: the step grew by 10.9% (limit 5%), from 550 us to 610 us.\n"
    )


def test_limits_of_parts_add_to_the_general_one(tmp_path: Path, baseline: Path) -> None:
    folder = write_run(tmp_path / "run", train(load=lambda step: 160))

    result = trine(
        folder, "--baseline", baseline, "--max-regression", "20%", "--max-regression", "data=10%"
    )

    assert result.exit_code == 1
    assert "Worse: data grew by 60.0% (limit 10%)" in result.output
    assert "the step grew" not in result.output


def test_the_json_says_what_was_checked(tmp_path: Path, baseline: Path) -> None:
    folder = write_run(tmp_path / "run", train(nbytes=2_000))

    result = trine(folder, "--baseline", baseline, "--json")

    data = json.loads(result.output)
    assert result.exit_code == 1
    assert (data["format"], data["version"], data["passed"]) == ("trine-check", 1, False)
    assert [each["name"] for each in data["checked"] if each["outcome"] == "worse"] == ["sent"]


def test_what_the_summary_command_writes_is_a_baseline(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", train())
    summary = CliRunner().invoke(main, ["trace", "summary", str(folder), "--json"])
    (tmp_path / "baseline.json").write_text(summary.stdout)

    assert trine(folder, "--baseline", tmp_path / "baseline.json").exit_code == 0


def test_a_recording_can_be_the_baseline(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", train())

    assert trine(folder, "--baseline", folder).exit_code == 0


@pytest.mark.parametrize(
    ("limit", "said"),
    [
        ("much", "expected a share such as 5% or 0.05"),
        ("-5%", "expected a share such as 5% or 0.05"),
        ("nan", "expected a share such as 5% or 0.05"),
        ("inf%", "expected a share such as 5% or 0.05"),
        ("", "expected a share such as 5% or 0.05"),
        ("=5%", "expected a share such as 5% or 0.05"),
        ("5", "'5' is 500%; expected a share such as 5% or 0.05"),
        ("tea=5%", "There is no 'tea' to compare; there are step, compute"),
    ],
)
def test_a_limit_that_cannot_be_meant_is_refused(baseline: Path, limit: str, said: str) -> None:
    result = trine(baseline, "--baseline", baseline, "--max-regression", limit)

    assert result.exit_code == 2
    assert said in result.output


def test_runs_that_cannot_be_compared_are_refused(tmp_path: Path, baseline: Path) -> None:
    others: dict[str, tuple[Run, str]] = {
        "ranks": (train(world_size=4), "The baseline is of 2 ranks, the run of 4"),
        "steps": (train(steps=4), "The run has 4 steps, too few to compare"),
        "no steps": ([[], []], "The run has 0 steps, too few to compare"),
    }
    for name, (events, said) in others.items():
        result = trine(write_run(tmp_path / name, events), "--baseline", baseline)

        assert result.exit_code == 2
        assert said in result.output


def test_a_run_of_which_a_rank_is_missing_is_refused(tmp_path: Path, baseline: Path) -> None:
    folder = write_run(tmp_path / "run", train())
    (file,) = folder.glob("*00001*")
    file.unlink()

    result = trine(folder, "--baseline", baseline)

    assert result.exit_code == 2
    assert "The baseline is the mean of 2 ranks, the run of 1 (of 2)" in result.output
    assert trine(folder, "--baseline", folder).exit_code == 0  # one rank of each


def test_a_baseline_of_another_version_is_refused(tmp_path: Path, baseline: Path) -> None:
    old = summary_file(tmp_path / "old.json", version=1)

    result = trine(baseline, "--baseline", old)

    assert result.exit_code == 2
    assert "is a summary of version 1, and this trine-tools compares version 2" in result.output


def test_a_check_can_be_kept_as_json() -> None:
    assert json.dumps(asdict(checked(train(), train(), step=0.05)))

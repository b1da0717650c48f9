"""Whether a run is worse than one before, for CI: `check`.

A limit is a share of the baseline. What exceeds it fails only if it is a difference at all
(`change`), so that noise does not fail a build.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

from trine.tools.analysis.change import FEWEST_STEPS, compare
from trine.tools.analysis.measured import COUNTED, Measured
from trine.tools.errors import NotComparableError

__all__ = ["ALWAYS", "Check", "Checked", "check"]

ALWAYS: Final = ("step", "sent")
"""What is checked without being asked for: the time of a step, the bytes that a rank sends."""

Outcome = Literal["ok", "worse", "within noise"]


@dataclass(frozen=True)
class Checked:
    """One number per step.

    Attributes:
        name: of the part; `step` is the whole step, `sent` the bytes that a rank sends.
        before: the baseline's median over its steps.
        after: that of the run.
        share: by how much it grew, as a share of the baseline; None if that was nothing.
        noise: a difference of up to this says nothing.
        limit: by how much it may grow, as a share of the baseline.
        outcome: "within noise" if the limit is exceeded, and chance may be why.
    """

    name: str
    before: float
    after: float
    share: float | None
    noise: float
    limit: float
    outcome: Outcome


@dataclass(frozen=True)
class Check:
    """Whether a run is worse than its baseline.

    Attributes:
        steps: how many steps of the run were compared.
        baseline_steps: how many of the baseline.
        checked: each number that was looked at.
    """

    steps: int
    baseline_steps: int
    checked: list[Checked]

    @property
    def worse(self) -> list[Checked]:
        """What failed."""
        return [each for each in self.checked if each.outcome == "worse"]

    @property
    def unclear(self) -> list[Checked]:
        """What exceeds its limit by no more than chance explains."""
        return [each for each in self.checked if each.outcome == "within noise"]


def check(run: Measured, baseline: Measured, limits: Mapping[str, float]) -> Check:
    """Compare a run with its baseline.

    Args:
        run: what is checked.
        baseline: what it may not be worse than.
        limits: by name of a part how much it may grow, as a share; 0.05 is 5 %.

    Raises:
        NotComparableError: if the two say nothing about each other.
    """
    if run.world_size != baseline.world_size:
        raise NotComparableError(
            f"The baseline is of {baseline.world_size} ranks, the run of {run.world_size}: make a "
            "baseline of as many."
        )
    for what, steps in (("The baseline", baseline.steps), ("The run", run.steps)):
        if steps < FEWEST_STEPS:
            raise NotComparableError(
                f"{what} has {steps} steps, too few to compare: record at least {FEWEST_STEPS}, "
                "better 30, after those that warm up."
            )
    if run.ranks != baseline.ranks:
        raise NotComparableError(
            f"The baseline is the mean of {baseline.ranks} ranks, the run of {run.ranks} (of "
            f"{run.world_size}): the files of the others are missing, or hold no steps. Record "
            "the same ranks of both."
        )
    missing = [name for name in limits if name not in baseline.parts or name not in run.parts]
    if missing:
        known = ", ".join(name for name in baseline.parts if name in run.parts)
        raise NotComparableError(f"There is no {missing[0]!r} to compare; there are {known}.")
    return Check(
        run.steps,
        baseline.steps,
        [_checked(name, run, baseline, limit) for name, limit in limits.items()],
    )


def _checked(name: str, run: Measured, baseline: Measured, limit: float) -> Checked:
    before, after = baseline.parts[name], run.parts[name]
    change = compare(before, after, None if name in COUNTED else baseline.parts["step"])
    outcome: Outcome = "ok"
    if change.difference > limit * before.median:
        outcome = "worse" if change.difference > change.noise else "within noise"
    return Checked(name, before.median, after.median, change.share, change.noise, limit, outcome)

"""Whether a number got larger or smaller from one run to another, or only looks so.

Two medians differ by chance. A difference counts if it exceeds three times the error that
the spreads over the steps leave. One of times has to exceed two percent, too: runs of the
same program on the same machine differ by more than their steps tell. And two thousandths of
a step: what is less is not worth a thought.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import hypot
from typing import Final, Literal

from trine.tools.analysis.spread import Spread

__all__ = ["FEWEST_STEPS", "Change", "Verdict", "compare"]

FEWEST_STEPS: Final = 5
"""Of fewer steps the spread is not known well enough to say anything."""

_ERRORS: Final = 3.0
_LEAST: Final = 0.02
_OF_STEP: Final = 0.002

Verdict = Literal["more", "less", "unchanged", "unsure", "new", "gone"]


@dataclass(frozen=True)
class Change:
    """A number per step, before and after.

    Attributes:
        before: None if it is new.
        after: None if it is gone.
        difference: after minus before; what is not there counts as zero.
        share: the difference as a share of what was before; None if that was nothing.
        noise: a difference of up to this says nothing.
        verdict: what can be said; "unsure" if there are too few steps.
    """

    before: Spread | None
    after: Spread | None
    difference: float
    share: float | None
    noise: float
    verdict: Verdict


def compare(before: Spread | None, after: Spread | None, step: Spread | None = None) -> Change:
    """What became of a number.

    Args:
        before: over the steps of the first run; None if it has no such number.
        after: over those of the second.
        step: of numbers that are times, the step time before. Others are counted, and the
            same program gives the same again.
    """
    old, new = before or Spread(0, 0, 0), after or Spread(0, 0, 0)
    difference = new.median - old.median
    noise = _ERRORS * hypot(old.error, new.error)
    if step is not None:
        noise = max(noise, _LEAST * old.median, _OF_STEP * step.median)
    verdict: Verdict
    if before is None or after is None:
        verdict = "gone" if before else "new" if after else "unchanged"
        noise = 0.0
    elif abs(difference) <= noise:
        verdict = "unchanged"
    elif min(before.count, after.count) < FEWEST_STEPS:
        verdict = "unsure"
    else:
        verdict = "more" if difference > 0 else "less"
    share = difference / old.median if old.median else None
    return Change(before, after, difference, share, noise, verdict)

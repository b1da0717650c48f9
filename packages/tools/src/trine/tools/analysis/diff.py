"""What changed from one run to another: `diff`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from trine.tools.analysis.change import Change, compare
from trine.tools.analysis.measured import COUNTED, Measured
from trine.tools.analysis.spread import Spread

__all__ = ["CollectiveChange", "Diff", "RunFacts", "diff"]


@dataclass(frozen=True)
class RunFacts:
    """One of the two runs.

    Attributes:
        world_size: how many ranks it had.
        ranks: how many were recorded.
        steps: how many were compared.
    """

    world_size: int
    ranks: int
    steps: int


@dataclass(frozen=True)
class CollectiveChange:
    """One kind of collective of one unit, per step and rank.

    Attributes:
        unit: full name of the module; "" if it belongs to none.
        operation: such as all_gather.
        time: how long they were under way, in ns.
        exposed: how long they blocked the training thread once all had come, in ns.
        nbytes: bytes that a rank sent.
        count: how many.
    """

    unit: str
    operation: str
    time: Change
    exposed: Change
    nbytes: Change
    count: Change


@dataclass(frozen=True)
class Diff:
    """What changed.

    Attributes:
        before: the first run.
        after: the second.
        parts: by part of the step what became of it, `step` first; times in ns, `sent` in
            bytes; per step, mean over ranks.
        collectives: those whose time changed most come first.
    """

    before: RunFacts
    after: RunFacts
    parts: dict[str, Change]
    collectives: list[CollectiveChange]


def diff(before: Measured, after: Measured) -> Diff:
    """Compare two runs: medians over their steps, and whether chance explains the difference."""
    first = {(each.unit, each.operation): each.numbers for each in before.collectives}
    second = {(each.unit, each.operation): each.numbers for each in after.collectives}
    step = before.parts.get("step", Spread(0, 0, 0))
    collectives = [
        _collective(key, first.get(key), second.get(key), step)
        for key in dict.fromkeys([*first, *second])
    ]
    return Diff(
        before=_facts(before),
        after=_facts(after),
        parts={
            name: compare(
                before.parts.get(name),
                after.parts.get(name),
                None if name in COUNTED else step,
            )
            for name in dict.fromkeys([*before.parts, *after.parts])
        },
        collectives=sorted(collectives, key=lambda each: -abs(each.time.difference)),
    )


def _facts(run: Measured) -> RunFacts:
    return RunFacts(run.world_size, run.ranks, run.steps)


def _collective(
    key: tuple[str, str],
    before: Mapping[str, Spread] | None,
    after: Mapping[str, Spread] | None,
    step: Spread,
) -> CollectiveChange:
    def change(name: str, step: Spread | None = None) -> Change:
        old = before[name] if before else None
        return compare(old, after[name] if after else None, step)

    return CollectiveChange(
        *key,
        time=change("in_flight_ns", step),
        exposed=change("exposed_ns", step),
        nbytes=change("nbytes"),
        count=change("count"),
    )

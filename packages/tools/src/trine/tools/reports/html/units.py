"""The section on FSDP units: which one's communication costs what."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from trine.tools.analysis.breakdown import RunBreakdown
from trine.tools.reports.html.model import (
    Section,
    Table,
    count_cell,
    nbytes_cell,
    ns_cell,
    share_cell,
    text_cell,
)
from trine.tools.text import format_ns, printable

__all__ = ["sentence", "units"]

_MAX_ROWS: Final = 500
_NUMBERS: Final = ("count", "in_flight_ns", "hidden_ns", "exposed_ns", "wait_ns", "nbytes")


@dataclass
class _Row:
    unit: str
    operation: str
    numbers: dict[str, float]

    @property
    def blocked_ns(self) -> float:
        return self.numbers["exposed_ns"] + self.numbers["wait_ns"]


def units(run: RunBreakdown) -> Section:
    """One row per unit and operation, those that block the training most first."""
    rows = sorted(_rows(run), key=lambda row: -row.blocked_ns)
    if not rows:
        return Section("units", "Communication by unit", ["No communication was recorded."])
    step_ns = _step_ns(run)
    per_step = any(rank.has_steps for rank in run.ranks)
    texts = [
        f"{'Per step, mean' if per_step else 'Mean'} over ranks. In flight is from start to "
        "completion, hidden or not; exposed and waiting blocked the training thread, after and "
        "before the last rank had come."
    ]
    if len(rows) > _MAX_ROWS:
        texts.append(f"The {_MAX_ROWS} rows of {len(rows)} that blocked most are shown.")
    header = ["unit", "operation", "calls", "in flight", "hidden", "exposed", "waiting"]
    header += ["bytes sent", "blocked, of the step"]
    cells = [
        [
            text_cell(row.unit or "(no unit)"),
            text_cell(row.operation),
            count_cell(row.numbers["count"]),
            *(ns_cell(row.numbers[name]) for name in _NUMBERS[1:5]),
            nbytes_cell(row.numbers["nbytes"]),
            share_cell(row.blocked_ns / step_ns if step_ns else 0.0),
        ]
        for row in rows[:_MAX_ROWS]
    ]
    table = Table("Communication of each unit", header, cells)
    return Section("units", "Communication by unit", texts, tables=[table])


def sentence(run: RunBreakdown) -> str:
    """Which unit's communication is exposed most; empty if none is."""
    by_unit: dict[str, float] = defaultdict(float)
    for row in _rows(run):
        by_unit[row.unit] += row.numbers["exposed_ns"]
    most = max(by_unit, key=lambda unit: by_unit[unit], default="")
    whole = sum(by_unit.values())
    if not whole:
        return ""
    name = printable(most) or "communication without a unit"
    per_step = " a step" if any(rank.has_steps for rank in run.ranks) else ""
    exposed = format_ns(by_unit[most])
    return (
        f"Most exposed communication: {name}, {exposed}{per_step} "
        f"({by_unit[most] / whole:.0%} of all that is exposed)."
    )


def _rows(run: RunBreakdown) -> Sequence[_Row]:
    """Numbers per step, mean over ranks, in the order in which units first communicate."""
    found: dict[tuple[str, str], _Row] = {}
    for rank in run.ranks:
        divisor = len(run.ranks) * (len(rank.steps) or 1)
        for own in rank.by_unit.totals():
            key = own.unit, own.operation
            row = found.setdefault(key, _Row(*key, dict.fromkeys(_NUMBERS, 0.0)))
            for name in _NUMBERS:
                row.numbers[name] += getattr(own, name) / divisor
    return list(found.values())


def _step_ns(run: RunBreakdown) -> float:
    every = [step.total_ns for rank in run.ranks for step in rank.steps]
    return sum(every) / len(every) if every else 0.0

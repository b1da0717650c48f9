"""Show whether a run is worse than its baseline: one sentence, and what was compared."""

from __future__ import annotations

import sys
from typing import TextIO

from trine.tools.analysis.check import Check, Checked
from trine.tools.analysis.measured import COUNTED
from trine.tools.reports.tables import print_table
from trine.tools.text import format_nbytes, format_ns, printable

__all__ = ["print_check"]


def print_check(found: Check, file: TextIO | None = None) -> None:
    """Print what got worse, by how much and against which limit.

    Args:
        found: what to show.
        file: where; standard output if None.
    """
    header = ["", "baseline", "now", "change", "limit", "noise\nup to", ""]
    rows = [_row(each) for each in found.checked]
    print_table(_lines(found), header, rows, file or sys.stdout, left=(0, 6))


def _lines(found: Check) -> list[str]:
    counts = f"{found.steps} steps against {found.baseline_steps} of the baseline"
    lines = [f"Worse: {_grew(each)}, from {_pair(each)}." for each in found.worse]
    lines += [f"Over the limit, but noise may be why: {_grew(each)}." for each in found.unclear]
    if found.unclear:
        lines.append("Record more steps, or on a quieter machine, to tell.")
    if not lines:
        lines.append("No worse than the baseline.")
    return [*lines, f"Compared: medians of {counts}."]


def _grew(each: Checked) -> str:
    name = {"step": "the step", "sent": "what a rank sends"}.get(each.name, printable(each.name))
    by = "from nothing" if each.share is None else f"by {each.share:.1%}"
    return f"{name} grew {by} (limit {_limit(each.limit)})"


def _pair(each: Checked) -> str:
    form = format_nbytes if each.name in COUNTED else format_ns
    return f"{form(each.before)} to {form(each.after)}"


def _row(each: Checked) -> list[str]:
    form = format_nbytes if each.name in COUNTED else format_ns
    return [
        printable(each.name),
        form(each.before),
        form(each.after),
        "" if each.share is None else f"{each.share:+.1%}",
        _limit(each.limit),
        form(each.noise),
        each.outcome,
    ]


def _limit(limit: float) -> str:
    return f"{100 * limit:.3g}%"

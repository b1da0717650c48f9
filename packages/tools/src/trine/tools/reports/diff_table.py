"""Show what changed between two runs: a verdict, the parts of a step, then the collectives."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Final, TextIO

from trine.tools.analysis.change import Change
from trine.tools.analysis.diff import CollectiveChange, Diff, RunFacts
from trine.tools.analysis.measured import COUNTED
from trine.tools.reports.tables import print_table
from trine.tools.text import format_nbytes, format_ns, printable

__all__ = ["print_diff"]

_SHOWN: Final = 20
_SAME: Final = 0.02  # of a step: nobody asks why

_OF_TIME: Final = {
    "more": "slower",
    "less": "faster",
    "unchanged": "",
    "unsure": "too few steps",
    "new": "new",
    "gone": "gone",
}
_OF_BYTES: Final = {**_OF_TIME, "more": "more", "less": "less"}

Format = Callable[[float], str]


def print_diff(found: Diff, file: TextIO | None = None) -> None:
    """Print what became of the step time, its parts, and the collectives of each unit.

    Args:
        found: what to show.
        file: where; standard output if None.
    """
    file = file or sys.stdout
    header = ["", "before", "after", "change", "", "noise\nup to", ""]
    rows = [
        _row(name, change)
        for name, change in found.parts.items()
        if change.before and change.after and (change.before.median or change.after.median)
    ]
    print_table(_heading(found), header, rows, file, left=(0, 6))
    if found.collectives:
        header, rows = _collectives(found.collectives)
        rest = len(found.collectives) - len(rows)
        print(file=file)
        lines = ["collectives, per step and rank; those whose time changed most come first"]
        print_table(lines, header, rows, file, left=(0, 1, len(header) - 1))
        if rest:
            print(f"and {rest} more; --json has them all", file=file)


def _heading(found: Diff) -> list[str]:
    lines = [f"before: {_facts(found.before)}", f"after:  {_facts(found.after)}"]
    if found.before.world_size != found.after.world_size:
        lines.append(
            "the runs have different numbers of ranks: sizes, calls and waiting differ for that"
        )
    total = found.parts.get("step")
    if total is None or not total.before or not total.after:
        missing = "either" if not found.parts else "one"
        return [*lines, "", f"No steps were recorded in {missing} of the runs."]
    lines += ["", _verdict(total)]
    lines += ["below: per step, median of the steps, mean over ranks"]
    return lines


def _verdict(total: Change) -> str:
    assert total.before is not None
    assert total.after is not None
    before, after = format_ns(total.before.median), format_ns(total.after.median)
    chance = f"noise explains up to {format_ns(total.noise)}"
    if total.verdict == "unchanged":
        if abs(total.share or 0) < _SAME:
            return f"Steps take as long as before: {before}, now {after}."
        share = _percent(total.share)
        return f"Steps took {before}, now {after} ({share}), but {chance}: record more steps."
    by = f"{format_ns(abs(total.difference))} ({_percent(total.share)})"
    if total.verdict == "unsure":
        return f"Steps took {before} and now {after}, but there are too few to tell."
    return f"Steps got {_OF_TIME[total.verdict]}, from {before} to {after}, by {by}; {chance}."


def _facts(run: RunFacts) -> str:
    ranks = f"{run.world_size} rank{'s' if run.world_size != 1 else ''}"
    if run.ranks != run.world_size:
        ranks = f"{run.ranks} of {ranks}"
    return f"{ranks}, {run.steps} step{'s' if run.steps != 1 else ''}"


def _row(name: str, change: Change) -> list[str]:
    form, words = (format_nbytes, _OF_BYTES) if name in COUNTED else (format_ns, _OF_TIME)
    return [
        printable(name),
        *_two(change, form),
        ("+" if change.difference > 0 else "") + form(change.difference),
        _percent(change.share),
        form(change.noise),
        words[change.verdict],
    ]


def _collectives(found: Sequence[CollectiveChange]) -> tuple[list[str], list[list[str]]]:
    """Titles and cells. What is counted has columns only if it has changed anywhere."""
    columns: list[tuple[str, Callable[[CollectiveChange], Change], Format]] = [
        ("time", lambda each: each.time, format_ns),
        ("exposed", lambda each: each.exposed, format_ns),
        ("sent", lambda each: each.nbytes, format_nbytes),
        ("calls", lambda each: each.count, lambda count: f"{count:g}"),
    ]
    columns = [
        column
        for column in columns
        if column[2] is format_ns or any(column[1](each).verdict != "unchanged" for each in found)
    ]
    header = ["unit", "collective"]
    for title, _, _ in columns:
        header += [f"{title}\nbefore", "\nafter"]
    rows = []
    for each in found[:_SHOWN]:
        cells = [cell for _, change, form in columns for cell in _two(change(each), form)]
        name = printable(each.unit) or "(no unit)"
        rows.append([name, printable(each.operation), *cells, _OF_TIME[each.time.verdict]])
    return [*header, ""], rows


def _two(change: Change, form: Format) -> tuple[str, str]:
    before = form(change.before.median) if change.before else ""
    return before, form(change.after.median) if change.after else ""


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:+.1%}"

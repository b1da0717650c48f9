"""Show a summary to a person: a rich table on a terminal, aligned plain text elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TextIO

from trine.tools.reports.summary import Summary, UnitSummary
from trine.tools.reports.tables import print_table
from trine.tools.text import format_nbytes, format_ns, printable

__all__ = ["print_summary"]

_FIRST_COLLECTIVES = ("all_gather", "reduce_scatter")


def print_summary(summary: Summary, file: TextIO | None = None) -> None:
    """Print step times, bytes, and one line per FSDP unit.

    Args:
        summary: what to show.
        file: where; standard output if None.
    """
    lines = _heading(summary)
    if not summary.units:
        lines.append("No communication was recorded.")
    print_table(lines, *_table(summary), file=file or sys.stdout)


def _heading(summary: Summary) -> list[str]:
    read, world_size = len(summary.ranks), summary.world_size
    ranks = f"{world_size} ranks" if world_size > 1 else "1 rank"
    if read < world_size:
        ranks = f"{read} of {world_size} ranks (no trace of the others)"
    lines = []
    if summary.steps is None:
        lines.append(f"{ranks}, no steps recorded: numbers are of the whole recording")
    else:
        steps = summary.steps
        lines.append(f"{ranks}, {steps.count} step{'s' if steps.count > 1 else ''}")
        line = (
            f"step time {format_ns(steps.mean_ns)} mean, {format_ns(steps.median_ns)} median, "
            f"{format_ns(steps.first_ns)} first"
        )
        if read > 1:
            line += f"; slowest rank {steps.slowest_rank}: {format_ns(steps.slowest_rank_mean_ns)}"
        lines.append(line)
    sent = summary.sent_nbytes
    line = f"sent {format_nbytes(sum(sent) / len(sent))} per rank"
    if max(sent) > min(sent):
        line += f" (rank {summary.ranks[sent.index(max(sent))]}: {format_nbytes(max(sent))})"
    lines.append(line)
    if summary.dropped:
        lines.append(f"dropped {summary.dropped} events that did not fit the recorders")
    if summary.units:
        per_step = "per step, " if summary.steps else ""
        lines.append(f"below: {per_step}mean over ranks; max is the rank with the most")
    return lines


def _table(summary: Summary) -> tuple[list[str], list[list[str]]]:
    """Column titles, in up to three lines each, and the cells."""
    found = {name: None for unit in summary.units for name in unit.collectives}
    names = [name for name in _FIRST_COLLECTIVES if name in found]
    names += [name for name in found if name not in names]
    header = ["unit"]
    for name in names:
        # In two lines, "all-" and "gather", so that the table fits 80 columns.
        title = printable(name).replace("_", "-\n", 1)
        header += ["calls", f"{title}\ntime", "sent"]
    header += ["exposed\nmean", "exposed\nmax", "of\nstep"]
    rows = [_row(unit, names) for unit in summary.units]
    if len(rows) > 1:
        exposed_ns = sum(unit.exposed_ns for unit in summary.units)
        shares = [unit.exposed_share for unit in summary.units]
        share = sum(share for share in shares if share is not None) if summary.steps else None
        total = ["total"]
        for name in names:
            own = [unit.collectives[name] for unit in summary.units if name in unit.collectives]
            total += _cells(
                sum(cell.count for cell in own),
                sum(cell.time_ns for cell in own),
                sum(cell.nbytes for cell in own),
            )
        # No maximum: the slowest rank of one unit need not be that of another.
        rows.append([*total, format_ns(exposed_ns), "", _percent(share)])
    return header, rows


def _row(unit: UnitSummary, names: Sequence[str]) -> list[str]:
    row = [printable(unit.unit) or "(no unit)"]
    for name in names:
        own = unit.collectives.get(name)
        row += _cells(own.count, own.time_ns, own.nbytes) if own else ["", "", ""]
    return [
        *row,
        format_ns(unit.exposed_ns),
        format_ns(unit.exposed_ns_max),
        _percent(unit.exposed_share),
    ]


def _cells(count: float, time_ns: float, nbytes: float) -> list[str]:
    return [f"{count:.2f}".rstrip("0").rstrip("."), format_ns(time_ns), format_nbytes(nbytes)]


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.1%}"

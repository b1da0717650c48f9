"""Show a summary to a person: a rich table on a terminal, aligned plain text elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Final, TextIO

from trine.tools.analysis.breakdown import PARTS
from trine.tools.analysis.summary import Parts, Summary, UnitSummary
from trine.tools.reports.tables import print_table
from trine.tools.text import format_nbytes, format_ns, format_ranks, printable

__all__ = ["print_summary"]

_FIRST_COLLECTIVES: Final = ("all_gather", "reduce_scatter")
_MOST_RANKS: Final = 16
_TITLES: Final = {"optimizer": "opti-\nmizer", "checkpoint": "check-\npoint"}
_VISIBLE: Final = 0.0005  # of a step; a column of less would read 0.0%
_WORTH_SAYING: Final = 0.01  # of a step: less time between steps is not mentioned


def print_summary(summary: Summary, file: TextIO | None = None) -> None:
    """Print what dominates, where the time of each rank went, and one line per FSDP unit.

    Args:
        summary: what to show.
        file: where; standard output if None.
    """
    file = file or sys.stdout
    print_table(_heading(summary), *_parts_table(summary), file=file)
    if summary.units:
        per_step = "per step, " if summary.steps else ""
        lines = ["", f"communication by unit: {per_step}mean over ranks"]
        print_table(lines, *_unit_table(summary), file=file)
    else:
        print("\nNo communication was recorded.", file=file)


def _heading(summary: Summary) -> list[str]:
    read, world_size = len(summary.ranks), summary.world_size
    ranks = f"{world_size} ranks" if world_size > 1 else "1 rank"
    if read < world_size:
        ranks = f"{read} of {world_size} ranks (no trace of the others)"
    lines = []
    if not summary.events:
        lines.append(f"{ranks}, no events: did the run reach the steps that were to be recorded?")
    elif summary.steps is None:
        lines.append(f"{ranks}, no steps recorded: numbers are of the whole recording")
    else:
        steps = summary.steps
        lines.append(f"{ranks}, {steps.count} step{'s' if steps.count > 1 else ''}")
        line = f"step time {format_ns(steps.median_ns)} median, {format_ns(steps.mean_ns)} mean, "
        line += f"{format_ns(steps.p95_ns)} p95, {format_ns(steps.first_ns)} first"
        lines.append(line)
        if read > 1:
            slowest = format_ns(steps.slowest_rank_mean_ns)
            lines.append(f"slowest rank {steps.slowest_rank}: {slowest} mean")
    if summary.dominant:
        lines.append(summary.dominant)
    between = summary.between
    if summary.steps and between.total_ns > _WORTH_SAYING * summary.steps.mean_ns:
        lines.append(f"between steps {format_ns(between.total_ns)}{_most_of(between)}")
    sent = summary.sent_nbytes
    line = f"sent {format_nbytes(sum(sent) / len(sent))} per rank"
    if max(sent) > min(sent):
        line += f" (rank {summary.ranks[sent.index(max(sent))]}: {format_nbytes(max(sent))})"
    lines.append(line)
    if summary.dropped:
        lines.append(f"dropped {summary.dropped} events that did not fit the recorders")
    if cut_off := [rank.rank for rank in summary.by_rank if rank.cut_off]:
        lines.append(
            f"cut off: {format_ranks(cut_off)}; killed while recording, or recording still"
        )
    if summary.clock.error_ns:
        lines.append(summary.clock.note)
    return lines


def _most_of(between: Parts) -> str:
    shown = {name: getattr(between, f"{name}_ns") for name in PARTS if name != "other"}
    most = max(shown, key=lambda name: shown[name])
    return f", {format_ns(shown[most])} of it {most}" if shown[most] else ""


def _parts_table(summary: Summary) -> tuple[list[str], list[list[str]]]:
    """Where the time of a step went, on average and rank by rank."""
    if not summary.parts.total_ns:
        return [], []
    every = [summary.parts, *(rank.parts for rank in summary.by_rank)]
    names = [
        name
        for name in PARTS
        if any(getattr(parts, f"{name}_ns") > _VISIBLE * parts.total_ns for parts in every)
    ]
    hidden = any(parts.hidden_ns for parts in every)
    waits = any(rank.causes_wait_ns for rank in summary.by_rank)
    header = ["rank", "step" if summary.steps else "whole"]
    header += [_TITLES.get(name, name) for name in names]
    header += ["hidden"] if hidden else []
    header += ["makes\nothers\nwait"] if waits else []

    def row(title: str, parts: Parts, causes_wait_ns: float | None) -> list[str]:
        cells = [title, format_ns(parts.total_ns)]
        cells += [format_ns(getattr(parts, f"{name}_ns")) for name in names]
        cells += [format_ns(parts.hidden_ns)] if hidden else []
        if waits:
            cells.append("" if causes_wait_ns is None else format_ns(causes_wait_ns))
        return cells

    shares = ["", ""]
    shares += [
        f"{getattr(summary.parts, f'{name}_ns') / summary.parts.total_ns:.1%}" for name in names
    ]
    shares += [""] * (len(header) - len(shares))
    ranks = summary.by_rank
    left_out = ""
    if len(ranks) > _MOST_RANKS:
        worst = sorted(ranks, key=lambda rank: (-rank.causes_wait_ns, -rank.parts.total_ns))
        ranks = sorted(worst[:_MOST_RANKS], key=lambda rank: rank.rank)
        left_out = f"{len(summary.by_rank) - _MOST_RANKS} more"
    rows = [row(str(rank.rank), rank.parts, rank.causes_wait_ns) for rank in ranks]
    if left_out:
        rows.append([left_out, *[""] * (len(header) - 1)])
    if len(summary.by_rank) > 1:
        rows.append(row("mean", summary.parts, None))
    return header, [*rows, shares]


def _unit_table(summary: Summary) -> tuple[list[str], list[list[str]]]:
    """Column titles, in up to three lines each, and the cells."""
    found = {name: None for unit in summary.units for name in unit.collectives}
    names: list[str] = [name for name in _FIRST_COLLECTIVES if name in found]
    names += [name for name in found if name not in names]
    header = ["unit"]
    for name in names:
        # In two lines, "all-" and "gather", so that the table fits 80 columns.
        title = printable(name).replace("_", "-\n", 1)
        header += ["calls", f"{title}\ntime", "sent"]
    header += ["exposed", "of\nstep", "wait"]
    rows = [_row(unit, names) for unit in summary.units]
    if len(rows) > 1:
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
        exposed_ns = sum(unit.exposed_ns for unit in summary.units)
        wait_ns = sum(unit.wait_ns for unit in summary.units)
        rows.append([*total, format_ns(exposed_ns), _percent(share), format_ns(wait_ns)])
    return header, rows


def _row(unit: UnitSummary, names: Sequence[str]) -> list[str]:
    row = [printable(unit.unit) or "(no unit)"]
    for name in names:
        own = unit.collectives.get(name)
        row += _cells(own.count, own.time_ns, own.nbytes) if own else ["", "", ""]
    return [
        *row,
        format_ns(unit.exposed_ns),
        _percent(unit.exposed_share),
        format_ns(unit.wait_ns),
    ]


def _cells(count: float, time_ns: float, nbytes: float) -> list[str]:
    return [f"{count:.2f}".rstrip("0").rstrip("."), format_ns(time_ns), format_nbytes(nbytes)]


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.1%}"

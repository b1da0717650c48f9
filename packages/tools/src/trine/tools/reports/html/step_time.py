"""The section on step times: what they are made of, on each rank and over the run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from statistics import fmean, median
from typing import Final

from trine.tools.analysis.breakdown import Breakdown, RunBreakdown
from trine.tools.reports.html.model import (
    BESIDE,
    PART_LABELS,
    Cell,
    Figure,
    LegendEntry,
    Section,
    Table,
    count_cell,
    ns_cell,
)
from trine.tools.reports.html.svg import Bar, Segment, bars, columns
from trine.tools.text import format_ns

__all__ = ["MAX_RANKS", "mean_parts", "sentence", "slowest_and_typical", "step_time"]

MAX_RANKS: Final = 64
"""How many ranks have a bar of their own; of more, the slowest."""

_MAX_COLUMNS: Final = 100
_SUMMED: Final = tuple(part for part in PART_LABELS if part != BESIDE)

Parts = Mapping[str, float]


def step_time(run: RunBreakdown) -> Section:
    """Bars for the ranks, columns for the steps, and tables of both."""
    by_rank = {rank.rank: mean_parts(rank.steps) for rank in run.ranks if rank.steps}
    shown = sorted(sorted(by_rank, key=lambda rank: -total(by_rank[rank]))[:MAX_RANKS])
    by_step = steps_of_run(run)
    legend = [LegendEntry(part, PART_LABELS[part]) for part in _occurring(by_rank.values())]
    texts = [
        "Exposed communication blocked the training thread although all ranks had come; waiting "
        "for other ranks blocked it until they came. Hidden communication ran beside other work "
        "and is no part of the sum: the thin bar below each bar."
    ]
    if len(shown) < len(by_rank):
        texts.append(f"Of {len(by_rank)} ranks, the {len(shown)} with the longest steps are shown.")
    rank_bars = [_bar(f"rank {rank}", by_rank[rank]) for rank in shown]
    mean = f"Mean step of each rank ({len(by_step)} step{'s' if len(by_step) != 1 else ''})"
    figures = [Figure(mean, bars(rank_bars, mean), legend)]
    tables = [_table(mean, "rank", {str(rank): by_rank[rank] for rank in shown})]
    if len(by_step) > 1:
        caption, step_bars = _buckets(by_step)
        if len(by_rank) > 1:
            caption += ", mean over ranks"
        summed = [entry for entry in legend if entry.part != BESIDE]
        figures.append(Figure(caption, columns(step_bars, caption), summed))
        rows = {bar.label: by_step[int(bar.label)] for bar in step_bars}
        tables.append(_table(caption, "step", rows))
    return Section("steps", "Where the time of a step went", texts, figures, tables)


def mean_parts(steps: Sequence[Breakdown]) -> Parts:
    """Mean of each part over steps, in ns."""
    return {
        part: fmean(getattr(step, f"{part}_ns") for step in steps) if steps else 0.0
        for part in PART_LABELS
    }


def total(parts: Parts) -> float:
    """The step time that the parts sum to."""
    return sum(parts[part] for part in _SUMMED)


def steps_of_run(run: RunBreakdown) -> dict[int, Parts]:
    """Number of each step to its parts, mean over the ranks that recorded it."""
    found: dict[int, list[Breakdown]] = defaultdict(list)
    for rank in run.ranks:
        for step in rank.steps:
            found[step.step].append(step)
    return {number: mean_parts(found[number]) for number in sorted(found)}


def slowest_and_typical(run: RunBreakdown) -> list[tuple[int, str]]:
    """Numbers of the steps that are worth a look, and why; each once."""
    by_step = {number: total(parts) for number, parts in steps_of_run(run).items()}
    if not by_step:
        return []
    slowest = max(by_step, key=lambda number: by_step[number])
    middle = median(by_step.values())
    typical = min(by_step, key=lambda number: abs(by_step[number] - middle))
    reasons = [(slowest, f"the slowest of {len(by_step)}")]
    if typical != slowest:
        reasons.append((typical, "of median length"))
    return reasons if len(by_step) > 1 else [(slowest, "the only one")]


def sentence(run: RunBreakdown) -> str:
    """How long a step takes, and what it is made of, the greatest first."""
    every = [step for rank in run.ranks for step in rank.steps]
    if not every:
        return "Nothing was recorded."
    parts = mean_parts(every)
    whole = total(parts) or 1
    greatest = sorted(_SUMMED, key=lambda part: -parts[part])
    named = [f"{parts[part] / whole:.0%} {PART_LABELS[part]}" for part in greatest]
    named = [text for text in named[:4] if not text.startswith("0%")]
    middle = format_ns(median(step.total_ns for step in every))
    steps, ranks = len(steps_of_run(run)), len(run.ranks)
    on = f"{ranks} rank{'s' if ranks > 1 else ''}"
    if not any(rank.has_steps for rank in run.ranks):
        return (
            f"No steps were recorded; the whole recording, {middle} on {on}, is {', '.join(named)}."
        )
    of = f"median of {steps} step{'s' if steps > 1 else ''} on {on}"
    return f"A step takes {middle} ({of}): {', '.join(named)}."


def _bar(label: str, parts: Parts, text: str = "") -> Bar:
    segments = [Segment(part, PART_LABELS[part], parts[part]) for part in _SUMMED]
    said = [f"{one.label} {format_ns(one.size)}" for one in segments if one.size > 0]
    hidden = Segment(BESIDE, PART_LABELS[BESIDE], parts[BESIDE])
    if hidden.size > 0:
        said.append(f"beside them {hidden.label} {format_ns(hidden.size)}")
    return Bar(
        label, f"{text or label}, {format_ns(total(parts))}: {', '.join(said)}", segments, hidden
    )


def _buckets(by_step: dict[int, Parts]) -> tuple[str, list[Bar]]:
    """Caption and columns; of many steps, each stands for several and shows the slowest."""
    numbers = list(by_step)
    size = -(-len(numbers) // _MAX_COLUMNS)
    drawn = []
    for first in range(0, len(numbers), size):
        own = numbers[first : first + size]
        slowest = max(own, key=lambda number: total(by_step[number]))
        text = f"step {slowest}"
        if len(own) > 1:
            text += f", the slowest of {own[0]} to {own[-1]}"
        drawn.append(_bar(str(slowest), by_step[slowest], text))
    return f"The slowest of every {size} steps" if size > 1 else "Each step", drawn


def _table(caption: str, what: str, rows: Mapping[str, Parts]) -> Table:
    parts = _occurring(rows.values())
    cells: list[list[Cell]] = [
        [
            count_cell(int(label)),
            ns_cell(total(own)),
            *(ns_cell(own[part]) for part in parts),
        ]
        for label, own in rows.items()
    ]
    header = [what, "step time", *(PART_LABELS[part] for part in parts)]
    return Table(caption, header, cells, folded=True)


def _occurring(every: Collection[Parts]) -> list[str]:
    return [part for part in PART_LABELS if any(own[part] > 0 for own in every)]

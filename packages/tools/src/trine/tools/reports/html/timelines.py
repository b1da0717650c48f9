"""The section with timelines: the slowest step and an ordinary one, with ranks side by side."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final

from trine.tools.analysis.breakdown import RunBreakdown
from trine.tools.analysis.steps import Step, steps_of
from trine.tools.reports.html.model import (
    Figure,
    LegendEntry,
    Section,
    Table,
    count_cell,
    ns_cell,
    text_cell,
)
from trine.tools.reports.html.step_time import slowest_and_typical
from trine.tools.reports.html.timeline import StepTimeline, step_timeline
from trine.tools.reports.html.timeline_svg import draw_timeline
from trine.tools.tracing.reader import RankTrace

__all__ = ["timelines"]

MAX_RANKS: Final = 16
_MAX_ROWS: Final = 60
_LEGEND: Final = {
    "compute": "compute",
    "optimizer": "optimizer",
    "data": "loading data",
    "checkpoint": "checkpoint",
    "blocked": "blocked by communication",
    "flight": "communication in flight",
    "step": "step",
    "other": "other",
}


def timelines(traces: Sequence[RankTrace], run: RunBreakdown) -> Section:
    """The steps that are worth a look; what they leave out is said."""
    steps = {trace.header.rank: steps_of(trace) for trace in traces}
    shown = _worth_showing(run)
    texts = [
        "Per rank: the spans of the thread that trains, each below the one it lies in, and "
        "communication in flight."
    ]
    if len(shown) < len(run.ranks):
        texts.append(
            f"Of {len(run.ranks)} ranks, {len(shown)} are drawn: those with the longest steps and "
            "the shortest."
        )
    texts.append("All steps and all events: trine trace export --format perfetto.")
    figures: list[Figure] = []
    tables: list[Table] = []
    for number, why in slowest_and_typical(run):
        own = _parts_of_step(steps, number, shown)
        chosen = [trace for trace in traces if trace.header.rank in own]
        made = step_timeline(chosen, own, run.alignment)
        caption = f"Step {number}, {why}" if number >= 0 else "The whole recording"
        if made.left_out:
            caption += f" ({made.left_out} shorter or deeper events left out)"
        present = {
            mark.part for lanes in made.ranks.values() for lane in lanes for mark in lane.marks
        }
        legend = [LegendEntry(part, label) for part, label in _LEGEND.items() if part in present]
        drawn = draw_timeline(made, caption)
        figures.append(Figure(caption, drawn, legend, made.labels, wide=True))
        tables.append(_table(made, caption))
    return Section("timeline", "Timeline", texts, figures, tables)


def _worth_showing(run: RunBreakdown) -> list[int]:
    """Ranks in order: all, or of very many those with the longest steps and the shortest."""
    length = {
        rank.rank: sum(step.total_ns - step.wait_ns for step in rank.steps) / len(rank.steps)
        for rank in run.ranks
        if rank.steps
    }
    by_length = sorted(length, key=lambda rank: -length[rank])
    if len(by_length) > MAX_RANKS:
        by_length = by_length[: MAX_RANKS - 4] + by_length[-4:]
    return sorted(by_length)


def _parts_of_step(
    steps: dict[int, list[Step]], number: int, ranks: Sequence[int]
) -> dict[int, Step]:
    return {rank: step for rank in ranks for step in steps[rank] if step.number == number}


def _table(made: StepTimeline, caption: str) -> Table:
    """What took longest on each rank, by name."""
    counts: Counter[tuple[int, str]] = Counter()
    lengths: Counter[tuple[int, str]] = Counter()
    for rank, lanes in made.ranks.items():
        for lane in lanes:
            for mark in lane.marks:
                key = rank, made.labels[mark.label]
                counts[key] += 1
                lengths[key] += mark.length_ns
    longest = lengths.most_common(_MAX_ROWS)
    rows = [
        [text_cell(name), count_cell(rank), count_cell(counts[rank, name]), ns_cell(length)]
        for (rank, name), length in longest
    ]
    if len(longest) < len(lengths):
        caption += f", the longest {len(longest)} of {len(lengths)}"
    return Table(caption, ["event", "rank", "times", "together"], rows, folded=True)

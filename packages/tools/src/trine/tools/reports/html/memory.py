"""The section on memory: what it was used for, over time, on the rank that used most."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

from trine.tools.analysis.advice import KINDS
from trine.tools.analysis.memory import MemoryUse, memory_use
from trine.tools.analysis.memory_series import memory_series
from trine.tools.reports.html.model import (
    Cell,
    Figure,
    LegendEntry,
    Section,
    Table,
    count_cell,
    nbytes_cell,
    text_cell,
)
from trine.tools.reports.html.svg import Bar, Segment, areas
from trine.tools.text import format_nbytes, format_ns, printable
from trine.tools.tracing.events import Events
from trine.tools.tracing.reader import RankTrace

__all__ = ["memory"]

_CLASSES: Final = {"optimizer": "optimizer-state", "replicated": "other"}
_MOMENTS: Final = 60
_MAX_RANKS: Final = 64
_MAX_SHOWN: Final = 16  # of more, the table is folded
_MAX_UNITS: Final = 200


def memory(traces: Sequence[RankTrace]) -> Section:
    """A picture of the rank whose peak is highest, its units, and the peaks of all ranks."""
    use = memory_use(traces)
    if not use.ranks:
        return Section("memory", "Memory", ["No memory was recorded."])
    (worst,) = [trace for trace in traces if trace.header.rank == use.worst]
    drawn = _moments(worst.events)
    caption = f"Memory of rank {use.worst} over time, the most of each stretch"
    kinds = [
        kind for place, kind in enumerate(KINDS) if any(bar.segments[place].size for bar in drawn)
    ]
    legend = [LegendEntry(_CLASSES.get(kind, kind), KINDS[kind]) for kind in kinds]
    figure = Figure(caption, areas(drawn, caption), legend)
    tables = [_over_time(drawn, caption), _units(use, kinds), _peaks(use)]
    return Section("memory", "Memory", _texts(use), [figure], tables)


def _texts(use: MemoryUse) -> list[str]:
    texts = [f"{printable(use.explained)} {use.advice}"]
    texts.append("Areas are stacked; the triangle marks the peak.")
    if use.missing:
        texts.append(f"Not recorded: {', '.join(KINDS[kind] for kind in use.missing)}.")
    for peak in use.ranks:
        if peak.rank == use.worst and peak.allocated is not None:
            texts.append(f"Allocated in all, whatever for: {format_nbytes(peak.allocated)}.")
    return texts


def _moments(events: Events) -> list[Bar]:
    """The moment of greatest use in each stretch of time; a stretch without reports has none."""
    series = memory_series(events)
    at_ns = events.start_ns[series.place]
    # What a counter changes in the sum, it changes in its kind.
    change = series.total.diff(prepend=torch.zeros(1, dtype=torch.float64))
    of_kind = [
        torch.tensor([own == kind for own, _ in series.holders])[series.holder] for kind in KINDS
    ]
    by_kind = torch.stack([torch.where(own, change, 0.0).cumsum(0) for own in of_kind])
    first = int(at_ns.min())
    length = max(int(at_ns.max()) - first, 1)
    stretch = ((at_ns - first).double() * (_MOMENTS - 1) / length).long()
    drawn = []
    for place in range(_MOMENTS):
        own = (stretch == place).nonzero().flatten()
        if not own.numel():
            continue
        at = int(own[series.total[own].argmax()])
        segments = [
            Segment(_CLASSES.get(kind, kind), label, size)
            for (kind, label), size in zip(KINDS.items(), by_kind[:, at].tolist(), strict=True)
        ]
        said = ", ".join(f"{one.label} {format_nbytes(one.size)}" for one in segments if one.size)
        label = format_ns(int(at_ns[at]) - first)
        drawn.append(
            Bar(label, f"at {label}, {format_nbytes(float(series.total[at]))}: {said}", segments)
        )
    return drawn


def _over_time(drawn: Sequence[Bar], caption: str) -> Table:
    shown = [place for place in range(len(KINDS)) if any(bar.segments[place].size for bar in drawn)]
    rows = [
        [
            Cell(bar.label, str(row)),
            nbytes_cell(bar.total),
            *(nbytes_cell(bar.segments[place].size) for place in shown),
        ]
        for row, bar in enumerate(drawn)
    ]
    labels = list(KINDS.values())
    header = ["at", "in all", *(labels[place] for place in shown)]
    return Table(caption, header, rows, folded=True)


def _units(use: MemoryUse, kinds: Sequence[str]) -> Table:
    caption = f"The most that each unit had on rank {use.worst} at any moment"
    if len(use.units) > _MAX_UNITS:
        caption += f" (the {_MAX_UNITS} largest of {len(use.units)} units)"
    rows = [
        [
            text_cell(unit.unit or "(no unit)"),
            *(nbytes_cell(unit.most.get(kind, 0.0)) for kind in kinds),
            nbytes_cell(sum(unit.at_peak.values())),
        ]
        for unit in use.units[:_MAX_UNITS]
    ]
    return Table(caption, ["unit", *(KINDS[kind] for kind in kinds), "at the peak"], rows)


def _peaks(use: MemoryUse) -> Table:
    shown = sorted(use.ranks, key=lambda peak: -peak.nbytes)[:_MAX_RANKS]
    kinds = [kind for kind in KINDS if any(peak.by_kind.get(kind) for peak in shown)]
    rows = [
        [
            count_cell(peak.rank),
            nbytes_cell(peak.nbytes),
            *(nbytes_cell(peak.by_kind.get(kind, 0.0)) for kind in kinds),
            Cell(str(peak.step) if peak.step >= 0 else "", str(peak.step)),
            text_cell(peak.where),
        ]
        for peak in sorted(shown, key=lambda peak: peak.rank)
    ]
    caption = "What each rank held at its peak"
    if len(shown) < len(use.ranks):
        caption += f" (the {len(shown)} highest of {len(use.ranks)} ranks)"
    header = ["rank", "peak", *(KINDS[kind] for kind in kinds), "step", "where"]
    return Table(caption, header, rows, folded=len(rows) > _MAX_SHOWN)

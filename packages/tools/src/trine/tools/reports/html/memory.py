"""The section on memory: what it was used for, over time, on the rank that used most."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from trine.tools.reports.html.model import (
    Cell,
    Figure,
    LegendEntry,
    Section,
    Table,
    count_cell,
    nbytes_cell,
    ns_cell,
)
from trine.tools.reports.html.svg import Bar, Segment, areas
from trine.tools.text import format_nbytes, format_ns
from trine.tools.tracing.events import Events
from trine.tools.tracing.reader import RankTrace

__all__ = ["memory"]

_KINDS: Final = {
    "sharded": ("sharded", "sharded parameters"),
    "optimizer": ("optimizer-state", "optimizer state"),
    "gradients": ("gradients", "gradients"),
    "unsharded": ("unsharded", "unsharded parameters"),
    "communication": ("communication", "communication buffers"),
    "activations": ("activations", "activations"),
}
_MOMENTS: Final = 60
_MAX_RANKS: Final = 64


@dataclass(frozen=True, eq=False)
class _Use:
    """What one rank used.

    Attributes:
        rank: the rank.
        at_ns: moments at which something changed.
        kinds: by kind, bytes at each; float64.
        total: their sum.
    """

    rank: int
    at_ns: Tensor
    kinds: dict[str, Tensor]
    total: Tensor

    @property
    def peak(self) -> int:
        """The place of the moment at which most was used."""
        return int(self.total.argmax())


def memory(traces: Sequence[RankTrace]) -> Section:
    """A picture of the rank whose peak is highest, and the peaks of all."""
    every = [use for use in map(_use, traces) if use is not None]
    if not every:
        text = "No memory counters were recorded. The engine reports them while tracing is on."
        return Section("memory", "Memory", [text])
    most = max(every, key=lambda use: float(use.total[use.peak]))
    peak_ns = int(most.at_ns[most.peak] - most.at_ns[0])
    texts = [
        f"Rank {most.rank} has the highest peak: {format_nbytes(float(most.total[most.peak]))}, "
        f"{format_ns(peak_ns)} after its first report, marked by a triangle. Areas are stacked."
    ]
    caption = f"Memory of rank {most.rank} over time, the most of each stretch"
    kinds = [kind for kind in _KINDS if float(most.kinds[kind].max()) > 0]
    drawn = _moments(most, kinds)
    legend = [LegendEntry(*_KINDS[kind]) for kind in kinds]
    figures = [Figure(caption, areas(drawn, caption), legend)]
    return Section("memory", "Memory", texts, figures, [_peaks(every), _table(drawn, kinds)])


def _use(trace: RankTrace) -> _Use | None:
    """How much of each kind there was at each moment; None without counters.

    A counter says what its unit has now, so a kind is the sum of the last values of its units.
    """
    events = trace.events
    kinds = {kind: events.place(f"memory.{kind}") for kind in _KINDS}
    ours = torch.isin(events.name, torch.tensor(list(kinds.values()), dtype=events.name.dtype))
    ours &= events.is_kind("counter") & events.value.isfinite()
    places = ours.nonzero().flatten()
    if not places.numel():
        return None
    places = places[events.start_ns[places].argsort(stable=True)]
    change = _changes(events, places)
    found = {
        kind: torch.where(events.name[places] == place, change, 0.0).cumsum(0).clamp(min=0)
        for kind, place in kinds.items()
    }
    total = torch.stack(list(found.values())).sum(0)
    return _Use(trace.header.rank, events.start_ns[places], found, total)


def _changes(events: Events, places: Tensor) -> Tensor:
    """By how much each counter differs from the one before it of the same name and unit."""
    key = events.name[places].long() * len(events.texts) + events.unit[places]
    order = key.argsort(stable=True)
    value = events.value[places][order]
    before = torch.zeros_like(value)
    same = key[order][1:] == key[order][:-1]
    before[1:] = torch.where(same, value[:-1], 0.0)
    change = torch.empty_like(value)
    change[order] = value - before
    return change


def _moments(use: _Use, kinds: Sequence[str]) -> list[Bar]:
    """The moment of greatest use in each stretch of time; a stretch without reports has none."""
    first = int(use.at_ns[0])
    length = max(int(use.at_ns[-1]) - first, 1)
    stretch = (use.at_ns - first) * (_MOMENTS - 1) // length
    drawn = []
    for place in range(_MOMENTS):
        own = (stretch == place).nonzero().flatten()
        if not own.numel():
            continue
        at = int(own[use.total[own].argmax()])
        segments = [Segment(*_KINDS[kind], float(use.kinds[kind][at])) for kind in kinds]
        said = ", ".join(f"{one.label} {format_nbytes(one.size)}" for one in segments if one.size)
        label = format_ns(int(use.at_ns[at]) - first)
        total = format_nbytes(float(use.total[at]))
        drawn.append(Bar(label, f"at {label}, {total}: {said}", segments))
    return drawn


def _peaks(every: Sequence[_Use]) -> Table:
    shown = sorted(every, key=lambda use: -float(use.total[use.peak]))[:_MAX_RANKS]
    rows = [
        [
            count_cell(use.rank),
            nbytes_cell(float(use.total[use.peak])),
            *(nbytes_cell(float(use.kinds[kind][use.peak])) for kind in _KINDS),
            ns_cell(int(use.at_ns[use.peak] - use.at_ns[0])),
        ]
        for use in sorted(shown, key=lambda use: use.rank)
    ]
    caption = "What each rank held at its peak"
    if len(shown) < len(every):
        caption += f" (the {len(shown)} highest of {len(every)} ranks)"
    return Table(caption, ["rank", "peak", *(label for _, label in _KINDS.values()), "at"], rows)


def _table(drawn: Sequence[Bar], kinds: Sequence[str]) -> Table:
    rows = [
        [
            Cell(bar.label, str(place)),
            nbytes_cell(bar.total),
            *(nbytes_cell(one.size) for one in bar.segments),
        ]
        for place, bar in enumerate(drawn)
    ]
    header = ["at", "total", *(_KINDS[kind][1] for kind in kinds)]
    return Table("Memory over time", header, rows, folded=True)

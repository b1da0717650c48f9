"""When communication blocked the training thread, and for what: other ranks, or bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from trine.tools.analysis.collectives import Collectives
from trine.tools.analysis.intervals import Cover, outermost
from trine.tools.analysis.unit_table import Cells, Labels
from trine.tools.tracing.events import Events

__all__ = ["Blocked", "Pieces", "Split", "blocked_pieces"]

_MAX_DEPTH: Final = 32  # waits within waits; what lies deeper belongs to the one around it


@dataclass(frozen=True, eq=False)
class Pieces:
    """Stretches of time that do not overlap, each within one window; int64, 1-D.

    Attributes:
        starts_ns: where each begins.
        ends_ns: where it ends.
        window: the window that it lies in.
        pair: unit and operation it belongs to, as a place in `Blocked.pairs`.
        row: the collective, as a place in the rank's `Calls`; -1 for none.
        inner: what lies within them and is not theirs.
    """

    starts_ns: Tensor
    ends_ns: Tensor
    window: Tensor
    pair: Tensor
    row: Tensor
    inner: Cover


@dataclass(frozen=True, eq=False)
class Split:
    """How long the training thread was blocked.

    Attributes:
        exposed_ns: after all ranks had come; one number per window.
        wait_ns: before; one number per window.
        cells: both by unit, operation and step.
        waited_for_ns: by rank how long until that one came, as the last; within steps.
    """

    exposed_ns: Tensor
    wait_ns: Tensor
    cells: Cells
    waited_for_ns: dict[int, int]


@dataclass(frozen=True, eq=False)
class Blocked:
    """When communication blocked the training thread of one rank.

    Attributes:
        cover: all of that time.
        layers: the same by what blocked it: waits, then those within them, and so on.
        pairs: units and operations.
    """

    cover: Cover
    layers: list[Pieces]
    pairs: list[tuple[str, str]]

    def split(self, rank: int, axis: Collectives, count: int) -> Split:
        """Tell waiting for other ranks from waiting for bytes.

        Args:
            rank: whose this is.
            axis: the collectives of all ranks.
            count: how many windows there are.
        """
        exposed_ns, wait_ns = torch.zeros(2, count, dtype=torch.int64)
        waited_for = torch.zeros(len(axis.matched.ranks) + 1, dtype=torch.int64)
        steps, pairs, exposed, waits = [], [], [], []
        for layer in self.layers:
            ready_ns = axis.ready_for(rank, layer.row)
            until_ns = torch.minimum(layer.ends_ns, torch.maximum(layer.starts_ns, ready_ns))
            wait = until_ns - layer.starts_ns - layer.inner.within(layer.starts_ns, until_ns)
            rest = layer.ends_ns - until_ns - layer.inner.within(until_ns, layer.ends_ns)
            exposed_ns.scatter_add_(0, layer.window, rest)
            wait_ns.scatter_add_(0, layer.window, wait)
            in_step = layer.window % 2 == 0
            late = in_step & (wait > 0)
            last = axis.last[axis.matched.columns[rank][layer.row[late]]]
            waited_for.scatter_add_(0, last, wait[late])
            steps.append(layer.window[in_step] // 2)
            pairs.append(layer.pair[in_step])
            exposed.append(rest[in_step])
            waits.append(wait[in_step])
        none = torch.zeros(0, dtype=torch.int64)
        numbers = {"exposed_ns": torch.cat([none, *exposed]), "wait_ns": torch.cat([none, *waits])}
        return Split(
            exposed_ns,
            wait_ns,
            Cells(self.pairs, torch.cat([none, *pairs]), torch.cat([none, *steps]), numbers),
            {
                other: ns
                for other, ns in zip(axis.matched.ranks, waited_for.tolist(), strict=False)
                if ns
            },
        )


def blocked_pieces(
    events: Events, spans: Tensor, windows: Tensor, rows: Tensor, labels: Labels
) -> Blocked:
    """When communication blocked the training thread.

    Args:
        events: of one rank.
        spans: places of the spans in which communication blocked the training thread.
        windows: edges of stretches of time, ascending.
        rows: for each event its collective, as a place in the rank's `Calls`.
        labels: of the events.
    """
    numbers, pair = torch.unique(labels.of(spans), return_inverse=True)
    starts, ends = events.start_ns[spans], events.end_ns[spans]
    layers: list[Pieces] = []
    left = torch.arange(spans.numel())
    while left.numel() and len(layers) < _MAX_DEPTH:
        chosen = outermost(starts[left], ends[left])
        own = left[chosen]
        within = torch.ones_like(left, dtype=torch.bool)
        within[chosen] = False
        left = left[within]
        # Spans of one thread are nested or apart, but a file may say otherwise.
        begins = starts[own]
        begins = torch.cat([begins[:1], torch.maximum(begins[1:], ends[own][:-1])])
        piece, window, begin, end = _cut(begins, ends[own], windows)
        layers.append(
            Pieces(
                begin,
                end,
                window,
                pair[own][piece],
                rows[spans[own]][piece],
                Cover.of(starts[left], ends[left]),
            )
        )
    if layers and left.numel():
        layers[-1] = _without_inner(layers[-1])
    return Blocked(Cover.of(starts, ends), layers, labels.pairs(numbers))


def _without_inner(layer: Pieces) -> Pieces:
    none = torch.zeros(0, dtype=torch.int64)
    return Pieces(
        layer.starts_ns,
        layer.ends_ns,
        layer.window,
        layer.pair,
        layer.row,
        Cover.of(none, none),
    )


def _cut(
    starts_ns: Tensor, ends_ns: Tensor, windows: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Cut stretches that do not overlap where windows meet; what lies outside is left out.

    Returns:
        For each piece the place of its stretch, its window, its start and its end.
    """
    count = windows.numel() - 1
    first = torch.searchsorted(windows, starts_ns, right=True) - 1
    last = torch.searchsorted(windows, ends_ns) - 1
    inside = (last >= 0) & (first < count) & (ends_ns > starts_ns)
    first, last = first.clamp(min=0), last.clamp(max=count - 1)
    parts = torch.where(inside, last - first + 1, 0)
    stretch = torch.repeat_interleave(torch.arange(parts.numel()), parts)
    before = (parts.cumsum(0) - parts)[stretch]
    window = first[stretch] + torch.arange(stretch.numel()) - before
    begin = torch.maximum(starts_ns[stretch], windows[window])
    end = torch.minimum(ends_ns[stretch], windows[window + 1])
    return stretch, window, begin, end

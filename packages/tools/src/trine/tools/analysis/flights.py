"""When communication was under way, and how much of that nothing waited for."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trine.tools.analysis.collectives import Collectives
from trine.tools.analysis.intervals import Cover
from trine.tools.analysis.unit_table import Cells, Labels
from trine.tools.tracing.events import Events

__all__ = ["Flights", "Flown", "flights"]


@dataclass(frozen=True, eq=False)
class Flown:
    """What was under way.

    Attributes:
        hidden_ns: how long something was, and the training thread was not blocked by
            communication; one number per window.
        cells: counts, bytes and times by unit, operation and step.
    """

    hidden_ns: Tensor
    cells: Cells


@dataclass(frozen=True, eq=False)
class Flights:
    """The communication of one rank that ran beside its threads; int64, 1-D.

    Attributes:
        starts_ns: when each was started.
        ends_ns: when it was through.
        window: in which window it was asked for, -1 for none.
        nbytes: bytes that the rank sent.
        pair: unit and operation, as a place in `pairs`.
        row: the collective, as a place in the rank's `Calls`; -1 for none.
        pairs: units and operations, in the order in which they first were asked for.
    """

    starts_ns: Tensor
    ends_ns: Tensor
    window: Tensor
    nbytes: Tensor
    pair: Tensor
    row: Tensor
    pairs: list[tuple[str, str]]

    @property
    def sent_nbytes(self) -> int:
        """Bytes that the rank sent, within steps or not."""
        return int(self.nbytes.sum())

    def fly(self, rank: int, axis: Collectives, blocked: Cover, windows: Tensor) -> Flown:
        """Find out what was hidden.

        Args:
            rank: whose this is.
            axis: the collectives of all ranks.
            blocked: when communication blocked its training thread.
            windows: edges of stretches of time, ascending.
        """
        # Before all have come nothing travels.
        ready_ns = axis.ready_for(rank, self.row)
        starts = torch.minimum(self.ends_ns, torch.maximum(self.starts_ns, ready_ns))
        in_flight = self.ends_ns - starts
        hidden = in_flight - blocked.within(starts, self.ends_ns)
        either = Cover.of(
            torch.cat([blocked.starts_ns, starts]), torch.cat([blocked.ends_ns, self.ends_ns])
        )
        begins, ends = windows[:-1], windows[1:]
        counted = (self.window >= 0) & (self.window % 2 == 0)
        numbers = {
            "count": torch.ones_like(in_flight)[counted],
            "nbytes": self.nbytes[counted],
            "in_flight_ns": in_flight[counted],
            "hidden_ns": hidden[counted],
        }
        return Flown(
            either.within(begins, ends) - blocked.within(begins, ends),
            Cells(self.pairs, self.pair[counted], self.window[counted] // 2, numbers),
        )


def flights(events: Events, windows: Tensor, rows: Tensor, labels: Labels) -> Flights:
    """The communication of one rank that ran beside its threads.

    Args:
        events: of the rank.
        windows: edges of stretches of time, ascending.
        rows: for each event its collective, as a place in the rank's `Calls`.
        labels: of the events.
    """
    places = (events.is_kind("async") & events.is_category("comm")).nonzero().flatten()
    asked_ns = events.enqueue_ns[places]
    window = torch.searchsorted(windows, asked_ns, right=True) - 1
    outside = window >= windows.numel() - 1
    numbers, pair = torch.unique(labels.of(places), return_inverse=True)
    first = torch.full_like(numbers, torch.iinfo(torch.int64).max)
    order = first.scatter_reduce_(0, pair, asked_ns, "amin").argsort(stable=True)
    place = torch.empty_like(order)
    place[order] = torch.arange(order.numel())
    return Flights(
        events.start_ns[places],
        events.end_ns[places],
        window.masked_fill(outside, -1),
        events.nbytes[places],
        place[pair],
        rows[places],
        labels.pairs(numbers[order]),
    )

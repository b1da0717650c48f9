"""Sums over intervals of time, with tensors: how much of a stretch do they cover?"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Cover", "outermost"]


def outermost(starts_ns: Tensor, ends_ns: Tensor) -> Tensor:
    """Places of the intervals that lie in no other, in the order of time.

    Args:
        starts_ns: int64, 1-D.
        ends_ns: as many, none before its start.
    """
    # Longest first of those that start together: stable sorts, the less important key first.
    order = (-ends_ns).argsort(stable=True)
    order = order[starts_ns[order].argsort(stable=True)]
    if not order.numel():
        return order
    latest = ends_ns[order].cummax(0).values
    keep = torch.ones_like(order, dtype=torch.bool)
    keep[1:] = ends_ns[order][1:] > latest[:-1]
    return order[keep]


@dataclass(frozen=True, eq=False)
class Cover:
    """What a set of intervals covers of time.

    Attributes:
        starts_ns: int64, 1-D, ascending.
        ends_ns: as many; intervals do not overlap.
        until_ns: how much they cover up to the end of each.
    """

    starts_ns: Tensor
    ends_ns: Tensor
    until_ns: Tensor

    @classmethod
    def of(cls, starts_ns: Tensor, ends_ns: Tensor) -> Cover:
        """The union of any intervals."""
        places = outermost(starts_ns, ends_ns)
        starts, ends = starts_ns[places], ends_ns[places]
        if starts.numel():
            # What overlaps without lying within counts once.
            starts = torch.cat([starts[:1], torch.maximum(starts[1:], ends[:-1])])
        return cls(starts, ends, (ends - starts).cumsum(0))

    def before(self, at_ns: Tensor) -> Tensor:
        """How much is covered before each moment; int64, 1-D like the moments."""
        if not self.starts_ns.numel():
            return torch.zeros_like(at_ns)
        place = torch.searchsorted(self.starts_ns, at_ns, right=True) - 1
        held = place.clamp(min=0)
        after = (self.ends_ns[held] - at_ns).clamp(min=0)  # of an interval that goes on
        return torch.where(place < 0, 0, self.until_ns[held] - after)

    def within(self, starts_ns: Tensor, ends_ns: Tensor) -> Tensor:
        """How much is covered of each stretch."""
        return self.before(ends_ns) - self.before(starts_ns)

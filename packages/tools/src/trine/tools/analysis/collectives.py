"""The collectives of a run on one axis of time: when each rank came, and who came last."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trine.tools.tracing.clock import Alignment, align_clocks
from trine.tools.tracing.matching import Matched, calls_of, match
from trine.tools.tracing.reader import RankTrace

__all__ = ["Collectives", "collectives", "on_one_axis"]

_FAR = 1 << 62


@dataclass(frozen=True, eq=False)
class Collectives:
    """The collectives of a run: a column for each, a row for each rank.

    Times are on the common axis of `alignment`, and mean nothing where `came` is False.

    Attributes:
        matched: groups, numbers and columns; its times are of each rank's own clock.
        alignment: how times got on the common axis.
        came: whether a rank's recording shows that it took part; bool, 2-D.
        arrived_ns: when each rank came; int64, 2-D.
        ready_ns: when the last recorded rank of its group had come; int64, 1-D.
        last: place in `matched.ranks` of the rank that came last, -1 for a collective of
            which only one rank is known; int64, 1-D.
    """

    matched: Matched
    alignment: Alignment
    came: Tensor
    arrived_ns: Tensor
    ready_ns: Tensor
    last: Tensor

    def ready_for(self, rank: int, rows: Tensor) -> Tensor:
        """When the other ranks of collectives had come, by the clock of one of the ranks.

        -1 where there was nobody to wait for: the rank came last itself, or the operation
        can end before all have come, or nothing is known of other ranks.

        Args:
            rank: the rank.
            rows: places in its `Calls`, -1 for none.
        """
        columns = self.matched.columns[rank]
        if not columns.numel():
            return torch.full_like(rows, -1)
        column = columns[rows.clamp(min=0)]
        last = self.last[column]
        alone = (last < 0) | (last == self.matched.ranks.index(rank))
        nobody = (rows < 0) | alone | ~self.matched.synchronizing[column]
        return self.alignment.to_rank(rank, self.ready_ns[column]).masked_fill(nobody, -1)


def collectives(traces: Sequence[RankTrace]) -> Collectives:
    """Match the collectives of a run and bring their times on one axis."""
    matched = match([calls_of(trace.header.rank, trace.events)[0] for trace in traces])
    headers = [trace.header for trace in traces]
    readings = {trace.header.rank: trace.readings for trace in traces}
    return on_one_axis(matched, align_clocks(headers, readings, matched))


def on_one_axis(matched: Matched, alignment: Alignment) -> Collectives:
    """Bring the times of matched collectives on one axis."""
    came = matched.arrived_ns >= 0
    arrived_ns = matched.arrived_ns.clone()
    for row, rank in enumerate(matched.ranks):
        arrived_ns[row] = alignment.to_common(rank, arrived_ns[row])
    known = arrived_ns.masked_fill(~came, -_FAR)
    if not matched.ranks:
        none = torch.zeros(0, dtype=torch.int64)
        return Collectives(matched, alignment, came, arrived_ns, none, none)
    ready_ns, last = known.max(0)
    last = last.masked_fill(came.sum(0) < 2, -1)
    return Collectives(matched, alignment, came, arrived_ns, ready_ns, last)

"""When ranks came to each collective: how far apart, and who stood waiting for whom."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trine.tools.analysis.sequences import GroupCalls, group_calls
from trine.tools.tracing.clock import align
from trine.tools.tracing.reader import RankTrace

__all__ = ["Arrivals", "arrivals"]


@dataclass(frozen=True, eq=False)
class Arrivals:
    """What ranks did before their collectives could start.

    Attributes:
        skew_ns: of each collective the time from the first rank's coming to the last's, by
            rank 0's clock; int64, 1-D.
        late_ns: by rank how long after the first it came, one number per collective.
        waits_ns: by rank and step how long its training thread stood in a wait while some
            rank of the group had not come.
    """

    skew_ns: Tensor
    late_ns: dict[int, Tensor]
    waits_ns: dict[int, dict[int, int]]


def arrivals(traces: Sequence[RankTrace]) -> Arrivals:
    """Match the collectives of all groups by number and compare when ranks came.

    Only collectives count that all recorded ranks of their group came to.
    """
    by_rank = {trace.header.rank: trace for trace in traces}
    offset_ns = align(traces).offset_ns
    skews: list[Tensor] = []
    late: dict[int, list[Tensor]] = {rank: [] for rank in by_rank}
    waits: dict[int, dict[int, int]] = {rank: {} for rank in by_rank}
    for calls in group_calls(traces):
        if len(calls.ranks) < 2:
            continue
        came_ns = torch.stack(
            [
                _came_ns(calls, row, by_rank[rank].events.enqueue_ns) + offset_ns[rank]
                for row, rank in enumerate(calls.ranks)
            ]
        )
        whole = (calls.begun >= 0).all(0)
        first_ns, ready_ns = came_ns.amin(0), came_ns.amax(0)
        skews.append((ready_ns - first_ns)[whole])
        for row, rank in enumerate(calls.ranks):
            late[rank].append((came_ns[row] - first_ns)[whole])
            _add_waits(waits[rank], calls, row, by_rank[rank], ready_ns - offset_ns[rank], whole)
    none = torch.zeros(0, dtype=torch.int64)
    return Arrivals(
        skew_ns=torch.cat([none, *skews]),
        late_ns={rank: torch.cat([none, *own]) for rank, own in late.items()},
        waits_ns=waits,
    )


def _came_ns(calls: GroupCalls, row: int, enqueue_ns: Tensor) -> Tensor:
    """When the rank came, by its own clock; whichever event says it earliest."""
    begun, ended = calls.begun[row], calls.ended[row]
    begun_ns = enqueue_ns[begun.clamp(min=0)]
    return torch.where(ended >= 0, torch.minimum(enqueue_ns[ended], begun_ns), begun_ns)


def _add_waits(
    into: dict[int, int],
    calls: GroupCalls,
    row: int,
    trace: RankTrace,
    ready_ns: Tensor,
    whole: Tensor,
) -> None:
    """Add up by step how long the rank stood in waits before the others had come.

    Args:
        into: by number of the step; added to.
        calls: of the group.
        row: of the rank in it.
        trace: of the rank.
        ready_ns: when the last rank came to each collective, by this rank's clock.
        whole: which collectives all came to.
    """
    chosen = whole & (calls.waited[row] >= 0)
    places = calls.waited[row, chosen]
    events = trace.events
    until_ns = torch.minimum(events.end_ns[places], ready_ns[chosen])
    stood_ns = (until_ns - events.start_ns[places]).clamp(min=0)
    steps, place = torch.unique(events.step[places], return_inverse=True)
    sums = torch.zeros_like(steps).scatter_add_(0, place, stood_ns)
    for step, ns in zip(steps.tolist(), sums.tolist(), strict=True):
        into[step] = into.get(step, 0) + ns

"""When ranks came to each collective: how far apart, and who stood waiting for whom."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trine.tools.analysis.breakdown import Look, break_down_looks
from trine.tools.analysis.collectives import Collectives, on_one_axis
from trine.tools.tracing.matching import match

__all__ = ["Arrivals", "arrivals"]


@dataclass(frozen=True, eq=False)
class Arrivals:
    """What ranks did before their collectives could start.

    Attributes:
        skew_ns: of each collective the time from the first rank's coming to the last's, on
            the common axis; int64, 1-D.
        late_ns: by rank how long after the first it came, one number per collective.
        waits_ns: by rank and step how long its training thread stood waiting while some
            rank of the group had not come.
        note: how well times of different ranks compare, in one sentence.
    """

    skew_ns: Tensor
    late_ns: dict[int, Tensor]
    waits_ns: dict[int, dict[int, int]]
    note: str


def arrivals(looks: Sequence[Look]) -> Arrivals:
    """Compare when ranks came to the collectives of all groups.

    For the skew only those count that all recorded ranks of their group came to.

    Args:
        looks: what was kept of each recording.
    """
    run = break_down_looks(looks)
    axis = on_one_axis(match([look.calls for look in looks]), run.alignment)
    skew_ns, late_ns = _apart(axis)
    return Arrivals(
        skew_ns=skew_ns,
        late_ns=late_ns,
        waits_ns={rank.rank: {row.step: row.wait_ns for row in rank.steps} for rank in run.ranks},
        note=run.alignment.note,
    )


def _apart(axis: Collectives) -> tuple[Tensor, dict[int, Tensor]]:
    """The skew of each whole collective, and how long after the first each rank came."""
    group = axis.matched.group
    skews = [torch.zeros(0, dtype=torch.int64)]
    late = {rank: [torch.zeros(0, dtype=torch.int64)] for rank in axis.matched.ranks}
    for own in torch.unique(group).tolist():
        columns = (group == own).nonzero().flatten()
        rows = axis.came[:, columns].any(1).nonzero().flatten()
        if rows.numel() < 2:
            continue
        columns = columns[axis.came[rows][:, columns].all(0)]
        arrived_ns = axis.arrived_ns[rows][:, columns]
        after_ns = arrived_ns - arrived_ns.amin(0)
        skews.append(after_ns.amax(0))
        for row, own_ns in zip(rows.tolist(), after_ns, strict=True):
            late[axis.matched.ranks[row]].append(own_ns)
    return torch.cat(skews), {rank: torch.cat(own) for rank, own in late.items()}

"""The collectives of all ranks side by side: those of one number in one group are one.

Compact on purpose: a few numbers per collective and rank are kept, not the events, so that
a run's recordings can be read one after the other. Times are of each rank's own clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from trine.tools.tracing.columns import Texts
from trine.tools.tracing.events import Events

__all__ = ["SYNCHRONIZING", "Calls", "Matched", "calls_of", "match"]

SYNCHRONIZING: Final = frozenset(
    {"all_gather", "reduce_scatter", "all_reduce", "barrier", "all_to_all"}
)
"""Operations that cannot end on any rank before all ranks of the group have begun them."""

_LAST: Final = (1 << 63) - 1


@dataclass(frozen=True, eq=False)
class Calls:
    """The collectives that one rank took part in, a row each; int64 unless said otherwise.

    Attributes:
        rank: the rank.
        group: places in `groups`.
        sequence: which of the group's collectives it is.
        arrived_ns: when the rank asked for it.
        ended_ns: when it was through; -1 if that was not recorded.
        synchronizing: whether it cannot end before all ranks have come; bool.
        groups: names of groups.
    """

    rank: int
    group: Tensor
    sequence: Tensor
    arrived_ns: Tensor
    ended_ns: Tensor
    synchronizing: Tensor
    groups: list[str]


@dataclass(frozen=True, eq=False)
class Matched:
    """The collectives of a run: a row for each rank, a column for each collective.

    Attributes:
        ranks: the rows.
        group: of each column, places in `groups`; int64, 1-D.
        sequence: of each column; int64, 1-D.
        arrived_ns: -1 where a rank did not come, or its recording does not say; int64, 2-D.
        ended_ns: the same; int64, 2-D.
        synchronizing: of each column; bool, 1-D.
        columns: by rank, which column each row of its `Calls` became; int64, 1-D.
        groups: names of groups.
    """

    ranks: list[int]
    group: Tensor
    sequence: Tensor
    arrived_ns: Tensor
    ended_ns: Tensor
    synchronizing: Tensor
    columns: dict[int, Tensor]
    groups: list[str]


def calls_of(rank: int, events: Events) -> tuple[Calls, Tensor]:
    """The collectives of a rank, and for each event its row among them, -1 for none.

    An event belongs to a collective if it says of which group it is, and which of it: the
    instant as it starts, the span of the wait for it, the collective as a whole.
    """
    chosen = events.is_category("comm") & (events.sequence >= 0)
    places = chosen.nonzero().flatten()
    keys, inverse = _keys(events.group[places].long(), events.sequence[places])
    count = keys.shape[1]
    arrived = torch.full((count,), _LAST)
    arrived.scatter_reduce_(0, inverse, events.enqueue_ns[places], "amin")
    ended = torch.full((count,), -1)
    through = events.is_kind("async")[places]
    ended.scatter_reduce_(0, inverse[through], events.end_ns[places[through]], "amax")
    known = torch.tensor([text in SYNCHRONIZING for text in events.texts], dtype=torch.bool)
    synchronizing = torch.zeros(count, dtype=torch.bool)
    synchronizing[inverse[known[events.operation[places].long()]]] = True
    used, group = torch.unique(keys[0], return_inverse=True)
    rows = torch.full((len(events),), -1)
    rows[places] = inverse
    calls = Calls(
        rank,
        group,
        keys[1],
        arrived,
        ended,
        synchronizing,
        [events.texts[place] for place in used.tolist()],
    )
    return calls, rows


def match(every: Sequence[Calls]) -> Matched:
    """Put the collectives of all ranks side by side."""
    names = Texts()
    groups = [
        torch.tensor([names.add(text) for text in calls.groups], dtype=torch.int64)[calls.group]
        for calls in every
    ]
    none = torch.zeros(0, dtype=torch.int64)
    keys, inverse = _keys(
        torch.cat([none, *groups]), torch.cat([none, *(calls.sequence for calls in every)])
    )
    shape = len(every), keys.shape[1]
    arrived, ended = torch.full((2, *shape), -1)
    synchronizing = torch.zeros(shape[1], dtype=torch.bool)
    columns: dict[int, Tensor] = {}
    parts = torch.split(inverse, [calls.group.numel() for calls in every])
    for row, (calls, column) in enumerate(zip(every, parts, strict=True)):
        arrived[row, column] = calls.arrived_ns
        ended[row, column] = calls.ended_ns
        synchronizing[column] |= calls.synchronizing
        columns[calls.rank] = column
    return Matched(
        [calls.rank for calls in every],
        keys[0],
        keys[1],
        arrived,
        ended,
        synchronizing,
        columns,
        list(names),
    )


def _keys(group: Tensor, sequence: Tensor) -> tuple[Tensor, Tensor]:
    """Distinct pairs in ascending order, as two rows, and the place of each pair in them."""
    # Numbers of a sequence may be anything; their places among each other are small, so
    # that a pair fits one integer, which sorts faster than rows do.
    numbers, number = torch.unique(sequence, return_inverse=True)
    width = max(1, numbers.numel())
    pairs, inverse = torch.unique(group * width + number, return_inverse=True)
    return torch.stack([pairs // width, numbers[pairs % width]]), inverse

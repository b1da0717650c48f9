"""What each rank did in each group: its collectives side by side, by their number.

Every rank numbers the collectives of a group from 1, so those of one number belong
together. A row is a rank, a column a number; the cells say by which event the rank showed
that it began, and by which that it was through.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from trine.tools.tracing.columns import Texts
from trine.tools.tracing.events import Events
from trine.tools.tracing.reader import RankTrace

__all__ = ["GroupCalls", "group_calls"]

_LAST: Final = 1 << 62
_STEPS_ASKED: Final = 3  # the recording of the first may have lost its beginning


@dataclass(frozen=True, eq=False)
class GroupCalls:
    """The collectives of one group, side by side.

    Attributes:
        group: its name.
        ranks: whose recordings show that they belong to it; the rows.
        members: all ranks that belong to it, if a recording says so.
        numbers: of the collectives, ascending; the columns; int64, 1-D.
        begun: for each rank and number the place, in the rank's events, of the first one
            that shows that it began; -1 for none; int64, 2-D.
        ended: the same of the event that shows that it was through.
        waited: the same of the span in which the rank waited for it.
        operation, unit, dtype: as places in `texts`, 0 for unknown; int64, 2-D.
        known_from: per rank the first number from which on its recording is complete;
            earlier events may have been dropped.
        last: per rank the last number that it began.
        texts: the names of operations, units and dtypes.
    """

    group: str
    ranks: list[int]
    members: frozenset[int] | None
    numbers: Tensor
    begun: Tensor
    ended: Tensor
    waited: Tensor
    operation: Tensor
    unit: Tensor
    dtype: Tensor
    known_from: list[int]
    last: list[int]
    texts: list[str]

    def text(self, column: Tensor, row: int, at: int) -> str:
        """The operation, unit or dtype of one rank's collective, "" if it is not known."""
        return self.texts[int(column[row, at])]


@dataclass(frozen=True, eq=False)
class _Own:
    """The collective events of one rank; texts as places in the common table."""

    trace: RankTrace
    places: Tensor
    number: Tensor
    group: Tensor
    operation: Tensor
    unit: Tensor
    dtype: Tensor


def group_calls(traces: Sequence[RankTrace]) -> list[GroupCalls]:
    """The groups that the ranks used, in the order in which they were first seen."""
    texts = Texts()
    every = [_own(trace, texts) for trace in traces]
    names = list(texts)
    found: dict[int, None] = {}
    for own in every:
        found |= dict.fromkeys(torch.unique(own.group).tolist())
    return [_calls(group, every, names) for group in found]


def _own(trace: RankTrace, texts: Texts) -> _Own:
    events = trace.events
    places = (events.is_category("comm") & (events.sequence >= 0)).nonzero().flatten()
    common = torch.tensor([texts.add(text) for text in events.texts] or [0])

    def column(column: Tensor) -> Tensor:
        return common[column[places].long()]

    return _Own(
        trace,
        places,
        events.sequence[places],
        column(events.group),
        column(events.operation),
        column(events.unit),
        column(events.dtype),
    )


def _calls(group: int, every: Sequence[_Own], texts: list[str]) -> GroupCalls:
    users = [(own, own.group == group) for own in every]
    users = [(own, chosen) for own, chosen in users if bool(chosen.any())]
    numbers = torch.unique(torch.cat([own.number[chosen] for own, chosen in users]))
    shape = (len(users), numbers.numel())
    begun = torch.full(shape, _LAST)
    ended, waited = torch.full((2, *shape), -1)
    operation, unit, dtype = torch.zeros(3, *shape, dtype=torch.int64)
    members: set[int] = set()
    for row, (own, chosen) in enumerate(users):
        places, columns = own.places[chosen], torch.searchsorted(numbers, own.number[chosen])
        through = own.trace.events.is_kind("async")[places]
        wait = own.trace.events.is_kind("span")[places]
        # An instant as it starts, the span of the wait for it, the collective as a whole:
        # what was reported first shows when it began, and what one leaves out another says.
        begun[row].scatter_reduce_(0, columns, places, "amin")
        ended[row].scatter_reduce_(0, columns[through], places[through], "amax")
        waited[row].scatter_reduce_(0, columns[wait], places[wait], "amax")
        operation[row].scatter_reduce_(0, columns, own.operation[chosen], "amax")
        unit[row].scatter_reduce_(0, columns, own.unit[chosen], "amax")
        dtype[row].scatter_reduce_(0, columns, own.dtype[chosen], "amax")
        members |= _said_members(own.trace.events, places)
    begun[begun == _LAST] = -1
    ranks = [own.trace.header.rank for own, _ in users]
    return GroupCalls(
        group=texts[group],
        ranks=ranks,
        members=frozenset(members | set(ranks)) if members else None,
        numbers=numbers,
        begun=begun,
        ended=ended,
        waited=waited,
        operation=operation,
        unit=unit,
        dtype=dtype,
        known_from=[
            int(own.number[chosen].min()) if own.trace.dropped else 0 for own, chosen in users
        ],
        last=[int(own.number[chosen].max()) for own, chosen in users],
        texts=texts,
    )


def _said_members(events: Events, places: Tensor) -> set[int]:
    """The ranks of a group, which are listed where the first collective of a step starts."""
    starts = places[events.is_kind("instant")[places]]
    step = events.step[starts]
    is_first = torch.ones_like(step, dtype=torch.bool)
    is_first[1:] = step[1:] != step[:-1]
    for place in starts[is_first][:_STEPS_ASKED].tolist():
        said = events.attributes(place).get("ranks")
        if isinstance(said, list):
            return {rank for rank in said if type(rank) is int and rank >= 0}
    return set()

"""In what the ranks of a group disagree about a collective."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor

from trine.tools.analysis.sequences import GroupCalls
from trine.tools.tracing.events import Events
from trine.tools.tracing.reader import RankTrace

__all__ = ["differences", "elements"]

_SAME_SIZE: Final = frozenset({"all_gather", "reduce_scatter", "all_reduce", "broadcast", "reduce"})
_SAME_BYTES: Final = frozenset({"all_gather", "reduce_scatter", "all_reduce"})
_LAST_NUMBERS: Final = 4096  # collectives that are under way at once are far fewer


def differences(calls: GroupCalls, traces: Mapping[int, RankTrace]) -> dict[str, Tensor]:
    """In what the ranks of a group disagree, and for each a mask over the group's numbers.

    What a rank's file does not say contradicts nothing. Sizes are compared for operations
    in which every rank must bring the same.

    Args:
        calls: of the group.
        traces: by rank.
    """
    found = {
        "operation": _unequal(calls.operation, calls.operation > 0),
        "unit": _unequal(calls.unit, calls.unit > 0),
        "dtype": _unequal(calls.dtype, calls.dtype > 0),
    }
    # Sizes that are through are compared as bytes, which every file has in a column; the
    # few that are not, by the elements that their first event says.
    nbytes = torch.zeros_like(calls.ended)
    sizes = torch.full_like(calls.ended, -1)
    open_at = (calls.ended < 0).any(0).nonzero().flatten()[-_LAST_NUMBERS:]
    for row, rank in enumerate(calls.ranks):
        events = traces[rank].events
        through = calls.ended[row] >= 0
        nbytes[row, through] = events.nbytes[calls.ended[row, through]]
        for at in open_at.tolist():
            sizes[row, at] = elements(events, int(calls.begun[row, at]))
    comparable = _is_one_of(calls, _SAME_BYTES) & (nbytes > 0)
    wrong = _unequal(nbytes, comparable)
    wrong |= _unequal(sizes, _is_one_of(calls, _SAME_SIZE) & (sizes >= 0))
    # Another operation moves another size: one word says it.
    return {**found, "elements": wrong & ~found["operation"]}


def _unequal(values: Tensor, known: Tensor) -> Tensor:
    low = values.masked_fill(~known, torch.iinfo(torch.int64).max).amin(0)
    return (values.masked_fill(~known, -1).amax(0) > low) & known.any(0)


def _is_one_of(calls: GroupCalls, operations: frozenset[str]) -> Tensor:
    known = [place for place, text in enumerate(calls.texts) if text in operations]
    return torch.isin(calls.operation, torch.tensor(known, dtype=torch.int64))


def elements(events: Events, place: int) -> int:
    """How many elements an event says that its collective has, -1 if it does not."""
    said = events.attributes(place).get("elements") if place >= 0 else None
    return said if type(said) is int and 0 <= said < 1 << 62 else -1

"""How the memory of one rank went over time, from the counters that were recorded of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from trine.tools.analysis.advice import KINDS
from trine.tools.tracing.events import Events

__all__ = ["ALLOCATED", "MemorySeries", "memory_series"]

ALLOCATED: Final = "allocated"
_PREFIX: Final = "memory."


@dataclass(frozen=True, eq=False)
class MemorySeries:
    """The counters of one rank, in the order in which they were reported.

    Attributes:
        place: of each in the recording; int64.
        holder: place of its kind and unit in `holders`; int64.
        value: bytes that the holder has from then on; float64.
        total: bytes that all holders have from then on; float64.
        holders: kind and unit.
        allocated: the most bytes that were reported as allocated in all, whatever for; None if
            that was not recorded.
    """

    place: Tensor
    holder: Tensor
    value: Tensor
    total: Tensor
    holders: list[tuple[str, str]]
    allocated: float | None

    def at(self, index: int) -> dict[tuple[str, str], float]:
        """Bytes of each holder behind counter `index`."""
        last = torch.full((len(self.holders),), -1, dtype=torch.int64)
        order = torch.arange(index + 1)
        last.scatter_reduce_(0, self.holder[: index + 1], order, "amax")
        found = zip(self.holders, last.tolist(), strict=True)
        return {each: float(self.value[at]) for each, at in found if at >= 0}

    def most(self) -> dict[tuple[str, str], float]:
        """The most bytes that each holder ever had."""
        most = torch.zeros(len(self.holders), dtype=torch.float64)
        most.scatter_reduce_(0, self.holder, self.value, "amax")
        return dict(zip(self.holders, most.tolist(), strict=True))


def memory_series(events: Events) -> MemorySeries:
    """The memory counters among events.

    Values that cannot be sizes, which only a damaged or hostile file has, count as 0.
    """
    counters = events.is_kind("counter") & events.is_category("mem")
    kinds = {events.place(_PREFIX + kind): kind for kind in (*KINDS, ALLOCATED)}
    kinds.pop(-1, None)
    named = torch.zeros(len(events.texts) + 1, dtype=torch.bool)
    named[list(kinds)] = True
    place = (counters & named[events.name.to(torch.int64)]).nonzero().flatten()
    name, unit = events.name[place].to(torch.int64), events.unit[place].to(torch.int64)
    value = events.value[place]
    value = torch.where(value.isfinite() & (value > 0), value, 0.0)
    allocated = events.place(_PREFIX + ALLOCATED)
    whole = name == allocated
    most = float(value[whole].max()) if bool(whole.any()) else None
    place, name, unit, value = place[~whole], name[~whole], unit[~whole], value[~whole]
    keys, holder = torch.unique(name * (len(events.texts) + 1) + unit, return_inverse=True)
    holders = [
        (kinds[key // (len(events.texts) + 1)], events.texts[key % (len(events.texts) + 1)])
        for key in keys.tolist()
    ]
    return MemorySeries(place, holder, value, _total(holder, value), holders, most)


def _total(holder: Tensor, value: Tensor) -> Tensor:
    """The sum over holders behind each counter: what each changes, added up."""
    order = holder.argsort(stable=True)
    grouped = value[order]
    before = torch.zeros_like(grouped)
    same = holder[order][1:] == holder[order][:-1]
    before[1:] = torch.where(same, grouped[:-1], 0.0)
    change = torch.empty_like(value)
    change[order] = grouped - before
    return change.cumsum(0)

"""Ledgers: which of its collectives a process group is at, counted by the ranks themselves.

Ranks that run the same program count alike, so the numbers tell who is ahead and who is behind.
Counting is on the hot path and costs a few attributes; nothing here communicates.
"""

from __future__ import annotations

from collections import deque
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["Entry", "Ledger", "ledger_of", "ledgers"]

Entry = tuple[str, str, str, int, torch.dtype]
"""The name of the group, what is done, whose it is, and what it moves: elements and dtype."""

_REMEMBERED = 64  # collectives; ranks get no further apart while one waits for another


class Ledger:
    """The collectives that this rank has started in one group.

    Args:
        group: whose collectives; not kept alive.

    Attributes:
        name: of the group, the same on all its ranks.
        ranks: of the world, in the order of the group.
        rank: this one, in the world.
        world_size: how many ranks the world has.
        number: of the collective started last; the first is number 1.
        broken: which collective failed, and why; None while all is well. The ranks of the
            group may be out of step then, and what they send may land in another tensor.
        told_step: the step in which the tracing seam was last told who belongs to the group.
    """

    __slots__ = (
        "_entries",
        "broken",
        "name",
        "number",
        "rank",
        "ranks",
        "told_step",
        "world_size",
    )

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.name = str(group.group_name)
        self.ranks = tuple(dist.get_process_group_ranks(group))
        self.rank = self.ranks[group.rank()]
        self.world_size = dist.get_world_size()
        self.number = 0
        self.broken: str | None = None
        self.told_step = -1
        self._entries: deque[Entry] = deque(maxlen=_REMEMBERED)

    def note(self, what: str, unit: str, buffer: Tensor) -> Entry:
        """Count a collective that is about to start."""
        self.number += 1
        entry = (self.name, what, unit, buffer.numel(), buffer.dtype)
        self._entries.append(entry)
        return entry

    def recent(self) -> dict[int, str]:
        """The collectives started last, in words, by their numbers."""
        entries, number = list(self._entries), self.number
        first = number - len(entries) + 1
        return {first + place: _words(entry) for place, entry in enumerate(entries)}


def _words(entry: Entry) -> str:
    _, what, unit, numel, dtype = entry
    return f"{what} of {unit} ({numel} elements of {str(dtype).removeprefix('torch.')})"


_of_groups: WeakKeyDictionary[dist.ProcessGroup, Ledger] = WeakKeyDictionary()


def ledger_of(group: dist.ProcessGroup) -> Ledger:
    """The ledger of a group of the running world; the same object for the same group."""
    found = _of_groups.get(group)
    if found is None:
        found = _of_groups[group] = Ledger(group)
    return found


def ledgers() -> dict[str, Ledger]:
    """All of them, by the name of the group."""
    return {ledger.name: ledger for ledger in list(_of_groups.values())}

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
_TRUSTED = 10_000  # collectives after ranks have compared, which takes up to 30 ms


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
        doubt: why other ranks may not be about to do the same, and what to do then; they are to
            be asked before the next collective. None if nothing speaks against it.
    """

    __slots__ = (
        "_entries",
        "_trusted_until",
        "_without_grad",
        "broken",
        "doubt",
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
        self.doubt: str | None = None
        self._trusted_until = 0
        self._without_grad = False
        self._entries: deque[tuple[Entry, bool]] = deque(maxlen=_REMEMBERED)

    def note(self, what: str, unit: str, buffer: Tensor) -> Entry:
        """Count a collective that is about to start."""
        self.number += 1
        entry = (self.name, what, unit, buffer.numel(), buffer.dtype)
        self._entries.append((entry, self._without_grad))
        return entry

    def turn(self, *, without_grad: bool) -> None:
        """A model is about to run forward; its first collective after a turn is in doubt.

        A program that evaluates on one rank alone goes astray here.

        Args:
            without_grad: whether no backward can follow.
        """
        if without_grad is self._without_grad:
            return
        self._without_grad = without_grad
        # Not by a clock: where only some of the ranks ask, the answers take a second.
        if self.number >= self._trusted_until:
            turn = "from training to a forward without gradients"
            if not without_grad:
                turn = "from a forward without gradients to training"
            self.doubt = (
                f"Rank {self.rank} has just turned {turn}. What gathers parameters is done by all "
                "ranks together: evaluate and generate on every rank, also where one rank alone "
                "uses the result."
            )

    def trust(self) -> None:
        """The ranks have compared what they do, and it was the same.

        In the beginning, where mistakes show, they do so again when they have made as many
        collectives once more.
        """
        self._trusted_until = self.number + min(self.number, _TRUSTED)

    def recent(self) -> dict[int, str]:
        """The collectives started last, in words, by their numbers."""
        entries, number = list(self._entries), self.number
        first = number - len(entries) + 1
        return {first + place: _words(*each) for place, each in enumerate(entries)}


def _words(entry: Entry, without_grad: bool) -> str:
    _, what, unit, numel, dtype = entry
    words = f"{what} of {unit} ({numel} elements of {str(dtype).removeprefix('torch.')})"
    return f"{words}, without gradients" if without_grad else words


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

"""The ranks that save or load together: what fails on one of them fails on all.

Knows nothing of checkpoints but the name of their error. Works without a process group too,
as a world of one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

import torch.distributed as dist

from trine.core import TrineError
from trine.distributed.process_groups import BorrowedGroup

__all__ = ["CheckpointError", "Ranks"]

R = TypeVar("R")


class CheckpointError(TrineError):
    """A checkpoint could not be written or read.

    Nothing that was there before has changed, unless the message says that it may have.
    """


class Ranks:
    """All ranks of the world, in a group of their own.

    Of their own, so that a save in the background does not meet the collectives of training.
    The first one made in a world makes the group, so every rank must make one.
    """

    def __init__(self) -> None:
        self._group = _group_of_this_world()
        self.rank = dist.get_rank() if self._group is not None else 0
        self.size = dist.get_world_size() if self._group is not None else 1

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The group, None where no process group is running."""
        return None if self._group is None else self._group()

    def on_all(self, doing: str, work: Callable[[], R]) -> list[R]:
        """Do something on every rank; every rank gets what all of them returned.

        Args:
            doing: for the message, as in "While ...".
            work: must not communicate.

        Raises:
            CheckpointError: on every rank, if `work` raised on one; it names the ranks.
        """
        failure: Exception | None = None
        mine: tuple[str | None, R | None]
        try:
            mine = (None, work())
        except Exception as error:  # told to all ranks, and raised there
            failure = error
            mine = (_said(error), None)
        told: list[tuple[str | None, R | None]] = [mine]
        if self._group is not None:
            told = [mine] * self.size
            try:
                dist.all_gather_object(told, mine, group=self._group())
            except Exception as error:
                raise CheckpointError(
                    f"While {doing}, rank {self.rank} lost touch with the others: one of them has "
                    f"stopped. {_said(error)}"
                ) from error
        failed = {rank: why for rank, (why, _) in enumerate(told) if why is not None}
        if failed:
            raise CheckpointError(f"While {doing}: {_listed(failed)}") from failure
        return [cast(R, result) for _, result in told]

    def on_first(self, doing: str, work: Callable[[], R]) -> R:
        """Do something on rank 0; every rank gets what it returned, or its failure.

        Raises:
            CheckpointError: as from `on_all`.
        """
        return cast(R, self.on_all(doing, lambda: work() if self.rank == 0 else None)[0])


_world_group: BorrowedGroup | None = None


def _group_of_this_world() -> BorrowedGroup | None:
    global _world_group
    if not dist.is_initialized():
        return None
    if _world_group is not None:
        try:
            _world_group()
        except TrineError:  # of a world that was left
            _world_group = None
    if _world_group is None:
        made = dist.new_group(backend="gloo" if dist.is_gloo_available() else None)
        _world_group = BorrowedGroup(cast(dist.ProcessGroup, made))
    return _world_group


def _said(error: BaseException) -> str:
    text = str(error).strip()
    if isinstance(error, TrineError | ValueError | OSError) and text:
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _listed(failed: dict[int, str]) -> str:
    """The failures, those of the same words together."""
    by_words: dict[str, list[int]] = {}
    for rank, why in failed.items():
        by_words.setdefault(why, []).append(rank)
    parts = []
    for why, ranks in by_words.items():
        who = "rank" if len(ranks) == 1 else "ranks"
        parts.append(f"{who} {', '.join(map(str, ranks))}: {why}")
    return "\n".join(parts)

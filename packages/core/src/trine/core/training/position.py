"""Where a run is in its data: the batches seen since the loader was started, and its order."""

from __future__ import annotations

import random
import warnings
from collections.abc import Generator, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["DataPosition"]


class DataPosition:
    """Gives the batches of a loader, and can find the same place in the same order later.

    A loader that shuffles draws its order from a random generator when it is started, so
    the generators' state at that moment is kept: torch's and Python's own, and those of
    the loader and its sampler.
    """

    def __init__(self) -> None:
        self._generators: list[torch.Generator] = []
        self._start: dict[str, Any] | None = None
        self._to_restore: Mapping[str, Any] | None = None
        self._seen = 0

    def use(self, loader: Iterable[Any]) -> None:
        """Get to know the loader of a run, and restore the random state that was loaded."""
        self._generators = _generators_of(loader)
        if self._to_restore is not None:
            self._set_random_state(self._to_restore)
            self._to_restore = None

    def batches(self, loader: Iterable[Any], *, go_on: bool) -> Generator[Any, None, None]:
        """Batches without end: the loader is started over when it has no more.

        Args:
            loader: the loader that `use` was told.
            go_on: first pass over what was seen, in the order it had.

        Raises:
            ValueError: if the loader gives no batch.
        """
        self._seen = to_pass = self._seen if go_on else 0
        now = self._random_state()
        if to_pass and self._start is not None:
            self._set_random_state(self._start)
        else:
            self._start = now
        while True:
            empty = True
            for batch in loader:
                empty = False
                if to_pass:
                    to_pass -= 1
                    if not to_pass:
                        self._set_random_state(now)
                    continue
                yield batch
            if empty:
                raise ValueError("The training loader gave no batch.")
            if not to_pass:
                self._start = self._random_state()
                self._seen = 0

    def step_done(self) -> None:
        """Count one batch as seen, once it was trained on."""
        self._seen += 1

    def state_dict(self) -> dict[str, Any]:
        """The place in the data, and the random state now and when the loader was started."""
        return {
            "seen": self._seen,
            "start": self._start,
            "now": self._random_state(),
            "rank": _rank(),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take back what `state_dict` gave; the random state with the next `use`.

        That of another rank is left alone: ranks that draw the same numbers would, for
        instance, drop the same values out.
        """
        self._seen = state_dict["seen"]
        if state_dict["rank"] == _rank():
            self._start, self._to_restore = state_dict["start"], state_dict["now"]
            return
        self._start = self._to_restore = None
        if self._seen:
            warnings.warn(
                f"This state was saved by rank {state_dict['rank']} in the middle of an epoch, and "
                f"rank {_rank()} goes on from it without its random state. A loader that shuffles "
                "without a sampler that is told the epoch will repeat some batches and leave "
                "others out. Save a state on each rank, or at the end of an epoch.",
                stacklevel=3,
            )

    def _random_state(self) -> dict[str, Any]:
        return {
            "torch": torch.get_rng_state(),
            "python": random.getstate(),
            "generators": [each.get_state() for each in self._generators],
        }

    def _set_random_state(self, state: Mapping[str, Any]) -> None:
        torch.set_rng_state(state["torch"])
        random.setstate(state["python"])
        # A state saved before the first run, or with another loader, has others or none.
        if len(state["generators"]) == len(self._generators):
            for generator, each in zip(self._generators, state["generators"], strict=True):
                generator.set_state(each)


def _generators_of(loader: Iterable[Any]) -> list[torch.Generator]:
    """The generators that a DataLoader and its samplers draw from, each once."""
    sampler = getattr(loader, "sampler", None)
    batch_sampler = getattr(loader, "batch_sampler", None)
    holders = [loader, sampler, batch_sampler, getattr(batch_sampler, "sampler", None)]
    found = [getattr(holder, "generator", None) for holder in holders]
    by_id = {id(each): each for each in found if isinstance(each, torch.Generator)}
    return list(by_id.values())


def _rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0

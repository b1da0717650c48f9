"""A choice of cells from a grid that is too large to run whole: every pair of settings meets."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence

__all__ = ["covering"]

_TRIES = 30  # candidates for each cell; more make the choice slightly smaller


def covering(axes: Mapping[str, Sequence[str]], strength: int) -> list[dict[str, str]]:
    """Cells in which every combination of values of any `strength` axes occurs.

    Greedy and seeded, so the same cells in every run: each cell starts from a combination
    that is missing, and of a few ways to fill it up takes the one that adds most.

    Args:
        axes: the values of each axis, by its name.
        strength: 2 for every pair, 3 for every triple.
    """
    rng = random.Random(0)
    missing = {
        tuple(zip(names, values, strict=True)): None
        for names in itertools.combinations(axes, strength)
        for values in itertools.product(*(axes[name] for name in names))
    }
    cells = []
    while missing:
        start = dict(next(iter(missing)))
        candidates = [
            {name: start.get(name) or rng.choice(values) for name, values in axes.items()}
            for _ in range(_TRIES)
        ]
        best = max(candidates, key=lambda cell: sum(c in missing for c in _within(cell, strength)))
        for combination in _within(best, strength):
            missing.pop(combination, None)
        cells.append(best)
    return cells


def _within(cell: Mapping[str, str], strength: int) -> Iterator[tuple[tuple[str, str], ...]]:
    return itertools.combinations(cell.items(), strength)

"""What the engine raises when ranks fail each other. Mistakes in an argument are not here."""

from __future__ import annotations

from collections.abc import Sequence

from trine.core.errors import TrineError

__all__ = ["CommError", "NonFiniteGradient", "RanksDisagree", "rank_list"]


class CommError(TrineError):
    """A collective of the engine failed: usually another rank has gone, or does not come."""


class RanksDisagree(TrineError):
    """Ranks that must do the same are about to do different things. Every one of them is told."""


class NonFiniteGradient(TrineError):
    """A gradient holds NaN or infinity; see `FSDPModule.set_check_finite_gradients`.

    Attributes:
        parameter: full name of the first one, in the order of backward.
        ranks: on which its own gradient was so before the reduction.
        step: how many optimizer steps, or which step of the tracing seam, came before.
    """

    def __init__(self, message: str, parameter: str, ranks: Sequence[int], step: int) -> None:
        super().__init__(message)
        self.parameter = parameter
        self.ranks = tuple(ranks)
        self.step = step

    def __reduce__(self) -> tuple[type[NonFiniteGradient], tuple[object, ...]]:
        return type(self), (str(self), self.parameter, self.ranks, self.step)


def rank_list(ranks: Sequence[int]) -> str:
    """Ranks for a message: "rank 1", or "ranks 0-3, 6"."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    parts = [
        f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(str(rank) for rank in run)
        for run in runs
    ]
    return f"rank{'s' * (len(ranks) != 1)} {', '.join(parts)}"

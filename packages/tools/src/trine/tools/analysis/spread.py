"""A number that is measured once per step: its median, and how sure that is.

Steps of training are not normally distributed: some wait for a disk or another program. So
medians are compared, and their error comes from the median absolute deviation, which such
steps do not inflate.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import sqrt
from statistics import median
from typing import Final

import torch
from torch import Tensor

__all__ = ["TO_SIGMA", "Spread"]

TO_SIGMA: Final = 1.4826
"""What turns the median absolute deviation of normally distributed numbers into sigma."""

_OF_MEDIAN: Final = 1.2533  # how much less sure a median is than a mean, for such numbers


@dataclass(frozen=True)
class Spread:
    """The middle of many numbers and how far they lie around it.

    Attributes:
        median: the middle.
        mad: half of the numbers lie no further from it.
        count: how many there are.
    """

    median: float
    mad: float
    count: int

    @classmethod
    def of(cls, numbers: Iterable[float] | Tensor) -> Spread:
        """The spread of the numbers; all zero if there are none."""
        held: list[float] = (
            numbers.flatten().tolist() if isinstance(numbers, torch.Tensor) else list(numbers)
        )
        if not held:
            return cls(0.0, 0.0, 0)
        middle = median(held)
        return cls(float(middle), float(median(abs(each - middle) for each in held)), len(held))

    @property
    def error(self) -> float:
        """The standard error of the median."""
        return self.mad * TO_SIGMA * _OF_MEDIAN / sqrt(self.count) if self.count else 0.0

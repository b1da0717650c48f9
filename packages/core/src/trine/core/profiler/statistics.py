"""Mean, deviation and extremes of named values, one value at a time."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping

__all__ = ["DictSummary"]


class _Moments:
    """Of one name. The deviation is kept as Welford does (Technometrics 4, 1962).

    The mean of the squares less the square of the mean would lose every digit, and can
    come out negative, when a name's times hardly differ.
    """

    __slots__ = ("count", "maximum", "mean", "minimum", "squares")

    def __init__(self) -> None:
        self.count = 0
        self.mean = 0.0
        self.squares = 0.0
        self.minimum = math.inf
        self.maximum = -math.inf

    def add(self, value: float) -> None:
        self.count += 1
        distance = value - self.mean
        self.mean += distance / self.count
        self.squares += distance * (value - self.mean)
        self.minimum = min(self.minimum, value)
        self.maximum = max(self.maximum, value)


class DictSummary:
    """Statistics per name; what `TimeSummary.summary` hands out."""

    def __init__(self) -> None:
        self._moments: dict[str, _Moments] = {}

    def add(self, values: Mapping[str, float]) -> None:
        """Count one further value for each name in `values`."""
        for name, value in values.items():
            moments = self._moments.get(name)
            if moments is None:
                moments = self._moments[name] = _Moments()
            moments.add(float(value))

    def compute_mean(self) -> dict[str, float]:
        """The mean of each name's values."""
        return {name: moments.mean for name, moments in self._moments.items()}

    def make_statistics(self) -> dict[str, float]:
        """The mean under each name, the standard deviation under `name.std`.

        The deviation is that of the values themselves: divided by their number, 0 for one.
        """
        statistics: dict[str, float] = {}
        for name, moments in self._moments.items():
            statistics[name] = moments.mean
            statistics[f"{name}.std"] = math.sqrt(moments.squares / moments.count)
        return statistics

    def extremes(self) -> dict[str, float]:
        """The smallest and largest value, as `name.min` and `name.max`."""
        extremes: dict[str, float] = {}
        for name, moments in self._moments.items():
            extremes[f"{name}.min"] = moments.minimum
            extremes[f"{name}.max"] = moments.maximum
        return extremes

    def copy(self) -> DictSummary:
        """The same statistics, independent of further values."""
        return copy.deepcopy(self)

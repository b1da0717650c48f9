"""The line that runs between points it may not be above and points it may not be below.

That is how far two clocks are apart, as it changes with time, from events that show bounds
for it. Of all lines that keep to the bounds, the one with most room on both sides is taken;
how far others get from it is its error. Clocks are taken to run evenly.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil, sqrt
from typing import Final, overload

import torch
from torch import Tensor

__all__ = ["MAX_SLOPE", "Line", "between"]

MAX_SLOPE: Final = 1e-3  # quartz is good to 1e-4, and time daemons slew by 5e-4
"""How differently two clocks run at most."""

_FAR: Final = (1 << 62) - 1  # 146 years; sums of two such times fit
_GOLDEN: Final = (sqrt(5) - 1) / 2
_ROUNDS: Final = 60  # narrow the slopes to 1e-15
_BINS: Final = 4096


@dataclass(frozen=True)
class Line:
    """What is added to times, as it changes with time.

    Times that no clock shows, which only a damaged or hostile file has, become the nearest
    that can be reckoned with.

    Attributes:
        first_ns: a time.
        at_first_ns: what is added to it.
        slope: by how much more for each later nanosecond.
    """

    first_ns: int = 0
    at_first_ns: int = 0
    slope: float = 0.0

    @overload
    def add_to(self, times_ns: int) -> int: ...
    @overload
    def add_to(self, times_ns: Tensor) -> Tensor: ...
    def add_to(self, times_ns: int | Tensor) -> int | Tensor:
        """The times with it; exact where the slope is 0."""
        times_ns = _within(times_ns, _FAR)
        moved = times_ns + self._offset_ns
        return moved if not self.slope else moved + _share(times_ns - self._since_ns, self.slope)

    @overload
    def take_from(self, times_ns: int) -> int: ...
    @overload
    def take_from(self, times_ns: Tensor) -> Tensor: ...
    def take_from(self, times_ns: int | Tensor) -> int | Tensor:
        """The times without it: undoes `add_to`, to the nanosecond."""
        moved = _within(times_ns, _FAR) - self._offset_ns
        if not self.slope:
            return moved
        return moved - _share(moved - self._since_ns, self.slope / (1 + self.slope))

    @property
    def _offset_ns(self) -> int:
        return _within(self.at_first_ns, _FAR // 2)

    @property
    def _since_ns(self) -> int:
        return _within(self.first_ns, _FAR // 2)


@overload
def _within(times_ns: int, most_ns: int) -> int: ...
@overload
def _within(times_ns: Tensor, most_ns: int) -> Tensor: ...
def _within(times_ns: int | Tensor, most_ns: int) -> int | Tensor:
    if isinstance(times_ns, Tensor):
        return times_ns.clamp(-most_ns, most_ns)
    return max(-most_ns, min(times_ns, most_ns))


@overload
def _share(passed_ns: int, share: float) -> int: ...
@overload
def _share(passed_ns: Tensor, share: float) -> Tensor: ...
def _share(passed_ns: int | Tensor, share: float) -> int | Tensor:
    # Only the small part is a float: 53 bits do not hold a time since 1970.
    if isinstance(passed_ns, Tensor):
        return (passed_ns.double() * share).round().long()
    return round(passed_ns * share)


@dataclass(frozen=True, eq=False)
class _Points:
    """Bounds of a line: it lies below the upper and above the lower ones; float64."""

    upper_at: Tensor
    upper: Tensor
    lower_at: Tensor
    lower: Tensor

    def highest(self, slope: float, at: float = 0.0) -> float:
        """How high a line of that slope may be at a place."""
        return float((self.upper - slope * (self.upper_at - at)).min())

    def lowest(self, slope: float, at: float = 0.0) -> float:
        """How low it may be there."""
        return float((self.lower - slope * (self.lower_at - at)).max())

    def room(self, slope: float) -> float:
        """How far it may be moved; negative if no line of that slope keeps to the bounds."""
        return self.highest(slope) - self.lowest(slope)

    def thinned(self, slope: float, last: float) -> _Points:
        """Only the tightest of each of many stretches of time, if the slope is about right."""
        upper = _tightest(self.upper_at, self.upper - slope * self.upper_at, last)
        lower = _tightest(self.lower_at, slope * self.lower_at - self.lower, last)
        return _Points(
            self.upper_at[upper], self.upper[upper], self.lower_at[lower], self.lower[lower]
        )

    def loosened(self, by: float) -> _Points:
        """The same with room added."""
        return _Points(self.upper_at, self.upper + by, self.lower_at, self.lower - by)


def between(
    upper_at_ns: Tensor, upper_ns: Tensor, lower_at_ns: Tensor, lower_ns: Tensor
) -> tuple[Line, int] | None:
    """A line below the upper and above the lower bounds, and by how much it may be wrong.

    The error holds from the first to the last bound. Where no line keeps to all bounds, it
    includes by how much they contradict each other.

    Args:
        upper_at_ns: times; int64, 1-D.
        upper_ns: what the line is at most at each.
        lower_at_ns: times.
        lower_ns: what it is at least.

    Returns:
        None if there is no bound of one kind.
    """
    if not upper_at_ns.numel() or not lower_at_ns.numel():
        return None
    first = min(int(upper_at_ns.min()), int(lower_at_ns.min()))
    base = int(upper_ns.min())
    every = _Points(
        (upper_at_ns - first).double(),
        (upper_ns - base).double(),
        (lower_at_ns - first).double(),
        (lower_ns - base).double(),
    )
    last = max(float(every.upper_at.max()), float(every.lower_at.max()))
    points, slope = every, 0.0
    for _ in range(2):  # which points are tightest can be told once the slope is about right
        points = every.thinned(slope, last)
        slope = _argmax(points.room, -MAX_SLOPE, MAX_SLOPE)
    slack = max(0.0, -points.room(slope) / 2)
    points = points.loosened(slack)
    height = (points.highest(slope) + points.lowest(slope)) / 2
    steepest = _last_with_room(points, slope, MAX_SLOPE)
    flattest = _last_with_room(points, slope, -MAX_SLOPE)
    error = 0.0
    for at in (0.0, last):
        chosen = height + slope * at
        above = _argmax(lambda slope, at=at: points.highest(slope, at), flattest, steepest)  # type: ignore[misc]
        below = _argmax(lambda slope, at=at: -points.lowest(slope, at), flattest, steepest)  # type: ignore[misc]
        error = max(error, points.highest(above, at) - chosen, chosen - points.lowest(below, at))
    return Line(first, base + round(height), slope), ceil(error + slack) + 1


def _tightest(at: Tensor, values: Tensor, last: float) -> Tensor:
    """A mask of the least value of each of many stretches of time."""
    stretch = (at * (_BINS / max(1.0, last))).long().clamp(max=_BINS - 1)
    least = torch.full((_BINS,), float("inf"), dtype=torch.float64)
    least.scatter_reduce_(0, stretch, values, "amin")
    return values <= least[stretch]


def _argmax(function: Callable[[float], float], low: float, high: float) -> float:
    """Where a concave function is greatest: golden-section search."""
    left, right = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
    at_left, at_right = function(left), function(right)
    for _ in range(_ROUNDS):
        if at_left < at_right:
            low, left, at_left = left, right, at_right
            right = low + _GOLDEN * (high - low)
            at_right = function(right)
        else:
            high, right, at_right = right, left, at_left
            left = high - _GOLDEN * (high - low)
            at_left = function(left)
    return (low + high) / 2


def _last_with_room(points: _Points, slope: float, end: float) -> float:
    """From a slope with room towards another: the last one with room, by halving."""
    if points.room(end) >= 0:
        return end
    for _ in range(_ROUNDS):
        middle = (slope + end) / 2
        if points.room(middle) >= 0:
            slope = middle
        else:
            end = middle
    return slope

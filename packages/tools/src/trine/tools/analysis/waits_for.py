"""Which of several stuck groups is the cause: ranks that wait in one are missing in another."""

from __future__ import annotations

from collections.abc import Mapping, Set

__all__ = ["WaitsFor", "waits_for"]


class WaitsFor:
    """Who waits for whom.

    Attributes:
        because_of: for each group those in which its missing ranks wait.
        order: all groups; first the causes, the earliest first, then their consequences.
        cycle: groups of which each waits for the next and the last for the first; empty if
            every wait has a cause outside such a ring.
    """

    def __init__(self, because_of: dict[str, list[str]], since_ns: Mapping[str, int]) -> None:
        self.because_of = because_of
        explained = _reaching(because_of, {name for name in because_of if not because_of[name]})
        lost = [name for name in because_of if name not in explained]
        self.cycle = _ring(because_of, min(lost, key=since_ns.__getitem__)) if lost else []
        self.order = sorted(
            because_of,
            key=lambda name: (bool(because_of[name]) and name not in self.cycle, since_ns[name]),
        )


def waits_for(
    waiting: Mapping[str, Set[int]], missing: Mapping[str, Set[int]], since_ns: Mapping[str, int]
) -> WaitsFor:
    """Follow the waits from group to group.

    Args:
        waiting: by group the ranks that are in its collective.
        missing: by group the ranks that it waits for.
        since_ns: by group when the first rank came.
    """
    because_of = {
        group: sorted(
            (other for other in waiting if other != group and missing[group] & waiting[other]),
            key=since_ns.__getitem__,
        )
        for group in waiting
    }
    return WaitsFor(because_of, since_ns)


def _reaching(because_of: Mapping[str, list[str]], ends: set[str]) -> set[str]:
    """The groups from which one of the ends can be reached, and the ends."""
    reached = set(ends)
    grown = True
    while grown:
        more = {name for name in because_of if reached.intersection(because_of[name])}
        grown = not more <= reached
        reached |= more
    return reached


def _ring(because_of: Mapping[str, list[str]], start: str) -> list[str]:
    """The ring in which following the first reason ends; every group here has one."""
    walked = [start]
    while (following := because_of[walked[-1]][0]) not in walked:
        walked.append(following)
    return walked[walked.index(following) :]

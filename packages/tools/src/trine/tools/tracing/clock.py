"""Put the clocks of several ranks on one axis: that of the first clock there is.

Ranks of one machine read the same `perf_counter_ns`, so their times compare as they are.
Between machines the best of these is used:

1. readings that the ranks took by ping-pong, at the beginning and at the end: a line through
   the first and the last, for clocks run at slightly different speeds;
2. collectives that they made together, after the fact: none ends anywhere before all have
   begun it, which bounds the distance of two clocks from both sides (`bounds`);
3. the pair of clock readings in their headers, which is as good as their wall clocks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, overload

import torch
from torch import Tensor

from trine.tools.text import format_ns
from trine.tools.tracing.bounds import MAX_SLOPE, Line, between
from trine.tools.tracing.matching import Matched, calls_of, match
from trine.tools.tracing.reader import RankTrace
from trine.tools.tracing.schema import ClockReading, Header

__all__ = ["Alignment", "Clock", "align", "align_clocks"]

How = Literal["same", "readings", "collectives", "wall"]

_UNKNOWN_NS: Final = -1
_FAR: Final = 1 << 62


@dataclass(frozen=True)
class Clock:
    """How one rank's clock relates to the common axis.

    Attributes:
        how: the same clock; by readings, by collectives or by wall clocks.
        line: what is added to its times, as it changes with time.
        error_ns: that is wrong by at most this; -1 if nobody knows.
    """

    how: How
    line: Line
    error_ns: int


@dataclass(frozen=True)
class Alignment:
    """How to bring each rank's times to a common axis.

    Attributes:
        by_rank: what is known of each rank's clock.
        clocks: how many different clocks were aligned.
    """

    by_rank: dict[int, Clock]
    clocks: int

    @property
    def offset_ns(self) -> dict[int, int]:
        """Rank to what is added to its times at the beginning. All zero for one machine."""
        return {rank: clock.line.at_first_ns for rank, clock in self.by_rank.items()}

    @property
    def error_ns(self) -> dict[int, int]:
        """Rank to how far its aligned times may be wrong at most; -1 if nobody knows."""
        return {rank: clock.error_ns for rank, clock in self.by_rank.items()}

    @property
    def drift(self) -> dict[int, float]:
        """Rank to how much slower than the common one its clock runs; 5e-5 is 50 ppm."""
        return {rank: clock.line.slope for rank, clock in self.by_rank.items()}

    @overload
    def to_common(self, rank: int, times_ns: int) -> int: ...
    @overload
    def to_common(self, rank: int, times_ns: Tensor) -> Tensor: ...
    def to_common(self, rank: int, times_ns: int | Tensor) -> int | Tensor:
        """Times of a rank's clock on the common axis."""
        return self.by_rank[rank].line.add_to(times_ns)

    @overload
    def to_rank(self, rank: int, times_ns: int) -> int: ...
    @overload
    def to_rank(self, rank: int, times_ns: Tensor) -> Tensor: ...
    def to_rank(self, rank: int, times_ns: int | Tensor) -> int | Tensor:
        """Times of the common axis by a rank's clock."""
        return self.by_rank[rank].line.take_from(times_ns)

    @property
    def note(self) -> str:
        """One sentence for whoever compares times between ranks."""
        if self.clocks == 1:
            return "All ranks read the same clock; their times compare exactly."
        ways = {clock.how for clock in self.by_rank.values()} - {"same"}
        if "wall" in ways:
            return (
                f"Ranks of {self.clocks} machines, aligned by their wall clocks: times between "
                "machines may be wrong by milliseconds or more."
            )
        error = format_ns(max(self.error_ns.values()))
        by = "clock readings" if ways == {"readings"} else "their collectives"
        return (
            f"Ranks of {self.clocks} machines, aligned by {by}: times between machines are "
            f"wrong by at most {error}."
        )


def align(traces: Sequence[RankTrace]) -> Alignment:
    """How to bring the times of all ranks to the clock of the first one.

    Or to that of rank 0, where ranks have taken readings of it.
    """
    matched = None
    if len({trace.header.clock for trace in traces}) > 1:
        matched = match([calls_of(trace.header.rank, trace.events)[0] for trace in traces])
    return align_clocks(
        [trace.header for trace in traces],
        {trace.header.rank: trace.readings for trace in traces},
        matched,
    )


def align_clocks(
    headers: Sequence[Header],
    readings: Mapping[int, Sequence[ClockReading]],
    matched: Matched | None,
) -> Alignment:
    """The same from what is left of recordings when their events are gone.

    Args:
        headers: of the ranks.
        readings: by rank.
        matched: their collectives, if there is more than one clock.
    """
    # One line per clock, not per rank: each has an error of its own, which would move ranks
    # of one machine against each other.
    ranks: dict[str, list[int]] = {}
    for header in headers:
        ranks.setdefault(header.clock, []).append(header.rank)
    found: dict[str, Clock] = {}
    for clock, own in ranks.items():
        if 0 in own or len(ranks) == 1:  # alone, it is the axis
            found[clock] = Clock("same", Line(), 0)
        elif line := _by_readings([readings.get(rank, ()) for rank in own]):
            found[clock] = line
    if not found and ranks:
        found[next(iter(ranks))] = Clock("same", Line(), 0)
    if matched is not None:
        _by_collectives(found, ranks, matched)
    _by_wall(found, ranks, headers)
    return Alignment({header.rank: found[header.clock] for header in headers}, clocks=len(ranks))


def _by_readings(every: Sequence[Sequence[ClockReading]]) -> Clock | None:
    """The line through the first and the last reading of the rank that read best."""
    usable = [own for own in every if own]
    if not usable:
        return None
    own = min(usable, key=lambda own: max(own[0].error_ns, own[-1].error_ns))
    first, last = own[0], own[-1]
    error_ns = max(first.error_ns, last.error_ns)
    moved_ns, passed_ns = last.offset_ns - first.offset_ns, last.at_ns - first.at_ns
    if abs(moved_ns) <= MAX_SLOPE * passed_ns:
        slope = moved_ns / passed_ns if passed_ns else 0.0
        return Clock("readings", Line(first.at_ns, first.offset_ns, slope), error_ns)
    # Too soon one after the other to show anything but their errors.
    middle = Line(first.at_ns, first.offset_ns + moved_ns // 2)
    return Clock("readings", middle, error_ns + abs(moved_ns))


def _by_collectives(
    found: dict[str, Clock], ranks: Mapping[str, list[int]], matched: Matched
) -> None:
    """Align clocks to those that are aligned, one after the other; added to `found`."""
    row = {rank: at for at, rank in enumerate(matched.ranks)}
    todo = [clock for clock in ranks if clock not in found]
    while todo:
        for clock in todo:
            fit = _fit(clock, found, ranks, matched, row)
            if fit is not None:
                found[clock] = fit
                todo.remove(clock)
                break
        else:
            return


def _fit(
    clock: str,
    found: Mapping[str, Clock],
    ranks: Mapping[str, list[int]],
    matched: Matched,
    row: Mapping[int, int],
) -> Clock | None:
    """A clock by what its ranks did together with those of clocks that are aligned."""
    ours = [row[rank] for rank in ranks[clock]]
    theirs = [(row[rank], found[other].line) for other in found for rank in ranks[other]]
    if not theirs:
        return None
    arrived = matched.arrived_ns[ours].amax(0)
    ended = torch.stack([_shifted(matched.ended_ns[at], Line(), _FAR) for at in ours]).amin(0)
    their_arrived = torch.stack(
        [_shifted(matched.arrived_ns[at], line, -_FAR) for at, line in theirs]
    ).amax(0)
    their_ended = torch.stack(
        [_shifted(matched.ended_ns[at], line, _FAR) for at, line in theirs]
    ).amin(0)
    # Nobody is through before all have come, by whatever clock that is told:
    # our coming + offset <= their end, their coming <= our end + offset.
    upper = matched.synchronizing & (arrived >= 0) & (their_ended < _FAR)
    lower = matched.synchronizing & (their_arrived > -_FAR) & (ended < _FAR)
    fit = between(
        arrived[upper], (their_ended - arrived)[upper], ended[lower], (their_arrived - ended)[lower]
    )
    if fit is None:
        return None
    line, error_ns = fit
    return Clock("collectives", line, error_ns + max(each.error_ns for each in found.values()))


def _shifted(times_ns: Tensor, line: Line, unknown_ns: int) -> Tensor:
    """Times on the common axis, with another value where they are not known."""
    return torch.where(times_ns < 0, unknown_ns, line.add_to(times_ns))


def _by_wall(
    found: dict[str, Clock], ranks: Mapping[str, list[int]], headers: Sequence[Header]
) -> None:
    """Align by wall clocks what is not aligned yet; added to `found`."""
    pairs: dict[str, int] = {}
    for header in headers:
        pairs.setdefault(header.clock, header.unix_ns - header.perf_counter_ns)
    if len(found) == len(ranks):
        return
    reference = next(iter(found))
    for clock in ranks:
        if clock not in found:
            offset_ns = pairs[clock] - pairs[reference] + found[reference].line.at_first_ns
            found[clock] = Clock("wall", Line(0, offset_ns, 0.0), _UNKNOWN_NS)

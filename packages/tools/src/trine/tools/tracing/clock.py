"""Put the clocks of several ranks on one axis.

Ranks of one machine read the same `perf_counter_ns`, so their times compare as they
are. Machines are aligned by the pair of clock readings in their headers, which is as
good as their wall clocks: usually milliseconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trine.tools.tracing.reader import RankTrace

__all__ = ["Alignment", "align"]


@dataclass(frozen=True)
class Alignment:
    """How to bring each rank's times to a common axis.

    Attributes:
        offset_ns: rank to what is added to its times. All zero for one machine.
        clocks: how many different clocks were aligned.
    """

    offset_ns: dict[int, int]
    clocks: int

    @property
    def note(self) -> str:
        """One sentence for whoever compares times between ranks."""
        if self.clocks == 1:
            return "All ranks read the same clock; their times compare exactly."
        return (
            f"Ranks of {self.clocks} machines, aligned by their wall clocks: times between "
            "machines may be wrong by milliseconds or more."
        )


def align(traces: Sequence[RankTrace]) -> Alignment:
    """Offsets that bring the times of all ranks to the clock of the first one."""
    # One pair per clock, not per rank: each reading has an error of its own, which
    # would move ranks of one machine against each other.
    pairs: dict[str, tuple[int, int]] = {}
    for trace in traces:
        header = trace.header
        pairs.setdefault(header.clock, (header.perf_counter_ns, header.unix_ns))
    offsets: dict[int, int] = {}
    for trace in traces:
        perf_ns, unix_ns = pairs[trace.header.clock]
        first_perf_ns, first_unix_ns = next(iter(pairs.values()))
        offsets[trace.header.rank] = (unix_ns - perf_ns) - (first_unix_ns - first_perf_ns)
    return Alignment(offsets, clocks=len(pairs))

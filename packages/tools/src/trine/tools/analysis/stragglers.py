"""Which ranks make the others wait: `find_stragglers`.

Who comes late to a collective may have been held up itself, by waiting for a third rank.
So ranks are compared by their *own time* per step (`own_time`): a rank is *late* by as much
as it took longer for itself than the quicker half of the others did for the same step. It
*stands out* if that is a share of the step worth the trouble, and more than chance makes of
the spread between ranks and between steps; `Threshold` has the numbers. Computing on a busy
machine varies much, loading less: it is enough if what a rank loses in one phase is beyond
chance.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median

import torch
from torch import Tensor

from trine.tools.analysis.arrivals import Arrivals, arrivals
from trine.tools.analysis.breakdown import Look, look_at
from trine.tools.analysis.own_time import OwnTime, own_time
from trine.tools.analysis.spread import TO_SIGMA, Spread
from trine.tools.tracing.reader import RankTrace

__all__ = ["HostLateness", "RankLateness", "Skew", "Stragglers", "Threshold", "find_stragglers"]


@dataclass(frozen=True)
class Threshold:
    """When a rank stands out.

    Attributes:
        min_share: its lateness is at least this share of the step time.
        min_score: and so many times the spread between ranks, and the error that its
            spread over the steps leaves.
        min_steps: fewer steps allow no verdict.
    """

    min_share: float = 0.02
    min_score: float = 5.0
    min_steps: int = 5


@dataclass(frozen=True)
class RankLateness:
    """How late one rank is by itself.

    Attributes:
        rank: the rank.
        host: its machine.
        median_ns: how much longer it took for itself than the others, median of the steps.
        p95_ns: in one step of 20 it was more.
        max_ns: in its worst step.
        share: the median as a share of the step time.
        last_share: in which share of the steps it took longest.
        cost_ns: by how much a step would be shorter, on average, had it been as quick as
            the next.
        phase: where it loses most; "" if it is not late.
        phase_ns: how much it loses there, median of the steps.
        arrives_ns: how long after the first rank it comes to a collective, median, whoever
            held it up; -1 if unknown.
        waits_ns: how long it stands waiting for ranks to come, median of the steps.
        stands_out: whether it is a straggler.
    """

    rank: int
    host: str
    median_ns: float
    p95_ns: float
    max_ns: float
    share: float
    last_share: float
    cost_ns: float
    phase: str
    phase_ns: float
    arrives_ns: float
    waits_ns: float
    stands_out: bool


@dataclass(frozen=True)
class HostLateness:
    """The ranks of one machine.

    Attributes:
        host: its name.
        ranks: how many.
        late: how many of them stand out.
        median_ns: the median of their lateness.
    """

    host: str
    ranks: int
    late: int
    median_ns: float


@dataclass(frozen=True)
class Skew:
    """How far apart ranks come to a collective, by aligned clocks, whoever is the reason.

    Attributes:
        collectives: how many were compared.
        median_ns: from the first rank's coming to the last's.
        p95_ns: in one collective of 20 it was more.
        max_ns: in the worst.
    """

    collectives: int
    median_ns: float
    p95_ns: float
    max_ns: float


@dataclass(frozen=True)
class Stragglers:
    """Who makes the others wait.

    Attributes:
        world_size: how many ranks the job had.
        steps: how many steps all recorded ranks share.
        step_ns: how long one took, median.
        ranks: the latest first.
        hosts: the latest first.
        left_out: ranks that recorded no step.
        skew: of the collectives.
        clock_note: how well times of different ranks compare; only the skew depends on it.
        threshold: when a rank stands out.
    """

    world_size: int
    steps: int
    step_ns: float
    ranks: list[RankLateness]
    hosts: list[HostLateness]
    left_out: list[int]
    skew: Skew
    clock_note: str
    threshold: Threshold = field(default_factory=Threshold)

    @property
    def standing_out(self) -> list[RankLateness]:
        """The stragglers, the latest first."""
        return [rank for rank in self.ranks if rank.stands_out]


def find_stragglers(traces: Iterable[RankTrace], threshold: Threshold | None = None) -> Stragglers:
    """Find the ranks that make others wait.

    Args:
        traces: of the ranks of one run, at least one. Each is done with before the next is
            asked for, so they need not all be in memory.
        threshold: when a rank stands out.
    """
    threshold = threshold or Threshold()
    looks: list[Look] = []
    every: list[OwnTime] = []
    for trace in traces:
        looks.append(look_at(trace))
        every.append(own_time(trace))
        del trace  # before the next one is read
    own = _shared_steps([each for each in every if each.numbers.numel()])
    came = arrivals(looks)
    steps = int(own[0].numbers.numel()) if own else 0
    ranks = _ranks(own, came, threshold) if steps else []
    return Stragglers(
        world_size=looks[0].header.world_size,
        steps=steps,
        step_ns=_step_ns(own) if steps else 0.0,
        ranks=sorted(ranks, key=lambda rank: (-rank.median_ns, rank.rank)),
        hosts=_hosts(ranks),
        left_out=sorted(each.rank for each in every if not each.numbers.numel()),
        skew=_skew(came.skew_ns),
        clock_note=came.note,
        threshold=threshold,
    )


def _shared_steps(own: Sequence[OwnTime]) -> list[OwnTime]:
    """The steps that all ranks recorded."""
    if not own:
        return []
    numbers = own[0].numbers
    for each in own:
        numbers = numbers[torch.isin(numbers, each.numbers)]
    return [each.take(torch.isin(each.numbers, numbers).nonzero().flatten()) for each in own]


def _step_ns(own: Sequence[OwnTime]) -> float:
    return float(torch.stack([each.total_ns for each in own]).double().median())


def _ranks(own: Sequence[OwnTime], came: Arrivals, threshold: Threshold) -> list[RankLateness]:
    own_ns = torch.stack([each.own_ns for each in own])
    late_ns = _lateness(own_ns)
    ahead_ns = _ahead(own_ns)
    medians = late_ns.median(1).values
    phases = {
        name: _lateness(
            torch.stack([each.phases.get(name, torch.zeros_like(each.own_ns)) for each in own])
        )
        for name in dict.fromkeys(name for each in own for name in each.phases)
    }
    lost = torch.stack([late.median(1).values for late in phases.values()])
    worst = lost.argmax(0)
    in_worst = torch.stack(list(phases.values()))[worst, torch.arange(len(own))]
    least_ns = threshold.min_share * _step_ns(own)
    sure = _is_sure(late_ns, 0, threshold) | _is_sure(in_worst, least_ns, threshold)
    stands_out = sure & _is_apart(medians, least_ns, threshold)
    ranks = []
    for row, each in enumerate(own):
        phase = list(phases)[int(worst[row])]
        lost_ns = float(lost[worst[row], row])
        waits = came.waits_ns[each.rank]
        waits_ns = median(waits.get(number, 0) for number in each.numbers.tolist())
        arrives_ns = came.late_ns[each.rank]
        ranks.append(
            RankLateness(
                rank=each.rank,
                host=each.host,
                median_ns=float(medians[row]),
                p95_ns=float(late_ns[row].quantile(0.95)),
                max_ns=float(late_ns[row].max()),
                share=float(medians[row]) / (_step_ns(own) or 1),
                last_share=float((ahead_ns[row] > 0).double().mean()),
                cost_ns=float(ahead_ns[row].clamp(min=0).mean()),
                phase=phase if lost_ns > 0 else "",
                phase_ns=max(0.0, lost_ns),
                arrives_ns=float(arrives_ns.median()) if arrives_ns.numel() else -1.0,
                waits_ns=float(waits_ns),
                stands_out=bool(stands_out[row]),
            )
        )
    return ranks


def _lateness(own_ns: Tensor) -> Tensor:
    """By how much each rank took longer than the quicker half of the others.

    Args:
        own_ns: one row per rank, one column per step.

    Returns:
        The same shape, float64; zeros for a single rank.
    """
    count = own_ns.shape[0]
    if count < 2:
        return torch.zeros(own_ns.shape, dtype=torch.float64)
    # The lower median of the others, so that of four ranks two can be late.
    middle = (count - 2) // 2
    ordered, order = own_ns.sort(0)
    place = order.argsort(0)
    return (own_ns - torch.where(place > middle, ordered[middle], ordered[middle + 1])).double()


def _ahead(own_ns: Tensor) -> Tensor:
    """By how much each rank took longer than the slowest of the others; float64."""
    if own_ns.shape[0] < 2:
        return torch.zeros(own_ns.shape, dtype=torch.float64)
    most, next_most = own_ns.topk(2, dim=0).values
    return (own_ns - torch.where(own_ns == most, next_most, most)).double()


def _is_sure(late_ns: Tensor, least_ns: float, threshold: Threshold) -> Tensor:
    """For which ranks the spread over their steps does not explain the lateness; a mask.

    Args:
        late_ns: one row per rank, one column per step.
        least_ns: the median has to be this at least.
        threshold: how sure one has to be.
    """
    count, steps = late_ns.shape
    if count < 2 or steps < threshold.min_steps:
        return torch.zeros(count, dtype=torch.bool)
    spreads = [Spread.of(row) for row in late_ns]
    return torch.tensor(
        [
            each.median >= max(least_ns, threshold.min_score * each.error) and each.median > 0
            for each in spreads
        ]
    )


def _is_apart(medians: Tensor, least_ns: float, threshold: Threshold) -> Tensor:
    """Which ranks are late by enough, and by more than ranks differ among each other; a mask."""
    # The spread of the quicker half, for the slower one may be all stragglers. Of up to
    # four ranks that is nothing, so those are judged by their steps alone.
    middle = medians.median()
    between = (middle - medians[medians <= middle]).median() * TO_SIGMA
    return (medians >= least_ns) & (medians - middle >= threshold.min_score * between)


def _hosts(ranks: Sequence[RankLateness]) -> list[HostLateness]:
    hosts: dict[str, list[RankLateness]] = {}
    for rank in ranks:
        hosts.setdefault(rank.host, []).append(rank)
    found = [
        HostLateness(
            host=host,
            ranks=len(own),
            late=sum(rank.stands_out for rank in own),
            median_ns=median(rank.median_ns for rank in own),
        )
        for host, own in hosts.items()
    ]
    return sorted(found, key=lambda host: (-host.median_ns, host.host))


def _skew(skew_ns: Tensor) -> Skew:
    if not skew_ns.numel():
        return Skew(0, 0.0, 0.0, 0.0)
    ordered = skew_ns.sort().values
    # By place: `quantile` takes no more than 16 million numbers.
    p95 = ordered[int(0.95 * (ordered.numel() - 1))]
    return Skew(ordered.numel(), float(skew_ns.median()), float(p95), float(ordered[-1]))

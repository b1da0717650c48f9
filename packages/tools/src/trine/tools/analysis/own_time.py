"""How long a rank itself took for each step: without what it stood waiting for.

The time of a step runs from the end of the step before, so that loading a batch counts
wherever it is done. A rank's *own time* is that time without the spans in which its
training thread was blocked by communication. It is a difference of times of one clock, so
it needs no alignment, and who was held up by others does not look slow.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from trine.tools.analysis.intervals import Cover, outermost
from trine.tools.analysis.steps import steps_of, training_thread
from trine.tools.tracing.events import Events
from trine.tools.tracing.reader import RankTrace

__all__ = ["OwnTime", "own_time"]


@dataclass(frozen=True, eq=False)
class OwnTime:
    """A rank's steps.

    Attributes:
        rank: the rank.
        host: its machine.
        numbers: of the steps, ascending.
        total_ns: how long each took; int64, 1-D, one per step.
        own_ns: without the blocked time; the same shape.
        phases: own time by what was done in it, `other` for the rest; they sum to `own_ns`.
    """

    rank: int
    host: str
    numbers: Tensor
    total_ns: Tensor
    own_ns: Tensor
    phases: dict[str, Tensor]

    def take(self, places: Tensor) -> OwnTime:
        """Only the steps at these places."""
        return replace(
            self,
            numbers=self.numbers[places],
            total_ns=self.total_ns[places],
            own_ns=self.own_ns[places],
            phases={name: phase[places] for name, phase in self.phases.items()},
        )


def own_time(trace: RankTrace) -> OwnTime:
    """The own time of a rank per step and phase; no steps if none were recorded."""
    events = trace.events
    spans = events.is_kind("span") & (events.thread == training_thread(events))
    steps = [step for step in steps_of(trace) if step.number >= 0]
    ends = torch.tensor([step.end_ns for step in steps], dtype=torch.int64)
    starts = torch.tensor([step.start_ns for step in steps[:1]], dtype=torch.int64)
    starts = torch.cat([starts, ends[:-1]])
    blocked_at = (spans & events.is_category("comm")).nonzero().flatten()
    blocked = Cover.of(events.start_ns[blocked_at], events.end_ns[blocked_at])
    own_ns = ends - starts - blocked.within(starts, ends)
    phases = {
        name: _within(phase, blocked, starts, ends)
        for name, phase in _phases(events, spans).items()
    }
    phases["other"] = own_ns - sum(phases.values(), torch.zeros_like(own_ns))
    return OwnTime(
        rank=trace.header.rank,
        host=trace.header.host,
        numbers=torch.tensor([step.number for step in steps], dtype=torch.int64),
        total_ns=ends - starts,
        own_ns=own_ns,
        phases=phases,
    )


def _phases(events: Events, spans: Tensor) -> dict[str, Cover]:
    """The outermost pieces of work by name; together they overlap nowhere."""
    work = spans & (events.is_category("compute") | events.is_category("io"))
    inside = events.start_ns[work].sort().values
    # A span of the user's may be a piece of work, or wrap the whole loop.
    user = spans & events.is_category("user")
    leaf = torch.searchsorted(inside, events.end_ns) == torch.searchsorted(inside, events.start_ns)
    places = (work | (user & leaf)).nonzero().flatten()
    places = places[outermost(events.start_ns[places], events.end_ns[places])]
    names = events.name[places]
    return {
        events.texts[name]: Cover.of(
            events.start_ns[places[names == name]], events.end_ns[places[names == name]]
        )
        for name in torch.unique(names).tolist()
    }


def _within(phase: Cover, blocked: Cover, starts_ns: Tensor, ends_ns: Tensor) -> Tensor:
    """How much of a phase was own time in each step."""
    blocked_ns = blocked.within(phase.starts_ns, phase.ends_ns).cumsum(0)

    def before(at_ns: Tensor) -> Tensor:
        covered = phase.before(at_ns)
        if not phase.starts_ns.numel():
            return covered
        # Blocked within the intervals before the moment, and in the one that holds it.
        place = torch.searchsorted(phase.starts_ns, at_ns, right=True) - 1
        held = place.clamp(min=0)
        rest = blocked.within(torch.minimum(at_ns, phase.ends_ns[held]), phase.ends_ns[held])
        return covered - torch.where(place < 0, 0, blocked_ns[held] - rest)

    return before(ends_ns) - before(starts_ns)

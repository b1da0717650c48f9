"""Where a job hangs, from the files that its ranks left: `find_hang`.

Per group it is the first collective on which ranks disagree or to which some did not come.
Where several groups are stuck, ranks that wait in one may keep those of another waiting;
`waits_for` finds out which one is the cause.

What a file lacks is no proof. Its last moments may be missing, so a collective that was
through on one rank counts as begun by all, if its operation allows the conclusion.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

import torch
from torch import Tensor

from trine.tools.analysis.disagreements import differences, elements
from trine.tools.analysis.last_seen import LastSeen, last_seen
from trine.tools.analysis.sequences import GroupCalls, group_calls
from trine.tools.analysis.waits_for import waits_for
from trine.tools.tracing.clock import align
from trine.tools.tracing.matching import SYNCHRONIZING
from trine.tools.tracing.reader import RankTrace

__all__ = ["Call", "Hang", "Stuck", "find_hang"]

Kind = Literal["disagree", "absent", "killed", "unfinished"]

_LONG_NS: Final = 10_000_000_000  # nobody waits so long for a network that works


@dataclass(frozen=True)
class Call:
    """What one rank asked of a collective.

    Attributes:
        rank: the rank.
        operation: what it started; "" if its file does not say.
        unit: full name of the sharded module it did that for.
        dtype: of the elements.
        elements: how many; -1 if the file does not say.
        begun_ns: when, by rank 0's clock.
        through: whether it ended there.
        step: number of the step.
    """

    rank: int
    operation: str
    unit: str
    dtype: str
    elements: int
    begun_ns: int
    through: bool
    step: int


@dataclass(frozen=True)
class Stuck:
    """The collective of one group at which the group stands.

    Attributes:
        group: its name.
        number: which of the group's collectives.
        kind: "disagree": ranks do different things; "absent": some have not come; "killed":
            all have come, and a process was killed before it was through; "unfinished":
            all have come, and it did not end.
        differs: in what ranks disagree: operation, unit, dtype, elements.
        calls: what those asked that came, in the order in which they came.
        absent: the ranks that have not come, or were killed in it, and what they did last.
        no_file: ranks without a file that belong to the group, or may.
        waited_ns: how long the first rank was in it when the recordings ended.
        failed: whether a rank has stopped waiting for it, though it was not through.
        because_of: names of groups in which absent ranks wait themselves.
    """

    group: str
    number: int
    kind: Kind
    differs: list[str]
    calls: list[Call]
    absent: list[LastSeen]
    no_file: list[int]
    waited_ns: int
    failed: bool
    because_of: list[str]


@dataclass(frozen=True)
class Hang:
    """Where a job stands.

    Attributes:
        world_size: how many ranks it had.
        ranks: whose files were read.
        no_file: whose files are not there.
        unreadable: files that cannot be read, and why.
        cut_off: ranks whose files have no end: killed, or still running.
        groups: how many groups made collectives.
        stuck: the groups that do not go on, the cause first.
        under_way: groups in which a collective was under way as the recordings ended, and
            nothing shows that it hung.
        cycle: names of groups that wait for each other, in a ring; empty if they do not.
    """

    world_size: int
    ranks: list[int]
    no_file: list[int]
    unreadable: dict[str, str]
    cut_off: list[int]
    groups: int
    stuck: list[Stuck]
    under_way: list[Stuck]
    cycle: list[str]

    @property
    def hangs(self) -> bool:
        """Whether anything does not go on."""
        return bool(self.stuck)


def find_hang(traces: Sequence[RankTrace], unreadable: Mapping[str, str] | None = None) -> Hang:
    """Find the collective at which a job stands.

    Args:
        traces: what could be read, at least one; files may be cut off, ranks missing.
        unreadable: what could not: names of files, and why.
    """
    world_size = traces[0].header.world_size
    read = [trace.header.rank for trace in traces]
    no_file = sorted(set(range(world_size)) - set(read))
    groups = group_calls(traces)
    job = _Job({trace.header.rank: trace for trace in traces}, no_file, _offsets(traces), groups)
    found = [each for calls in groups if (each := _stuck(calls, job)) is not None]
    chains = waits_for(
        {each.group: {call.rank for call in each.calls if not call.through} for each in found},
        {
            # Who was killed waits for nobody.
            each.group: {seen.rank for seen in each.absent if each.kind == "absent"}
            for each in found
        },
        {each.group: min((call.begun_ns for call in each.calls), default=0) for each in found},
    )
    by_name = {each.group: each for each in found}
    stuck = [replace(by_name[group], because_of=chains.because_of[group]) for group in chains.order]
    findings = [each for each in stuck if _is_finding(each, stuck, job)]
    return Hang(
        world_size=world_size,
        ranks=read,
        no_file=no_file,
        unreadable=dict(unreadable or {}),
        cut_off=[trace.header.rank for trace in traces if trace.end is None],
        groups=len(groups),
        stuck=findings,
        under_way=[each for each in stuck if each not in findings],
        cycle=chains.cycle,
    )


def _offsets(traces: Sequence[RankTrace]) -> dict[int, int]:
    """What is added to each rank's times to get rank 0's; at the end, which is looked at."""
    alignment = align(traces)
    last = {t.header.rank: int(t.events.end_ns.max()) if len(t.events) else 0 for t in traces}
    return {rank: alignment.to_common(rank, at) - at for rank, at in last.items()}


@dataclass(frozen=True, eq=False)
class _Job:
    """What is known of all groups together."""

    traces: Mapping[int, RankTrace]
    no_file: list[int]
    offset_ns: Mapping[int, int]
    groups: Sequence[GroupCalls]

    @property
    def idle(self) -> list[int]:
        """Ranks that made no collective at all, so that nobody knows their groups."""
        return sorted(set(self.traces) - {rank for calls in self.groups for rank in calls.ranks})

    @property
    def all_closed(self) -> bool:
        """Whether every rank has ended its recording by itself, in a program that went on."""
        ends = [trace.end for trace in self.traces.values()]
        return not self.no_file and all(end and end.reason == "closed" for end in ends)

    def last_ns(self) -> int:
        """When the recordings end, by rank 0's clock."""
        return max(
            int(trace.events.end_ns.max()) + self.offset_ns[rank]
            for rank, trace in self.traces.items()
            if len(trace.events)
        )


def _stuck(calls: GroupCalls, job: _Job) -> Stuck | None:
    """Where the group stands, None if all that it began is through."""
    differs = {
        name: wrong for name, wrong in differences(calls, job.traces).items() if bool(wrong.any())
    }
    disagree = torch.zeros_like(calls.numbers, dtype=torch.bool)
    for wrong in differs.values():
        disagree |= wrong
    last = torch.tensor(calls.last)[:, None]
    reached = last >= calls.numbers
    # What was dropped is long over.
    through = (calls.ended >= 0) | (calls.numbers < torch.tensor(calls.known_from)[:, None])
    proven = through.any(0) & _synchronizing(calls)
    outside = _outside(calls, job)
    # A rank without a file came to what is through elsewhere, and to nothing else for sure.
    pending = ~proven & ~(through | ~reached).all(0)
    absent = pending & ((~reached).any(0) | bool(outside))
    whole = pending & ~through.any(0)
    places = (disagree | absent).nonzero().flatten()
    if places.numel():
        at = int(places[0])
        kind: Kind = "disagree" if bool(disagree[at]) else "absent"
    elif bool(whole.any()):
        at = int(whole.nonzero()[0])
        kind = "unfinished"
    else:
        return None
    came = reached[:, at] & (calls.begun[:, at] >= 0)
    made = [_call(calls, row, at, job) for row in came.nonzero().flatten().tolist()]
    made.sort(key=lambda call: (call.begun_ns, call.rank))
    missing = [calls.ranks[row] for row in (~reached[:, at]).nonzero().flatten().tolist()]
    missing = sorted({*missing, *(rank for rank in outside if rank in job.traces)})
    if kind == "unfinished" and (killed := _killed(calls, job)):
        kind, missing = "killed", killed
    return Stuck(
        group=calls.group,
        number=int(calls.numbers[at]),
        kind=kind,
        differs=[name for name, wrong in differs.items() if bool(wrong[at])],
        calls=made,
        absent=[last_seen(job.traces[rank], job.offset_ns[rank]) for rank in missing],
        no_file=[rank for rank in outside if rank not in job.traces],
        waited_ns=max(0, job.last_ns() - made[0].begun_ns) if made else 0,
        failed=bool(((calls.waited[:, at] >= 0) & ~through[:, at]).any()),
        because_of=[],
    )


def _outside(calls: GroupCalls, job: _Job) -> list[int]:
    """Ranks that belong to the group, or may, and never used it."""
    if calls.members is not None:
        known = calls.members & {*job.traces, *job.no_file}
        return sorted(known - set(calls.ranks))
    return sorted({*job.idle, *job.no_file})


def _killed(calls: GroupCalls, job: _Job) -> list[int]:
    """Ranks of the group whose files alone have no end."""
    cut_off = [rank for rank in calls.ranks if job.traces[rank].end is None]
    return cut_off if len(cut_off) < len(calls.ranks) else []


def _is_finding(stuck: Stuck, every: Sequence[Stuck], job: _Job) -> bool:
    """Whether it hangs, or was only under way as the recordings ended."""
    awaited = any(stuck.group in other.because_of for other in every)
    if stuck.kind in ("disagree", "killed") or awaited or stuck.failed:
        return True
    if stuck.kind == "absent" and not job.all_closed:
        return True
    return stuck.waited_ns >= _LONG_NS


def _synchronizing(calls: GroupCalls) -> Tensor:
    """Which numbers cannot end anywhere before all have begun them."""
    known = [place for place, text in enumerate(calls.texts) if text in SYNCHRONIZING]
    return torch.isin(calls.operation, torch.tensor(known, dtype=torch.int64)).any(0)


def _call(calls: GroupCalls, row: int, at: int, job: _Job) -> Call:
    rank = calls.ranks[row]
    events = job.traces[rank].events
    place = int(calls.begun[row, at])
    return Call(
        rank=rank,
        operation=calls.text(calls.operation, row, at),
        unit=calls.text(calls.unit, row, at),
        dtype=calls.text(calls.dtype, row, at),
        elements=elements(events, place),
        begun_ns=int(events.enqueue_ns[place]) + job.offset_ns[rank],
        through=int(calls.ended[row, at]) >= 0,
        step=int(events.step[place]),
    )

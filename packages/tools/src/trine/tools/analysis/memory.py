"""Whose memory it is: what each rank had at its worst moment, and what each unit ever had."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

import torch

from trine.tools.analysis.advice import KINDS, advice
from trine.tools.analysis.memory_series import MemorySeries, memory_series
from trine.tools.text import format_nbytes
from trine.tools.tracing.events import Events
from trine.tools.tracing.reader import RankTrace

__all__ = ["Holder", "MemoryUse", "RankPeak", "UnitMemory", "memory_use"]

_PHASES: Final = {
    "forward": "in forward of {}",
    "awaits_backward": "after forward of {}",
    "backward": "in backward of {}",
    "idle": "at the end of backward of {}",
}
_LARGEST: Final = 3


@dataclass(frozen=True)
class Holder:
    """A part of the memory of a rank.

    Attributes:
        kind: what it is for, such as `activations`.
        unit: full name of the module that it belongs to, "" for none.
        nbytes: how large it is.
    """

    kind: str
    unit: str
    nbytes: float


@dataclass(frozen=True)
class RankPeak:
    """The worst moment of a rank.

    Attributes:
        rank: which.
        nbytes: in all, of what was recorded.
        by_kind: the same by what it is for.
        step: in which it was, -1 if steps were not numbered.
        where: in which phase of which unit, "" if that was not recorded.
        at_ns: when, by the rank's own clock.
        allocated: the most that was allocated in all, if that was recorded.
    """

    rank: int
    nbytes: float
    by_kind: dict[str, float]
    step: int
    where: str
    at_ns: int
    allocated: float | None


@dataclass(frozen=True)
class UnitMemory:
    """What one unit has, on the rank with the highest peak.

    Attributes:
        unit: full name of its module, "" for what belongs to none.
        most: by kind, the most that it had at any moment.
        at_peak: by kind, what it had at the worst moment of the rank.
    """

    unit: str
    most: dict[str, float]
    at_peak: dict[str, float]


@dataclass(frozen=True)
class MemoryUse:
    """The memory of a run.

    Attributes:
        ranks: their worst moments; without those that recorded no memory.
        worst: the rank with the highest peak, whose units are listed; -1 if there is none.
        units: those with the most memory at the peak first.
        largest: the largest parts of the peak.
        explained: where the peak is and what it is made of, in a sentence.
        advice: what would lower it, in a sentence.
        missing: kinds that were not recorded.
    """

    ranks: list[RankPeak] = field(default_factory=list)
    worst: int = -1
    units: list[UnitMemory] = field(default_factory=list)
    largest: list[Holder] = field(default_factory=list)
    explained: str = "No memory was recorded."
    advice: str = ""
    missing: list[str] = field(default_factory=list)


def memory_use(traces: Iterable[RankTrace]) -> MemoryUse:
    """What the ranks' memory was for.

    Args:
        traces: of a run; one at a time is looked at.
    """
    peaks: list[RankPeak] = []
    worst: tuple[RankPeak, MemorySeries, dict[tuple[str, str], float]] | None = None
    for trace in traces:
        series = memory_series(trace.events)
        if not series.total.numel():
            continue
        index = int(series.total.argmax())
        held = series.at(index)
        peak = _peak(trace, series, index, held)
        peaks.append(peak)
        if worst is None or peak.nbytes > worst[0].nbytes:
            worst = peak, series, held
    if worst is None:
        return MemoryUse(missing=list(KINDS))
    peak, series, held = worst
    most = series.most()
    parts = [Holder(kind, unit, nbytes) for (kind, unit), nbytes in held.items() if nbytes]
    parts.sort(key=lambda part: part.nbytes, reverse=True)
    # Buffers of the model are reported by nobody: a run without any is complete.
    seen = {kind for kind, _ in series.holders} | {"replicated"}
    return MemoryUse(
        ranks=peaks,
        worst=peak.rank,
        units=_units(most, held),
        largest=parts[:_LARGEST],
        explained=_explained(peak, parts[:1], len(peaks)),
        advice=advice(peak.by_kind),
        missing=[kind for kind in KINDS if kind not in seen],
    )


def _peak(
    trace: RankTrace, series: MemorySeries, index: int, held: dict[tuple[str, str], float]
) -> RankPeak:
    by_kind: dict[str, float] = defaultdict(float)
    for (kind, _), nbytes in held.items():
        by_kind[kind] += nbytes
    place = int(series.place[index])
    return RankPeak(
        rank=trace.header.rank,
        nbytes=float(series.total[index]),
        by_kind={kind: by_kind[kind] for kind in KINDS if kind in by_kind},
        step=int(trace.events.step[place]),
        where=_where(trace.events, place),
        at_ns=int(trace.events.start_ns[place]),
        allocated=series.allocated,
    )


def _where(events: Events, place: int) -> str:
    """The phase that was reported last before an event."""
    phases = {events.place(name): words for name, words in _PHASES.items()}
    phases.pop(-1, None)
    told = events.is_kind("instant") & events.is_category("compute")
    told &= torch.isin(events.name, torch.tensor(list(phases), dtype=events.name.dtype))
    found = told[:place].nonzero()
    if not found.numel():
        return ""
    last = int(found[-1])
    return phases[int(events.name[last])].format(events.texts[int(events.unit[last])])


def _units(
    most: dict[tuple[str, str], float], held: dict[tuple[str, str], float]
) -> list[UnitMemory]:
    units: dict[str, UnitMemory] = {}
    for (kind, unit), nbytes in most.items():
        found = units.setdefault(unit, UnitMemory(unit, {}, {}))
        found.most[kind] = nbytes
        found.at_peak[kind] = held.get((kind, unit), 0.0)
    return sorted(units.values(), key=lambda each: -sum(each.at_peak.values()))


def _explained(peak: RankPeak, largest: list[Holder], ranks: int) -> str:
    when = [f"in step {peak.step}"] if peak.step >= 0 else []
    when += [peak.where] if peak.where else []
    parts = sorted(peak.by_kind.items(), key=lambda part: -part[1])
    made_of = ", ".join(f"{format_nbytes(n)} {KINDS[kind]}" for kind, n in parts if n)
    rank = f" of rank {peak.rank}" if ranks > 1 else ""
    said = f"The peak{rank} is {format_nbytes(peak.nbytes)}, {', '.join(when) or 'at some time'}: "
    said += made_of or "nothing"
    for part in largest:
        whose = f"the {KINDS[part.kind]} of {part.unit}" if part.unit else f"{KINDS[part.kind]}"
        share = part.nbytes / peak.nbytes
        said += f"; the largest part is {whose}, {format_nbytes(part.nbytes)} ({share:.0%})"
    return f"{said}."

"""Write traces as Chrome trace JSON, for ui.perfetto.dev and chrome://tracing.

One process per rank, one thread of it per lane.

Note [Ranks in order]: Perfetto ignores `process_sort_index` in this format. It draws
processes by falling number of slices, and equal ones under one name in the order in which
they appear. So metadata names all ranks in order, and a rank with fewer slices than a
later one is filled up with instants in a lane of its own. Perfetto takes metadata to be
at time 0 and may look at an event of that time first, which would put its rank in front;
the first event is therefore at 1 us.

Note [Lanes]: lanes are drawn by rising thread number, but a thread whose number is that of
its process comes first.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from trine.tools.errors import TraceFileError
from trine.tools.text import printable
from trine.tools.tracing.aligned import aligned_events, clock_words
from trine.tools.tracing.clock import align
from trine.tools.tracing.events import Events
from trine.tools.tracing.lanes import lanes_of
from trine.tools.tracing.reader import RankTrace
from trine.tools.tracing.schema import KINDS, TEXT_COLUMNS, WELL_KNOWN
from trine.tools.tracing.write import written_beside

__all__ = ["write_timeline"]

Json = dict[str, object]

_FIRST_EVENT_NS: Final = 1_000  # see Note [Ranks in order]
_PART: Final = 1 << 15
_INSTANT: Final = KINDS.index("instant")
_KNOWN: Final = [name for name, column in WELL_KNOWN.items() if column in TEXT_COLUMNS]
_LABEL: Final = ("kind", "name", "category", "unit", *(WELL_KNOWN[name] for name in _KNOWN))
_FURTHER: Final = ("start_ns", "end_ns", "enqueue_ns", "step", "sequence", "nbytes", "args")


def write_timeline(traces: Sequence[RankTrace], out: Path) -> None:
    """Write the timeline of all ranks to one JSON file.

    Args:
        traces: in the order of their ranks, as `read_traces` returns them.
        out: replaced if it exists, once the new file is complete.

    Raises:
        TraceFileError: if it cannot be written.
    """
    about = {
        "format": "trine-timeline",
        "ranks": [trace.header.rank for trace in traces],
        "world_size": traces[0].header.world_size if traces else 0,
        "dropped": sum(trace.dropped for trace in traces),
        "clock": align(traces).note,
    }
    try:
        with written_beside(out) as file:
            head = f'{{"displayTimeUnit":"ms","otherData":{_encode(about)},"traceEvents":['
            file.write(head.encode("ascii"))
            separator = "\n"
            for event in _timeline(traces):
                file.write((separator + event).encode("ascii"))
                separator = ",\n"
            file.write(b"\n]}\n")
    except OSError as error:
        raise TraceFileError(
            f"The timeline cannot be written to {printable(str(out))}: {error.strerror or error}."
        ) from error


def _timeline(traces: Sequence[RankTrace]) -> Iterator[str]:
    alignment = align(traces)
    # Metadata of all ranks first: order of appearance is order on the screen.
    for trace in traces:
        rank = trace.header.rank
        about = trace.header.host, f"pid {trace.header.pid}", clock_words(alignment, rank)
        label = ", ".join(filter(None, about))
        # Perfetto shows a process as its name and number: "rank 0".
        yield _metadata("process_name", rank, name="rank")
        yield _metadata("process_labels", rank, labels=label)
        yield _metadata("process_sort_index", rank, sort_index=rank)
    # Above all ranks, which number the processes and their first threads.
    tids = count(max((trace.header.world_size for trace in traces), default=0))
    each = aligned_events(traces, alignment, _FIRST_EVENT_NS)
    for (trace, events), padding in zip(each, _padding(traces), strict=True):
        yield from _rank_timeline(trace.header.rank, events, padding, tids)


def _rank_timeline(rank: int, events: Events, padding: int, tids: Iterator[int]) -> Iterator[str]:
    for index, lane in enumerate(lanes_of(events)):
        tid = next(tids) if index else rank
        yield from _thread_metadata(lane.label, rank, tid)
        yield from _Lane(events, rank, tid).slices(lane.places)
    # JSON has no word for NaN and infinity, and a curve has no place for them.
    for event in events.where(events.is_kind("counter") & events.value.isfinite()):
        yield _encode(
            {
                "ph": "C",
                "name": f"{event.name} {event.unit}" if event.unit else event.name,
                "cat": event.category,
                "pid": rank,
                "ts": event.start_ns / 1000,
                "args": {"value": event.value},
            }
        )
    if padding:
        tid = next(tids)
        yield from _thread_metadata("filler (keeps ranks in order)", rank, tid)
        for index in range(padding):
            # A nanosecond apart: viewers stack slices of one moment, to a limited depth.
            yield _encode(
                {
                    "ph": "i",
                    "s": "t",
                    "name": "filler",
                    "pid": rank,
                    "tid": tid,
                    "ts": (_FIRST_EVENT_NS + index) / 1000,
                }
            )


def _padding(traces: Sequence[RankTrace]) -> list[int]:
    """How many slices each rank lacks; see Note [Ranks in order]."""
    paddings: list[int] = []
    needed = 0
    for trace in reversed(traces):
        own = int((~trace.events.is_kind("counter")).sum())
        needed = max(needed, own)
        paddings.append(needed - own)
    return paddings[::-1]


class _Lane:
    """The slices of one lane, as JSON.

    There may be millions, most of which differ in their times only: what events of a label
    have in common is encoded once.
    """

    def __init__(self, events: Events, pid: int, tid: int) -> None:
        self._events = events
        self._where = f'"pid":{pid},"tid":{tid}'
        self._labels: dict[tuple[int, ...], tuple[str, Json, str, str]] = {}

    def slices(self, places: Tensor) -> Iterator[str]:
        events = self._events
        columns = [getattr(events, name) for name in (*_LABEL, *_FURTHER)]
        for part in torch.split(places, _PART):
            lists = [column[part].tolist() for column in columns]
            labels = zip(*lists[: len(_LABEL)], strict=True)
            rows = zip(part.tolist(), labels, *lists[len(_LABEL) :], strict=True)
            for place, label, start, end, enqueued, step, sequence, nbytes, further in rows:
                head, known, begin, unit = self._labels.get(label) or self._label(label)
                if further < 0:
                    args = begin
                    if sequence >= 0:
                        args += f'"seq":{sequence},'
                    if enqueued != start:
                        args += f'"enqueue_ns":{enqueued},'
                else:
                    given = dict(known)
                    if sequence >= 0:
                        given["seq"] = sequence
                    if enqueued != start:
                        given["enqueue_ns"] = enqueued
                    given |= events.attributes(place)
                    # Fields of the event count more than attributes of the same name.
                    for name, ours in (("step", True), ("unit", unit), ("nbytes", nbytes)):
                        if ours:
                            given.pop(name, None)
                    args = _encode(given)[1:-1] + "," if given else ""
                lasts = f',"dur":{(end - start) / 1000!r}' if label[0] != _INSTANT else ""
                sent = f',"nbytes":{nbytes}' if nbytes else ""
                yield (
                    f'{head}{start / 1000!r}{lasts},"args":{{{args}"step":{step}{unit}{sent}}}}}'
                )

    def _label(self, label: tuple[int, ...]) -> tuple[str, Json, str, str]:
        """What comes before the time, known attributes, these as JSON, and the unit's."""
        texts = self._events.texts
        kind, name, category, unit, *others = label
        shown = f"{texts[name]} {texts[unit]}" if unit else texts[name]
        shape = '"ph":"i","s":"t"' if kind == _INSTANT else '"ph":"X"'
        head = f'{{{shape},"name":{_encode(shown)},"cat":{_encode(texts[category])}'
        known: Json = {
            key: texts[place] for key, place in zip(_KNOWN, others, strict=True) if place
        }
        begin = _encode(known)[1:-1] + "," if known else ""
        made = (
            f'{head},{self._where},"ts":',
            known,
            begin,
            f',"unit":{_encode(texts[unit])}' if unit else "",
        )
        self._labels[label] = made
        return made


def _metadata(what: str, pid: int, tid: int | None = None, **args: object) -> str:
    where: Json = {"pid": pid} if tid is None else {"pid": pid, "tid": tid}
    return _encode({"ph": "M", "name": what, **where, "args": args})


def _thread_metadata(label: str, pid: int, tid: int) -> Iterator[str]:
    yield _metadata("thread_name", pid, tid, name=label)
    yield _metadata("thread_sort_index", pid, tid, sort_index=tid)


# ASCII output, so a lone surrogate in a name stays an escape and the file stays UTF-8.
_encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode

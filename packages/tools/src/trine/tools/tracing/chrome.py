"""Write traces as Chrome trace JSON, for ui.perfetto.dev and chrome://tracing.

One process per rank. Its first lane is the thread that trains; other threads follow,
then one lane per kind of asynchronous work, or several where such work overlaps.

Note [Ranks in order]: Perfetto ignores `process_sort_index` in this format. It draws
processes by falling number of slices, and equal ones under one name in the order in which
they appear. So metadata names all ranks in order, and a rank with fewer slices than a
later one is filled up with instants in a lane of its own. Perfetto takes metadata to be
at time 0 and may look at an event of that time first, which would put its rank in front;
the first event is therefore at 1 us.

Note [Lanes]: slices of one lane must be nested or apart; the format has no way to say
anything else, and viewers drop what overlaps. Lanes are drawn by rising thread number,
but a thread whose number is that of its process comes first.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Final

from trine.core.tracing import TraceEvent
from trine.tools.errors import TraceFileError
from trine.tools.text import printable
from trine.tools.tracing.clock import align
from trine.tools.tracing.reader import RankTrace
from trine.tools.tracing.write import written_beside

__all__ = ["write_timeline"]

Json = dict[str, object]

_FIRST_ASYNC: Final = ("all_gather", "reduce_scatter")
_FIRST_EVENT_NS: Final = 1_000  # see Note [Ranks in order]


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
                file.write((separator + _encode(event)).encode("ascii"))
                separator = ",\n"
            file.write(b"\n]}\n")
    except OSError as error:
        raise TraceFileError(
            f"The timeline cannot be written to {printable(str(out))}: {error.strerror or error}."
        ) from error


def _timeline(traces: Sequence[RankTrace]) -> Iterator[Json]:
    alignment = align(traces)
    origin_ns = min(
        (
            event.start_ns + alignment.offset_ns[trace.header.rank]
            for trace in traces
            for event in trace.events
        ),
        default=0,
    )
    # Metadata of all ranks first: order of appearance is order on the screen.
    for trace in traces:
        rank = trace.header.rank
        label = f"{trace.header.host}, pid {trace.header.pid}"
        if alignment.clocks > 1:
            label += ", clock aligned by wall clock"
        # Perfetto shows a process as its name and number: "rank 0".
        yield _metadata("process_name", rank, name="rank")
        yield _metadata("process_labels", rank, labels=label)
        yield _metadata("process_sort_index", rank, sort_index=rank)
    # Above all ranks, which number the processes and their first threads.
    tids = count(max((trace.header.world_size for trace in traces), default=0))
    for trace, padding in zip(traces, _padding(traces), strict=True):
        shift_ns = alignment.offset_ns[trace.header.rank] - origin_ns + _FIRST_EVENT_NS
        yield from _rank_timeline(trace, shift_ns, padding, tids)


def _rank_timeline(
    trace: RankTrace, shift_ns: int, padding: int, tids: Iterator[int]
) -> Iterator[Json]:
    rank = trace.header.rank
    threads, asyncs = _by_thread(trace.events), _by_async_name(trace.events)
    lanes: list[tuple[str, list[TraceEvent]]] = []
    for index, events in enumerate(threads):
        label = f"thread {index + 1}" if index else "main"
        lanes += _numbered(label, _lanes(events, nested=True))
    for name, events in asyncs.items():
        lanes += _numbered(name, _lanes(events, nested=False))
    for index, (label, events) in enumerate(lanes):
        tid = next(tids) if index else rank
        yield from _thread_metadata(label, rank, tid)
        for event in events:
            yield _slice(event, rank, tid, shift_ns)
    for event in trace.events:
        # JSON has no word for NaN and infinity, and a curve has no place for them.
        if event.kind == "counter" and math.isfinite(event.value):
            yield {
                "ph": "C",
                "name": _label(event),
                "cat": event.category,
                "pid": rank,
                "ts": (event.start_ns + shift_ns) / 1000,
                "args": {"value": event.value},
            }
    if padding:
        tid = next(tids)
        yield from _thread_metadata("filler (keeps ranks in order)", rank, tid)
        for index in range(padding):
            # A nanosecond apart: viewers stack slices of one moment, to a limited depth.
            yield {
                "ph": "i",
                "s": "t",
                "name": "filler",
                "pid": rank,
                "tid": tid,
                "ts": (_FIRST_EVENT_NS + index) / 1000,
            }


def _padding(traces: Sequence[RankTrace]) -> list[int]:
    """How many slices each rank lacks; see Note [Ranks in order]."""
    paddings: list[int] = []
    needed = 0
    for trace in reversed(traces):
        own = sum(event.kind != "counter" for event in trace.events)
        needed = max(needed, own)
        paddings.append(needed - own)
    return paddings[::-1]


def _by_thread(events: Iterable[TraceEvent]) -> list[list[TraceEvent]]:
    """Spans and instants by the thread that reported them, the one that trains first."""
    threads: dict[int, list[TraceEvent]] = {}
    for event in events:
        if event.kind in ("span", "instant"):
            threads.setdefault(event.thread, []).append(event)
    return sorted(
        threads.values(),
        key=lambda own: (
            not any(event.category == "step" for event in own),
            min(event.start_ns for event in own),
        ),
    )


def _by_async_name(events: Iterable[TraceEvent]) -> dict[str, list[TraceEvent]]:
    names: dict[str, list[TraceEvent]] = {name: [] for name in _FIRST_ASYNC}
    for event in events:
        if event.kind == "async":
            names.setdefault(event.name, []).append(event)
    return {name: own for name, own in names.items() if own}


def _lanes(events: Iterable[TraceEvent], *, nested: bool) -> list[list[TraceEvent]]:
    """Spread events over as few lanes as it takes; see Note [Lanes].

    Args:
        events: of one thread, or of one kind of asynchronous work.
        nested: whether one may lie within another, as calls do.
    """
    lanes: list[list[TraceEvent]] = []
    open_ends: list[list[int]] = []  # per lane, ends of what is open, innermost last
    for event in sorted(events, key=lambda event: (event.start_ns, -event.end_ns)):
        for ends in open_ends:
            while ends and ends[-1] <= event.start_ns:
                ends.pop()
        free = (
            index
            for index, ends in enumerate(open_ends)
            if not ends or (nested and event.end_ns <= ends[-1])
        )
        index = next(free, len(lanes))
        if index == len(lanes):
            lanes.append([])
            open_ends.append([])
        lanes[index].append(event)
        open_ends[index].append(event.end_ns)
    return lanes


def _numbered(label: str, lanes: list[list[TraceEvent]]) -> Iterator[tuple[str, list[TraceEvent]]]:
    for index, lane in enumerate(lanes):
        yield (f"{label} ({index + 1})" if index else label), lane


def _slice(event: TraceEvent, pid: int, tid: int, shift_ns: int) -> Json:
    args: Json = {**(event.args or {}), "step": event.step}
    if event.unit:
        args["unit"] = event.unit
    if event.nbytes:
        args["nbytes"] = event.nbytes
    shape: Json = {"ph": "X"} if event.kind != "instant" else {"ph": "i", "s": "t"}
    shape |= {
        "name": _label(event),
        "cat": event.category,
        "pid": pid,
        "tid": tid,
        "ts": (event.start_ns + shift_ns) / 1000,
    }
    if event.kind != "instant":
        shape["dur"] = (event.end_ns - event.start_ns) / 1000
    shape["args"] = args
    return shape


def _label(event: TraceEvent) -> str:
    return f"{event.name} {event.unit}" if event.unit else event.name


def _metadata(what: str, pid: int, tid: int | None = None, **args: object) -> Json:
    where: Json = {"pid": pid} if tid is None else {"pid": pid, "tid": tid}
    return {"ph": "M", "name": what, **where, "args": args}


def _thread_metadata(label: str, pid: int, tid: int) -> Iterator[Json]:
    yield _metadata("thread_name", pid, tid, name=label)
    yield _metadata("thread_sort_index", pid, tid, sort_index=tid)


# ASCII output, so a lone surrogate in a name stays an escape and the file stays UTF-8.
_encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode

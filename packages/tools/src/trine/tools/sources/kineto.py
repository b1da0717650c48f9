"""Traces of torch.profiler: the Chrome JSON that `export_chrome_trace` writes, one per rank.

Operators and annotations become spans, kernels and copies of a GPU asynchronous work, and
collectives events of the category "comm". What says nothing about time (flows, metadata,
Python frames) is left out. Times are those of the wall clock, in ns since 1970.

gloo says neither group nor number nor bytes, and calls a reduce-scatter an all-reduce. NCCL
says all of it, with its kernels.
"""

from __future__ import annotations

import math
import re
import zlib
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from trine.core.tracing import Kind, TraceEvent
from trine.tools.errors import TraceFileError
from trine.tools.sources.collectives import (
    NBYTES_OF_DTYPE,
    dtype_name,
    operation_name,
    sent_nbytes,
)
from trine.tools.tracing.events import Events
from trine.tools.tracing.reader import RankTrace
from trine.tools.tracing.schema import End, Header

__all__ = ["SEAM", "give_step_numbers", "is_kineto", "kineto_events", "kineto_trace"]

SEAM: Final = "seam"
"""The attribute of spans that the tracing seam shows to torch's profiler: name and unit."""

_PREFIX: Final = "trine::"  # what it puts before their names

_MAX_RANKS: Final = 1 << 20
_MAX_NS: Final = 1 << 62
_SPANS: Final = {"cpu_op": "compute", "cuda_runtime": "user", "cuda_driver": "user"}
_ASYNC: Final = {"kernel": "compute", "gpu_memcpy": "mem", "gpu_memset": "mem"}
_CATEGORY_OF: Final = {
    "step": "step",
    "forward": "compute",
    "backward": "compute",
    "optimizer": "compute",
    "load batch": "io",
    "move batch": "io",
    "copy_out": "mem",
}
_ANNOTATIONS: Final = {
    "Optimizer.step#": ("optimizer", "compute"),
    "Optimizer.zero_grad#": ("zero_grad", "compute"),
    "enumerate(DataLoader)#": ("load batch", "io"),
}
_step_number = re.compile(r"ProfilerStep#(\d{1,18})").fullmatch
_collective = re.compile(r"(gloo|mpi|ucc|xccl|nccl|hccl):(\w+)").fullmatch


def is_kineto(about: Mapping[str, object]) -> bool:
    """Whether what stands beside the events of a Chrome trace is what torch.profiler writes."""
    return not about.keys().isdisjoint(("schemaVersion", "baseTimeNanoseconds"))


def kineto_events(items: Iterable[object], name: str) -> list[TraceEvent]:
    """The events of a trace, by a clock whose base the rest of the file tells.

    Args:
        items: its events as JSON has them.
        name: of the file, for messages.

    Raises:
        TraceFileError: if one is no event.
    """
    found: list[TraceEvent] = []
    memory: dict[bool, list[TraceEvent]] = {False: [], True: []}
    for item in items:
        if not isinstance(item, dict):
            raise TraceFileError(f"{name} has an event that is not an object: {item!r:.40}.")
        phase = item.get("ph")
        if phase == "X" and (event := _work(item)) is not None:
            found.append(event)
        elif phase == "i" and item.get("name") == "[memory]":
            on_device, event = _memory(item)
            if event is not None:
                memory[on_device].append(event)
    # Memory of the host is not what one asks about where there is a device.
    return found + (memory[True] or memory[False])


def kineto_trace(events: list[TraceEvent], about: Mapping[str, object], name: str) -> RankTrace:
    """The recording that a trace of torch.profiler is.

    Args:
        events: of `kineto_events`; changed.
        about: what else stands in the file.
        name: of the file, for messages.

    Raises:
        TraceFileError: if it makes no sense.
    """
    base_ns = _integer(about.get("baseTimeNanoseconds"), _MAX_NS)
    for event in events:
        event.start_ns += base_ns
        event.end_ns += base_ns
        if event.end_ns >= _MAX_NS:
            raise TraceFileError(f"{name} has an event at a time that does not exist.")
    events.sort(key=lambda event: (event.end_ns, -event.start_ns))
    _number_steps(events)
    header = _header(about, events[0].start_ns if events else base_ns, name)
    return RankTrace(header, Events.of(events), end=End(len(events), 0, "closed"))


def _header(about: Mapping[str, object], unix_ns: int, name: str) -> Header:
    said = about.get("distributedInfo")
    world = said if isinstance(said, dict) else {"rank": 0, "world_size": 1}
    rank, world_size = world.get("rank"), world.get("world_size")
    if (
        type(rank) is not int
        or type(world_size) is not int
        or not 0 <= rank < world_size <= _MAX_RANKS
    ):
        raise TraceFileError(
            f"{name} says that it is of rank {rank!r:.40} of {world_size!r:.40}; expected two "
            "whole numbers, the first one smaller."
        )
    host = about.get("host_name")
    host = host if isinstance(host, str) else ""
    return Header(
        rank=rank,
        world_size=world_size,
        host=host,
        clock=f"wall clock of {host or f'rank {rank}'}",
        pid=0,
        python="",
        torch="",
        perf_counter_ns=unix_ns,
        unix_ns=unix_ns,
        environment={"source": "torch.profiler"},
    )


def _work(item: Mapping[str, object]) -> TraceEvent | None:
    """An operator, an annotation or work of a device; None for what is left out."""
    name, said, start_ns = item.get("name"), str(item.get("cat")), _ns(item.get("ts"))
    duration_ns = _ns(item.get("dur", 0))
    if not isinstance(name, str) or start_ns is None or duration_ns is None:
        return None
    end_ns = start_ns + duration_ns
    args = item.get("args")
    args = args if isinstance(args, dict) else {}
    # The seam's spans are operators to torch's profiler.
    if said == "user_annotation" or name.startswith(_PREFIX):
        event = _annotation(name, start_ns, end_ns)
    elif said in _ASYNC:
        if name.lower().startswith("nccl"):
            event = _nccl_kernel(name, args, start_ns, end_ns)
        else:
            event = _event("async", name, _ASYNC[said], start_ns, end_ns)
            event.args = {"stream": _stream(args)}
    elif said in _SPANS:
        event = _event("span", name, _SPANS[said], start_ns, end_ns)
    else:
        return None
    event.thread = _thread(item.get("tid"))
    return event


def _event(kind: Kind, name: str, category: str, start_ns: int, end_ns: int) -> TraceEvent:
    event = TraceEvent(kind, name, category, "", 0, None, start_ns, end_ns)
    event.step = -1  # not that of the process that reads
    return event


def _annotation(name: str, start_ns: int, end_ns: int) -> TraceEvent:
    if step := _step_number(name):
        event = _event("span", "step", "step", start_ns, end_ns)
        event.step = int(step[1])
        return event
    if call := _collective(name):
        operation = operation_name(call[2])
        # NCCL's annotation covers the launch of a kernel, which is an event of its own.
        event = _event("async", operation, "comm", start_ns, end_ns)
        if call[1] == "nccl":
            event = _event("span", f"launch {operation}", "comm", start_ns, end_ns)
        event.args = {"op": operation, "backend": call[1]}
        return event
    if name.startswith(_PREFIX):
        own = name.removeprefix(_PREFIX)
        event = _event("span", own, _CATEGORY_OF.get(own, "user"), start_ns, end_ns)
        event.args = {SEAM: own}
        if own.startswith("wait "):
            _, operation, unit = f"{own} ".split(" ", 2)
            event.name, event.category, event.unit = f"wait {operation}", "comm", unit.strip()
            event.args = {SEAM: own, "op": operation}
        return event
    for prefix, (label, category) in _ANNOTATIONS.items():
        if name.startswith(prefix):
            event = _event("span", label, category, start_ns, end_ns)
            event.args = {"annotation": name}
            return event
    return _event("span", name, "user", start_ns, end_ns)


def _nccl_kernel(name: str, args: Mapping[str, object], start_ns: int, end_ns: int) -> TraceEvent:
    operation = operation_name(str(args.get("Collective name") or "")) or name
    dtype = dtype_name(str(args.get("dtype") or ""))
    about: dict[str, object] = {"op": operation, "backend": "nccl", "stream": _stream(args)}
    if dtype:
        about["dtype"] = dtype
    event = _event("async", operation, "comm", start_ns, end_ns)
    brought = _integer(args.get("In msg nelems"), 1 << 48) * NBYTES_OF_DTYPE.get(dtype, 0)
    event.nbytes = sent_nbytes(operation, brought, _integer(args.get("Group size"), _MAX_RANKS))
    group, number = args.get("Process Group Name"), _integer(args.get("Seq"), _MAX_NS)
    if isinstance(group, str) and number:
        about["group"], about["seq"] = group, number
    event.args = about
    return event


def _memory(item: Mapping[str, object]) -> tuple[bool, TraceEvent | None]:
    """Whether it is memory of a device, and how much there was."""
    args, at_ns = item.get("args"), _ns(item.get("ts"))
    if not isinstance(args, dict) or at_ns is None:
        return False, None
    nbytes = _integer(args.get("Total Allocated"), _MAX_NS)
    event = _event("counter", "memory.allocated", "mem", at_ns, at_ns)
    event.value = float(nbytes)
    event.thread = _thread(item.get("tid"))
    return args.get("Device Type") != 0, event


def _number_steps(events: list[TraceEvent]) -> None:
    """Number the steps, and with them the events.

    torch.profiler numbers its own steps. Where there are only those of the tracing seam, they
    are counted from 0.
    """
    steps = [event for event in events if event.category == "step"]
    steps.sort(key=lambda step: step.start_ns)
    if numbered := [step for step in steps if step.step >= 0]:
        steps = numbered
    else:
        for number, step in enumerate(steps):
            step.step = number
    give_step_numbers(events, steps)


def give_step_numbers(events: Iterable[TraceEvent], steps: Sequence[TraceEvent]) -> None:
    """Give each event the number of the step in which it started, -1 if it did in none.

    Args:
        events: changed.
        steps: in the order of their starts.
    """
    starts = [step.start_ns for step in steps]
    for event in events:
        place = bisect_right(starts, event.start_ns) - 1
        within = place >= 0 and event.start_ns < steps[place].end_ns
        event.step = steps[place].step if within else -1


def _thread(tid: object) -> int:
    if type(tid) is int:
        return tid & (_MAX_NS - 1)
    return zlib.crc32(str(tid).encode("utf-8", "replace"))


def _stream(args: Mapping[str, object]) -> str:
    return f"{args.get('device', '?')!s:.20}:{args.get('stream', '?')!s:.20}"


def _ns(us: object) -> int | None:
    """Microseconds as ns, None for what is none."""
    if type(us) not in (int, float) or not isinstance(us, int | float):
        return None
    ns = us * 1000 if isinstance(us, int) or math.isfinite(us) else -1
    return round(ns) if 0 <= ns < _MAX_NS else None


def _integer(value: object, end: int) -> int:
    """A number from 0 on and below `end`; 0 for everything else."""
    return value if type(value) is int and 0 <= value < end else 0

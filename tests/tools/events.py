"""Hand-made events and traces, in microseconds so that sums are seen at a glance."""

from __future__ import annotations

from pathlib import Path

from trine.core.tracing import Attributes, Kind, TraceEvent
from trine.tools.tracing import Events, Header, RankTrace, Recorder

US = 1_000

MAIN_THREAD = 7001


def event(
    name: str,
    start_us: int,
    end_us: int | None = None,
    *,
    kind: Kind = "span",
    category: str = "user",
    unit: str = "",
    nbytes: int = 0,
    args: Attributes | None = None,
    step: int = 0,
    thread: int = MAIN_THREAD,
    value: float = 0.0,
) -> TraceEvent:
    """One event; a point in time if it has no end."""
    end_us = start_us if end_us is None else end_us
    made = TraceEvent(kind, name, category, unit, nbytes, args, start_us * US, end_us * US, value)
    made.step = step
    made.thread = thread
    return made


def step(start_us: int, end_us: int, number: int = 0) -> TraceEvent:
    """The span of one training step."""
    return event("step", start_us, end_us, category="step", step=number)


def comm(
    name: str, unit: str, start_us: int, end_us: int, *, nbytes: int = 0, exposed_us: int = 0
) -> TraceEvent:
    """A collective as the engine reports it."""
    return event(
        name,
        start_us,
        end_us,
        kind="async",
        category="comm",
        unit=unit,
        nbytes=nbytes,
        args={"exposed_ns": exposed_us * US, "backend": "gloo", "dtype": "float32"},
    )


def rank_trace(
    *events: TraceEvent,
    rank: int = 0,
    world_size: int = 1,
    clock: str = "clock of host-a",
    host: str = "host-a",
    perf_counter_ns: int = 0,
    unix_ns: int = 0,
    dropped: int = 0,
) -> RankTrace:
    """What reading one rank's file gives."""
    header = Header(
        rank=rank,
        world_size=world_size,
        host=host,
        clock=clock,
        pid=4000 + rank,
        python="3.11.7",
        torch="2.13.0",
        perf_counter_ns=perf_counter_ns,
        unix_ns=unix_ns,
    )
    return RankTrace(header, Events.of(events), dropped)


def write_rank_file(
    directory: Path, *events: TraceEvent, rank: int = 0, world_size: int = 1
) -> Path:
    """The file that a recorder of that rank writes for these events."""
    recorder = Recorder(directory, rank=rank, world_size=world_size)
    for made in events:
        recorder.record(made)
    return recorder.close()

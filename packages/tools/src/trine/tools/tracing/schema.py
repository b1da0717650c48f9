"""What a recording says about each event and about itself: the schema, version 2.

Numbers are integers: times in nanoseconds of the rank's own `perf_counter_ns` clock, sizes
in bytes. Texts are names. How they lie in a file is up to `rank_file`, how they lie in
memory up to `events`.

An event's id is its place in the recording, counted from 0; its parent is not stored but
follows from how the spans of a thread lie within each other (`Events.parents`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Literal, get_args

import torch

from trine.core.tracing import Kind

__all__ = [
    "CATEGORIES",
    "COLUMNS",
    "DTYPES",
    "KINDS",
    "LABEL",
    "REASONS",
    "STORED",
    "TEXT_COLUMNS",
    "VERSION",
    "WELL_KNOWN",
    "ClockReading",
    "End",
    "Header",
    "Reason",
]

VERSION: Final = 2
"""Raised by every change after which an older reader would read something else."""

KINDS: Final[tuple[str, ...]] = get_args(Kind)
CATEGORIES: Final = ("step", "compute", "comm", "mem", "io", "user")

COLUMNS: Final[dict[str, str]] = {
    "kind": "B",
    "name": "i",
    "category": "i",
    "unit": "i",
    "group": "i",
    "operation": "i",
    "dtype": "i",
    "backend": "i",
    "stream": "i",
    "thread": "i",
    "args": "i",
    "step": "q",
    "sequence": "q",
    "nbytes": "q",
    "enqueue_ns": "q",
    "start_ns": "q",
    "end_ns": "q",
    "value": "d",
}
"""The fields of an event and the type code (of `array`) of each."""

TEXT_COLUMNS: Final = (
    "name",
    "category",
    "unit",
    "group",
    "operation",
    "dtype",
    "backend",
    "stream",
)
"""Those that hold the place of a text in the recording's table of texts."""

LABEL: Final = ("kind", *TEXT_COLUMNS, "thread")
"""Those in which few of a recording's events differ; each combination is stored once."""

STORED: Final[dict[str, str]] = {
    "step": "q",
    "sequence": "q",
    "nbytes": "q",
    "enqueue_ns": "q",
    "start_ns": "q",
    "end_ns": "q",
    "value": "d",
    "label": "i",
    "args": "i",
}
"""What is stored for each event, in this order: the place of its label, and the others."""

DTYPES: Final = {"B": torch.uint8, "i": torch.int32, "q": torch.int64, "d": torch.float64}

WELL_KNOWN: Final = {
    "group": "group",
    "op": "operation",
    "dtype": "dtype",
    "backend": "backend",
    "stream": "stream",
    "seq": "sequence",
    "enqueue_ns": "enqueue_ns",
}
"""Attributes of a `TraceEvent` that have a field of their own, and which."""

Reason = Literal["closed", "signal", "exit"]
REASONS: Final[tuple[Reason, ...]] = get_args(Reason)


@dataclass(frozen=True)
class Header:
    """Where and when one rank's events were recorded.

    Attributes:
        rank: the rank that recorded.
        world_size: how many ranks took part.
        host: name of its machine.
        clock: two ranks with the same text here read the same `perf_counter_ns` clock.
        pid: its process.
        python: version of its interpreter.
        torch: version of its torch.
        perf_counter_ns: reading of the events' clock, taken together with `unix_ns`.
        unix_ns: reading of the wall clock, in ns since 1970.
        environment: what else may explain the numbers: platform, cores, settings.
    """

    rank: int
    world_size: int
    host: str
    clock: str
    pid: int
    python: str
    torch: str
    perf_counter_ns: int
    unix_ns: int
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class ClockReading:
    """How far this rank's clock was from rank 0's at one moment, measured by ping-pong.

    Attributes:
        at_ns: the moment, by this rank's clock.
        offset_ns: what is added to this rank's times to get rank 0's.
        error_ns: the offset is wrong by at most this.
    """

    at_ns: int
    offset_ns: int
    error_ns: int


@dataclass(frozen=True)
class End:
    """How a recording ended. A file without one is of a process that was killed.

    Attributes:
        events: how many events the file holds.
        dropped: how many were reported but did not fit.
        reason: closed by its owner, by a signal, or as the interpreter ended.
    """

    events: int
    dropped: int
    reason: Reason

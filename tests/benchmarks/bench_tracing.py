"""What a call site of the tracing seam costs, next to torch.profiler.record_function.

Run as `python tests/benchmarks/bench_tracing.py`. Every round runs every row once, so
load from elsewhere falls on all rows alike; the cost of the empty loop is measured in the
same rounds and taken off. Garbage collection stays on, as it is in training.
"""

from __future__ import annotations

import argparse
import functools
import gc
import os
import platform
import shutil
import statistics
import tempfile
import time
import timeit
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

# torch's profiler announces each start and stop on stderr unless told to be quiet.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from trine.core import tracing
from trine.core.tracing import TraceEvent
from trine.tools.tracing import Recorder
from trine.tools.tracing.rank_file import Encoder


class BoundedSink:
    """The least that a recorder can be: one append to a bounded queue."""

    def __init__(self) -> None:
        self.events: deque[TraceEvent] = deque(maxlen=100_000)
        self.record = self.events.append


# One for all rounds: it is full after a few of them, as in any long run. Before that, each
# event costs fresh memory and, every now and then, a full garbage collection.
SINK = BoundedSink()


@contextmanager
def listening() -> Iterator[None]:
    """A sink is installed."""
    tracing.add_sink(SINK)
    try:
        yield
    finally:
        tracing.remove_sink(SINK)


@contextmanager
def recording() -> Iterator[None]:
    """trine-tools records to a file; its thread writes meanwhile."""
    recorder = the_recorder()
    tracing.add_sink(recorder)
    try:
        yield
    finally:
        tracing.remove_sink(recorder)
        time.sleep(0.4)  # what it has left to write must not fall on the next row


@functools.cache
def the_recorder() -> Recorder:
    """One for all rounds, for the same reason as SINK."""
    return Recorder(Path(tempfile.mkdtemp()), rank=0, world_size=1)


def profiling() -> AbstractContextManager[object]:
    """torch's profiler runs."""
    return profile(activities=[ProfilerActivity.CPU])


def quiet() -> AbstractContextManager[object]:
    """Nobody listens."""
    return nullcontext()


@dataclass
class Row:
    """One kind of call site, and its times in nanoseconds per execution, one per round."""

    label: str
    statement: str
    listener: str = "nobody"
    limit_ns: int | None = None
    calls: int = 20_000
    per: int = 1  # executions of the call site that one statement stands for
    times_ns: list[float] = field(default_factory=list)


LISTENERS = {
    "nobody": quiet,
    "a sink": listening,
    "the recorder": recording,
    "torch's profiler": profiling,
}

SPAN = "with span('forward', category='compute'): pass"
TORCHS = "with record_function('forward'): pass"


def rows() -> list[Row]:
    """What is measured. The first row is the empty loop that all others contain."""
    # The profiler keeps all it sees until it stops, hence fewer calls there.
    return [
        Row("empty loop", "pass"),
        Row("guarded site", "if tracing.enabled: tracing.instant('saved')", limit_ns=15),
        Row("span", SPAN, limit_ns=200),
        Row("span", SPAN, listener="a sink", limit_ns=600),
        Row("span", SPAN, listener="the recorder", limit_ns=600),
        Row("event written", "encoder.events(EVENTS, 0)", limit_ns=1_000, calls=20, per=512),
        Row("span", SPAN, listener="torch's profiler", calls=2_000),
        Row("record_function", TORCHS, calls=5_000),
        Row("record_function", TORCHS, listener="torch's profiler", calls=2_000),
    ]


def some_events(count: int) -> list[TraceEvent]:
    """Events as a sharded model reports them: every fourth one of a collective."""
    about = {"group": "0", "op": "all_gather", "dtype": "float32", "backend": "gloo"}
    return [
        TraceEvent("span", "forward", "compute", f"blocks.{n % 32}", 0, None, n, n + 5)
        if n % 4
        else TraceEvent(
            "async",
            "all_gather",
            "comm",
            f"blocks.{n % 32}",
            4096,
            {**about, "seq": n, "enqueue_ns": n, "exposed_ns": 3},
            n + 1,
            n + 5,
        )
        for n in range(count)
    ]


def measure(table: list[Row], rounds: int) -> None:
    """Fill in the times, one round of all rows after another."""
    names = {
        "tracing": tracing,
        "span": tracing.span,
        "record_function": record_function,
        "encoder": Encoder(),
        "EVENTS": some_events(512),
    }
    with profiling():
        pass  # its first start loads what it needs
    for _ in range(rounds):
        for row in table:
            timer = timeit.Timer(row.statement, setup=gc.enable, globals=names)
            with LISTENERS[row.listener]():
                row.times_ns.append(timer.timeit(row.calls) / row.calls / row.per * 1e9)


def print_table(table: list[Row]) -> None:
    """Print least and median times with the empty loop taken off, next to the limits."""
    loop, *sites = table
    line = "{:<17}{:<18}{:>9}{:>11}{:>11}   {}"
    print(line.format("call site", "who listens", "min ns", "median ns", "limit ns", ""))
    for row in sites:
        least = min(row.times_ns) - min(loop.times_ns)
        median = statistics.median(row.times_ns) - statistics.median(loop.times_ns)
        limit, verdict = "-", ""
        if row.limit_ns is not None:
            limit = str(row.limit_ns)
            verdict = "within" if median <= row.limit_ns else "over"
        print(
            line.format(
                row.label, row.listener, f"{least:.1f}", f"{median:.1f}", limit, verdict
            ).rstrip()
        )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=30, help="how often each row is run")
    rounds = parser.parse_args().rounds
    table = rows()
    measure(table, rounds)
    shutil.rmtree(the_recorder().close().parent)
    print(f"Python {platform.python_version()}, torch {torch.__version__}, {rounds} rounds")
    print_table(table)


if __name__ == "__main__":
    main()

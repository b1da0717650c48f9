"""A run to look at, made up: a rank that computes slowly, a unit that is slow to gather.

Like the engine, every rank gathers a unit before its forward and backward and scatters gradients
after it, one unit ahead of what it computes. Numbers are milliseconds and mebibytes.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Final

from trine.core.tracing import Kind, TraceEvent
from trine.tools.tracing import End, Events, Header, RankTrace

__all__ = ["SLOW_RANK", "SLOW_UNIT", "example_run"]

SLOW_RANK: Final = 3
SLOW_UNIT: Final = "blocks.5"
UNITS: Final = ("(root)", *(f"blocks.{layer}" for layer in range(8)))


@dataclass
class _Rank:
    rank: int
    at: float = 100.0
    step: int = 0
    events: list[TraceEvent] = field(default_factory=list)

    def report(
        self,
        name: str,
        start: float,
        end: float,
        category: str,
        unit: str = "",
        kind: Kind = "span",
        nbytes: int = 0,
        args: dict[str, object] | None = None,
        value: float = 0.0,
    ) -> None:
        made = TraceEvent(
            kind, name, category, unit, nbytes, args, int(start * 1e6), int(end * 1e6), value
        )
        made.step, made.thread = self.step, 7001
        self.events.append(made)

    def work(self, name: str, length: float, category: str, unit: str = "") -> None:
        self.report(name, self.at, self.at + length, category, unit)
        self.at += length

    def memory(self, kind: str, unit: str, mebibytes: float) -> None:
        name, value = f"memory.{kind}", mebibytes * 2**20
        self.report(name, self.at, self.at, "mem", unit, kind="counter", value=value)


@dataclass
class _Collective:
    operation: str
    unit: str
    sequence: int
    came: dict[int, float]
    end: float


class _Run:
    def __init__(self, ranks: int) -> None:
        self.chance = random.Random(7)
        self.ranks = [_Rank(rank) for rank in range(ranks)]
        self.sequence = 0
        self.link_free = 0.0

    def start(self, operation: str, unit: str) -> _Collective:
        self.sequence += 1
        came = {one.rank: one.at for one in self.ranks}
        took = 6.0 if unit == SLOW_UNIT and operation == "all_gather" else 1.4
        begin = max(self.link_free, *came.values())
        self.link_free = begin + took * self.chance.uniform(0.95, 1.1)
        started = _Collective(operation, unit, self.sequence, came, self.link_free)
        for one in self.ranks:
            args = self.args(started)
            one.report(f"start {operation}", one.at, one.at, "comm", unit, "instant", args=args)
        return started

    def wait(self, started: _Collective) -> None:
        for one in self.ranks:
            came, args = started.came[one.rank], self.args(started)
            one.report(
                started.operation, came, started.end, "comm", started.unit, "async", 12 << 20,
                {**args, "enqueue_ns": int(came * 1e6)},
            )  # fmt: skip
            if started.end > one.at:
                name = f"wait {started.operation}"
                one.report(name, one.at, started.end, "comm", started.unit, args=args)
                one.at = started.end

    @staticmethod
    def args(started: _Collective) -> dict[str, object]:
        return {
            "group": "world",
            "seq": started.sequence,
            "op": started.operation,
            "dtype": "bfloat16",
            "backend": "gloo",
        }

    def compute(self, name: str, unit: str, length: float) -> None:
        for one in self.ranks:
            slow = 1.2 if one.rank == SLOW_RANK else 1.0
            one.work(name, length * slow * self.chance.uniform(0.97, 1.05), "compute", unit)

    def memory(self, kind: str, unit: str, mebibytes: float) -> None:
        for one in self.ranks:
            one.memory(kind, unit, mebibytes)

    def step(self, number: int) -> None:
        begins = {one.rank: one.at for one in self.ranks}
        for one in self.ranks:
            one.step = number
            stalls = number % 20 == 11 and one.rank == 1
            one.work("load batch", 25.0 if stalls else self.chance.uniform(1, 1.6), "io")
        if number == 0:
            for unit in UNITS:
                self.memory("sharded", unit, 16)
                self.memory("optimizer", unit, 32)
        self.phase("forward", UNITS, 3.0)
        self.phase("backward", UNITS[::-1], 5.5)
        for one in self.ranks:
            one.work("optimizer", 3.0, "compute")
            for unit in UNITS:
                one.memory("gradients", unit, 0)
            if number % 20 == 19:
                one.work("checkpoint_save", 14.0, "io")
            one.report("step", begins[one.rank], one.at, "step")

    def phase(self, name: str, units: tuple[str, ...], length: float) -> None:
        begins = {one.rank: one.at for one in self.ranks}
        gathers = {units[0]: self.start("all_gather", units[0])}
        scatter = None
        for unit, ahead in zip(units, (*units[1:], None), strict=True):
            self.wait(gathers[unit])
            self.memory("unsharded", unit, 128)
            if ahead:
                gathers[ahead] = self.start("all_gather", ahead)
            self.compute(name, unit, length)
            self.memory("unsharded", unit, 0)
            self.memory("activations", unit, 90 if name == "forward" else 0)
            if name == "backward":
                self.memory("gradients", unit, 16)
                if scatter:
                    self.wait(scatter)
                scatter = self.start("reduce_scatter", unit)
        if scatter:
            self.wait(scatter)
        for one in self.ranks:
            one.report(name, begins[one.rank], one.at, "compute")


def example_run(ranks: int, steps: int = 50) -> list[RankTrace]:
    """The traces of all ranks, the same each time."""
    run = _Run(ranks)
    for number in range(steps):
        run.step(number)
    return [
        RankTrace(
            _header(one.rank, ranks),
            Events.of(one.events),
            end=End(len(one.events), 0, "closed"),
        )
        for one in run.ranks
    ]


def _header(rank: int, ranks: int) -> Header:
    return Header(
        rank=rank,
        world_size=ranks,
        host="host-a",
        clock="clock of host-a",
        pid=4000 + rank,
        python="3.11.7",
        torch="2.13.0",
        perf_counter_ns=0,
        unix_ns=0,
        environment={"platform": "Linux", "cores": "8"},
    )

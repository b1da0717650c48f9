"""Sinks beside the recorder: what each makes of the events it is sent."""

from __future__ import annotations

import io
import json
import logging
import mmap
import re
import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch.profiler import itt

from trine.core import tracing
from trine.core.tracing import TraceEvent, TraceSink, add_sink, remove_sink, span
from trine.tools.cli import main
from trine.tools.sinks import (
    InMemory,
    JsonLines,
    ResidentMemory,
    SinkError,
    get_sink,
    itt_sink,
    known_sinks,
    nvtx_sink,
    ranges,
    registry,
)
from trine.tools.sinks.ranges import RangeSink


@pytest.fixture(autouse=True)
def no_sink_is_left() -> Iterator[None]:
    yield
    assert tracing.sinks() == ()


class Calls:
    """A profiler that writes down what it is told."""

    def __init__(self) -> None:
        self.made: list[str] = []

    def push(self, label: str, category: str) -> None:
        self.made.append(f"push {label} ({category})")

    def pop(self) -> None:
        self.made.append("pop")

    def mark(self, label: str, category: str) -> None:
        self.made.append(f"mark {label}")


# --- in memory


def test_events_are_kept_while_the_block_runs() -> None:
    with InMemory() as events:
        with span("load batch", category="io"):
            pass
        tracing.counter("queue", 3)
    tracing.instant("later")

    assert [(event.kind, event.name) for event in events] == [
        ("span", "load batch"),
        ("counter", "queue"),
    ]


# --- lines of JSON


def lines_of(out: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.getvalue().splitlines()]


def test_each_event_is_a_line_with_the_names_of_the_schema() -> None:
    out = io.StringIO()
    sink = JsonLines(out)
    add_sink(sink)
    args = {"group": "0", "seq": 7, "op": "all_gather", "enqueue_ns": 9, "exposed_ns": 2}

    tracing.record_span("all_gather", 10, 30, "comm", "layers.0", 64, args)
    tracing.counter("queue", 3.0, "io")
    remove_sink(sink)

    gather, queue = lines_of(out)
    assert gather.pop("thread") > 0
    assert gather == {
        "kind": "async",
        "name": "all_gather",
        "category": "comm",
        "unit": "layers.0",
        "nbytes": 64,
        "step": tracing.current_step(),
        "start_ns": 10,
        "end_ns": 30,
        "group": "0",
        "sequence": 7,
        "operation": "all_gather",
        "enqueue_ns": 9,
        "args": {"exposed_ns": 2},
    }
    assert (queue["kind"], queue["value"]) == ("counter", 3.0)
    assert queue.keys().isdisjoint({"unit", "args", "nbytes"})


def test_what_json_cannot_hold_is_written_as_text(tmp_path: Path) -> None:
    sink = JsonLines(tmp_path / "events.jsonl")
    add_sink(sink)

    tracing.instant("odd \ud800 name", args={"where": tmp_path, "much": float("inf")})
    remove_sink(sink)
    sink.close()

    (line,) = (tmp_path / "events.jsonl").read_text(encoding="ascii").splitlines()
    assert json.loads(line)["args"] == {"where": str(tmp_path), "much": "inf"}


def test_a_full_disk_ends_the_sink_and_not_the_training(
    caplog: pytest.LogCaptureFixture,
) -> None:
    out = io.StringIO()
    add_sink(JsonLines(out))
    out.close()

    with span("forward"):
        ran = True

    assert ran
    assert "JsonLines raised and was removed" in caplog.text


# --- ranges of other profilers


def test_spans_nest_as_ranges_and_instants_are_marks() -> None:
    tool = Calls()
    sink = RangeSink(tool)
    add_sink(sink)

    with span("step", "step"), span("forward", "compute", "layers.0"):
        tracing.instant("start all_gather", "comm", "layers.0")
    remove_sink(sink)

    assert tool.made == [
        "push step (step)",
        "push forward layers.0 (compute)",
        "mark start all_gather layers.0",
        "pop",
        "pop",
    ]


def test_a_span_that_began_before_the_sink_closes_no_range() -> None:
    tool = Calls()
    sink = RangeSink(tool)

    with span("before"):
        add_sink(sink)
        with span("within"):
            pass
    remove_sink(sink)

    assert tool.made == ["push within (user)", "pop"]


def test_a_range_whose_end_went_by_unseen_is_closed_with_the_one_around_it() -> None:
    tool = Calls()
    sink = RangeSink(tool)
    add_sink(sink)

    with span("outer"):
        with span("inner"):
            remove_sink(sink)
            add_sink(InMemory())  # somebody else goes on listening
        add_sink(sink)
    for each in tracing.sinks():
        remove_sink(each)

    assert tool.made == ["push outer (user)", "push inner (user)", "pop", "pop"]


def fake_nvtx(tool: Calls) -> ModuleType:
    """The part of the package nvtx that is used."""

    class Domain:
        def get_event_attributes(self, message: str, category: str, color: str) -> tuple[str, str]:
            assert color
            return message, category

        def push_range(self, attributes: tuple[str, str]) -> None:
            tool.push(*attributes)

        def pop_range(self) -> None:
            tool.pop()

        def mark(self, attributes: tuple[str, str]) -> None:
            tool.mark(*attributes)

    module = ModuleType("nvtx")
    vars(module)["get_domain"] = lambda name: Domain()
    return module


def test_nvtx_gets_ranges_in_a_domain(monkeypatch: pytest.MonkeyPatch) -> None:
    tool = Calls()
    monkeypatch.setitem(sys.modules, "nvtx", fake_nvtx(tool))
    sink = nvtx_sink()
    add_sink(sink)

    with span("forward", "compute"):
        tracing.instant("saved")
    remove_sink(sink)

    assert tool.made == ["push forward (compute)", "mark saved", "pop"]


def test_itt_gets_ranges_through_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    tool = Calls()
    monkeypatch.setattr(itt, "is_available", lambda: True)
    monkeypatch.setattr(itt, "range_push", lambda label: tool.push(label, "torch"))
    monkeypatch.setattr(itt, "range_pop", tool.pop)
    sink = itt_sink()
    add_sink(sink)

    with span("forward", "compute"):
        pass
    remove_sink(sink)

    assert tool.made == ["push forward (torch)", "pop"]


def test_itt_gets_tasks_through_its_own_package(monkeypatch: pytest.MonkeyPatch) -> None:
    tool = Calls()

    class Task:
        def __init__(self, label: str, domain: str) -> None:
            self.label, self.domain = label, domain

        def begin(self) -> None:
            tool.push(self.label, self.domain)

        def end(self) -> None:
            tool.pop()

    ittapi = ModuleType("ittapi")
    vars(ittapi).update(task=Task, domain=lambda name: name)
    monkeypatch.setattr(itt, "is_available", lambda: False)
    monkeypatch.setitem(sys.modules, "ittapi", ittapi)
    sink = itt_sink()
    add_sink(sink)

    with span("forward"):
        tracing.instant("now")
    remove_sink(sink)

    assert tool.made == ["push forward (trine)", "push now (trine)", "pop", "pop"]


@pytest.mark.parametrize(("name", "package"), [("nvtx", "nvtx"), ("itt", "ittapi")])
def test_a_machine_without_the_tool_is_told_once_what_to_install(
    name: str, package: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ranges, "_said", set())
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(itt, "is_available", lambda: False)
    for absent in ("nvtx", "ittapi"):
        monkeypatch.setitem(sys.modules, absent, None)
    caplog.set_level(logging.WARNING)

    for _ in range(2):
        sink = get_sink(name)
        add_sink(sink)
        with span("forward"):
            pass
        remove_sink(sink)

    assert caplog.text.count(f"pip install {package}") == 1


# --- memory


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
def test_the_memory_of_the_process_is_reported_where_spans_end() -> None:
    sampler = ResidentMemory(interval_ns=0)
    held = mmap.mmap(-1, 64 << 20)  # the kernel's own: no allocator keeps it for later
    add_sink(sampler)
    with InMemory() as events:
        with span("forward", "compute"):
            held.write(bytes(64 << 20))
        with span("mine"):
            pass
        full = resident()
        held.close()
        with span("step", "step"):
            pass
        empty = resident()
    remove_sink(sampler)

    counters = [event for event in events if event.kind == "counter"]
    assert [event.name for event in counters] == ["process.resident"] * 2
    # A quarter of the map, because what else the process takes and gives back is not known.
    assert [event.value for event in counters] == [
        pytest.approx(full, abs=16 << 20),
        pytest.approx(empty, abs=16 << 20),
    ]


def resident() -> int:
    """The resident memory of this process in bytes, from where people read it."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    (kib,) = re.findall(r"^VmRSS:\s+(\d+) kB$", status, re.MULTILINE)
    return int(kib) * 1024


def test_looks_at_memory_keep_their_distance() -> None:
    sampler = ResidentMemory(interval_ns=3_600_000_000_000)
    add_sink(sampler)
    with InMemory() as events:
        for _ in range(10):
            with span("forward", "compute"):
                pass
    remove_sink(sampler)

    assert [event.kind for event in events].count("counter") <= 1


# --- by name


def test_an_unknown_name_lists_those_that_are_known() -> None:
    with pytest.raises(SinkError, match="Known are: in_memory, itt, json_lines, memory, nvtx"):
        get_sink("nsys")


def test_options_reach_the_sink(tmp_path: Path) -> None:
    sink = get_sink("json_lines", out=tmp_path / "events.jsonl")

    assert isinstance(sink, JsonLines)
    sink.close()


@pytest.mark.parametrize("options", [{}, {"out": "/no/such/folder/x"}, {"to": 1}])
def test_a_sink_that_cannot_be_made_says_which(options: dict[str, object]) -> None:
    with pytest.raises(SinkError, match=r"The sink 'json_lines' cannot be made\."):
        get_sink("json_lines", **options)


class Theirs:
    """A sink of another package."""

    def record(self, event: TraceEvent) -> None:
        """Take it."""


def bring(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    """Have another package bring a sink."""
    entry = EntryPoint("theirs", value, "trine.sinks")
    monkeypatch.setattr(registry, "entry_points", lambda group: [entry])


def test_other_packages_bring_sinks_by_entry_points(monkeypatch: pytest.MonkeyPatch) -> None:
    bring(monkeypatch, f"{__name__}:Theirs")

    sink: TraceSink = get_sink("theirs")

    assert type(sink).__name__ == "Theirs"
    assert "theirs" in known_sinks()


@pytest.mark.parametrize(
    ("value", "said"),
    [("no.such.module:sink", "ModuleNotFoundError"), ("builtins:dict", "no method record")],
)
def test_a_broken_sink_of_another_package_is_said_to_be_one(
    value: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bring(monkeypatch, value)

    with pytest.raises(SinkError, match=said):
        get_sink("theirs")


def test_the_command_lists_them_all(monkeypatch: pytest.MonkeyPatch) -> None:
    bring(monkeypatch, "some.module:sink")

    printed = CliRunner().invoke(main, ["trace", "sinks"]).output

    assert [line.split()[0] for line in printed.splitlines()] == list(known_sinks())

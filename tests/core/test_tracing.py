"""The tracing seam: what reaches a sink, what reaches torch's profiler, and what silence costs."""

from __future__ import annotations

import logging
import sys
import threading
import timeit
from collections.abc import Iterator
from time import perf_counter_ns

import pytest
import torch
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile, record_function

from trine.core import tracing
from trine.core.tracing import TraceEvent, add_sink, remove_sink, span


class ListSink:
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.events: list[TraceEvent] = []

    def record(self, event: TraceEvent) -> None:
        self.events.append(event)

    @property
    def names(self) -> list[str]:
        return [event.name for event in self.events]


class BrokenSink:
    """Raises whenever it is given something, and counts how often that was."""

    def __init__(self) -> None:
        self.calls = 0

    def record(self, event: TraceEvent) -> None:
        self.calls += 1
        raise RuntimeError("disk full")


@pytest.fixture(autouse=True)
def _quiet_seam() -> Iterator[None]:
    """No sink and no step leaks from one test into the next."""
    yield
    for sink in tracing.sinks():
        remove_sink(sink)
    tracing.set_step(-1)


@pytest.fixture
def sink() -> ListSink:
    """An installed sink."""
    sink = ListSink()
    add_sink(sink)
    return sink


# What an event says.


def test_a_span_reports_its_names_and_the_time_its_block_took(sink: ListSink) -> None:
    args = {"dtype": "float32"}
    tracing.set_step(7)

    before = perf_counter_ns()
    with span("copy in", category="mem", unit="layers.0", nbytes=64, args=args):
        inside = perf_counter_ns()
    after = perf_counter_ns()

    (event,) = sink.events
    assert (event.kind, event.name, event.category) == ("span", "copy in", "mem")
    assert (event.unit, event.nbytes, event.args, event.step) == ("layers.0", 64, args, 7)
    assert event.thread == threading.get_ident()
    assert event.value == 0.0
    assert before <= event.start_ns <= inside <= event.end_ns <= after


def test_a_span_has_modest_defaults(sink: ListSink) -> None:
    with span("work"):
        pass

    (event,) = sink.events
    assert (event.category, event.unit, event.nbytes, event.args) == ("user", "", 0, None)
    assert event.step == -1


def test_nested_spans_are_reported_inner_first_and_lie_within_each_other(sink: ListSink) -> None:
    with span("outer"), span("inner"):
        pass

    inner, outer = sink.events
    assert (inner.name, outer.name) == ("inner", "outer")
    assert outer.start_ns <= inner.start_ns <= inner.end_ns <= outer.end_ns


def test_a_span_left_by_an_exception_is_reported_and_the_exception_goes_on(
    sink: ListSink,
) -> None:
    with pytest.raises(KeyError, match="missing"), span("lookup"):
        raise KeyError("missing")

    assert sink.names == ["lookup"]


def test_a_span_belongs_to_the_step_in_which_it_began(sink: ListSink) -> None:
    tracing.set_step(3)
    with span("step"):
        tracing.set_step(4)

    assert [event.step for event in sink.events] == [3]
    assert tracing.current_step() == 4


def test_work_beside_the_thread_keeps_the_times_it_was_reported_with(sink: ListSink) -> None:
    args = {"exposed_ns": 5}

    tracing.record_span("all_gather", 100, 150, category="comm", unit="a", nbytes=8, args=args)

    (event,) = sink.events
    assert (event.kind, event.name, event.category) == ("async", "all_gather", "comm")
    assert (event.start_ns, event.end_ns) == (100, 150)
    assert (event.unit, event.nbytes, event.args) == ("a", 8, args)


def test_an_instant_is_a_point_in_time(sink: ListSink) -> None:
    before = perf_counter_ns()
    tracing.instant("saved", category="io", unit="a", args={"path": "x"})
    after = perf_counter_ns()

    (event,) = sink.events
    assert (event.kind, event.name, event.category, event.unit) == ("instant", "saved", "io", "a")
    assert event.args == {"path": "x"}
    assert before <= event.start_ns == event.end_ns <= after


def test_a_counter_carries_its_value_as_a_float(sink: ListSink) -> None:
    tracing.counter("allocated", 3, category="mem")

    (event,) = sink.events
    assert (event.kind, event.name, event.category) == ("counter", "allocated", "mem")
    assert event.value == 3.0
    assert isinstance(event.value, float)
    assert event.start_ns == event.end_ns


@pytest.mark.parametrize(
    ("unit", "text"),
    [("", "<async all_gather 50 ns>"), ("layers.0", "<async all_gather layers.0 50 ns>")],
)
def test_an_event_prints_what_a_debugger_wants_to_see(unit: str, text: str) -> None:
    assert repr(TraceEvent("async", "all_gather", "comm", unit, 0, None, 100, 150)) == text


def test_events_of_another_thread_carry_its_identifier(sink: ListSink) -> None:
    identifiers: list[int] = []

    def work() -> None:
        identifiers.append(threading.get_ident())
        with span("load"):
            pass

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()

    assert [event.thread for event in sink.events] == identifiers
    assert identifiers != [threading.get_ident()]


# Who listens.


def test_with_nobody_listening_every_span_is_one_shared_object_that_does_nothing() -> None:
    first, second = span("a"), span("b", nbytes=1)

    assert first is second
    with first as bound:
        assert bound is None


def test_with_nobody_listening_points_and_finished_work_go_nowhere() -> None:
    tracing.record_span("all_gather", 0, 1)
    tracing.instant("saved")
    tracing.counter("allocated", 1)

    late = ListSink()
    add_sink(late)

    assert late.events == []


def test_the_flag_is_true_while_at_least_one_sink_is_installed() -> None:
    first, second = ListSink(), ListSink()
    states = [tracing.enabled]

    for change, sink in [
        (add_sink, first),
        (add_sink, second),
        (remove_sink, first),
        (remove_sink, second),
    ]:
        change(sink)
        states.append(tracing.enabled)

    assert states == [False, True, True, True, False]


def test_every_sink_gets_every_event_in_the_order_of_installation(sink: ListSink) -> None:
    second = ListSink()
    add_sink(second)

    with span("a"):
        pass
    tracing.instant("b")

    assert tracing.sinks() == (sink, second)
    assert sink.names == second.names == ["a", "b"]


def test_a_removed_sink_hears_nothing_more_and_may_be_removed_again(sink: ListSink) -> None:
    with span("open when the sink goes"):
        remove_sink(sink)
    tracing.instant("later")
    remove_sink(sink)

    assert sink.events == []


def test_a_sink_installed_twice_is_refused(sink: ListSink) -> None:
    with pytest.raises(ValueError, match=r"installed already.*Call remove_sink first"):
        add_sink(sink)

    tracing.instant("once")
    assert sink.names == ["once"]


def test_something_that_cannot_record_is_refused() -> None:
    with pytest.raises(TypeError, match=r"list is not a trace sink: it needs a method record"):
        add_sink([])  # type: ignore[arg-type]  # the mistake under test

    assert not tracing.enabled


# A sink that raises.


@pytest.mark.parametrize("report", ["span", "instant"])
def test_a_sink_that_raises_is_removed_and_logged_once_and_the_others_hear_all_once(
    report: str, caplog: pytest.LogCaptureFixture
) -> None:
    before, broken, behind = ListSink(), BrokenSink(), ListSink()
    for each in (before, broken, behind):
        add_sink(each)

    with caplog.at_level(logging.ERROR, logger="trine.core.tracing"):
        for name in ("first", "second"):
            if report == "span":
                with span(name):
                    pass
            else:
                tracing.instant(name)

    assert broken.calls == 1
    assert tracing.sinks() == (before, behind)
    assert before.names == behind.names == ["first", "second"]
    (entry,) = caplog.records
    assert "BrokenSink raised and was removed" in entry.getMessage()
    assert entry.exc_info is not None
    assert "disk full" in str(entry.exc_info[1])


def test_a_sink_that_fails_in_two_threads_at_once_is_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    both_inside = threading.Barrier(2, timeout=30)

    class FailsTogether:
        def record(self, event: TraceEvent) -> None:
            both_inside.wait()
            raise RuntimeError("disk full")

    add_sink(FailsTogether())

    with caplog.at_level(logging.ERROR, logger="trine.core.tracing"):
        threads = [threading.Thread(target=tracing.instant, args=("x",)) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    assert len(caplog.records) == 1
    assert not tracing.enabled


def test_the_last_sink_to_raise_turns_the_flag_off() -> None:
    add_sink(BrokenSink())

    with span("work"):
        pass

    assert not tracing.enabled
    assert span("more") is span("and more")


# torch's profiler.


def profiled(running: profile) -> list[FunctionEvent]:
    """The finished profile's events."""
    events = running.events()  # type: ignore[no-untyped-call]  # torch has no types here
    return list(events)


def profiled_spans(running: profile) -> list[str]:
    """The names of our spans in the finished profile."""
    return [event.name for event in profiled(running) if event.name.startswith("trine::")]


def test_spans_appear_in_torchs_profiler_with_no_sink_installed() -> None:
    with profile(activities=[ProfilerActivity.CPU]) as running:
        with span("forward"):
            torch.ones(2).sum()
        with span("all_gather", unit="layers.0"):
            pass

    assert profiled_spans(running) == ["trine::forward", "trine::all_gather layers.0"]


def test_torchs_profiler_puts_the_operators_of_a_block_inside_its_span() -> None:
    with profile(activities=[ProfilerActivity.CPU]) as running, span("forward"):
        torch.ones(2).sum()

    parents = {e.name: e.cpu_parent.name for e in profiled(running) if e.cpu_parent is not None}
    assert parents["aten::sum"] == "trine::forward"


def test_spans_outside_torchs_profiler_do_not_reach_it_and_cost_no_object() -> None:
    with span("before"):
        pass
    with profile(activities=[ProfilerActivity.CPU]) as running, span("during"):
        pass
    after = span("after")
    with after:
        pass

    assert profiled_spans(running) == ["trine::during"]
    assert after is span("shared")


def test_with_a_sink_and_the_profiler_both_see_the_span(sink: ListSink) -> None:
    with profile(activities=[ProfilerActivity.CPU]) as running, span("step", unit="root"):
        pass

    assert profiled_spans(running) == ["trine::step root"]
    assert [(event.name, event.unit) for event in sink.events] == [("step", "root")]
    assert sink.events[0].end_ns >= sink.events[0].start_ns


def test_an_exception_closes_the_span_in_the_profiler_as_well(sink: ListSink) -> None:
    with profile(activities=[ProfilerActivity.CPU]) as running:
        with pytest.raises(KeyError), span("fails"):
            raise KeyError("x")
        with span("next"):
            pass

    times = {event.name: event.time_range for event in profiled(running)}
    assert times["trine::fails"].end <= times["trine::next"].start
    assert sink.names == ["fails", "next"]


def test_a_span_is_still_reported_if_the_profiler_stops_within_it(sink: ListSink) -> None:
    running = profile(activities=[ProfilerActivity.CPU])
    running.start()
    with span("outlives the profiler"):
        running.stop()

    assert sink.names == ["outlives the profiler"]


# What it costs. Ratios, since nanoseconds belong to one machine: `nox -s bench` prints those.


def cheapest_ns(statements: list[str], calls: int = 2000, rounds: int = 25) -> list[float]:
    """The least time of one execution of each statement, their rounds interleaved.

    Interleaving lets load from elsewhere fall on all of them alike, and the minimum
    over rounds forgets it.
    """
    names = {"tracing": tracing, "span": span, "record_function": record_function}
    timers = [timeit.Timer(text, globals=names) for text in statements]
    tracer = sys.gettrace()
    sys.settrace(None)  # a coverage tracer charges for every Python line, and C code has none
    try:
        times = [[timer.timeit(calls) for timer in timers] for _ in range(rounds)]
    finally:
        sys.settrace(tracer)
    return [min(each) / calls * 1e9 for each in zip(*times, strict=True)]


def test_silence_costs_a_fraction_of_an_unused_record_function() -> None:
    guarded, unguarded, torchs = cheapest_ns(
        [
            "if tracing.enabled: tracing.instant('x')",
            "with span('x'): pass",
            "with record_function('x'): pass",
        ]
    )

    # Measured: about 1/30 of record_function, and 1/12 of span. Both bounds leave a factor
    # of four for other machines, and fail at what they guard against: @contextmanager
    # behind span (a sixth of record_function), a call behind the guard.
    assert unguarded < torchs / 8
    assert guarded < unguarded / 3


def test_recording_a_span_costs_less_than_an_unused_record_function(sink: ListSink) -> None:
    recorded, torchs = cheapest_ns(["with span('x'): pass", "with record_function('x'): pass"])

    # Measured: about 1/10; half is far above noise and below any design with a second
    # object, a dictionary and a lock per span.
    assert recorded < torchs / 2
    assert len(sink.events) == 25 * 2000


def test_a_step_listener_is_told_of_each_step_until_it_is_removed() -> None:
    told: list[int] = []
    tracing.add_step_listener(told.append)

    tracing.set_step(3)
    tracing.set_step(4)
    tracing.remove_step_listener(told.append)
    tracing.set_step(5)

    assert told == [3, 4]


def test_a_step_listener_that_raises_is_removed_and_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(step: int) -> None:
        raise RuntimeError("no")

    tracing.add_step_listener(fail)

    tracing.set_step(1)
    tracing.set_step(2)

    assert tracing.current_step() == 2
    assert caplog.text.count("raised and was removed") == 1


class Told:
    """A sink that is told when spans begin; keeps what it hears, in order."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, str]] = []
        self.begun: list[TraceEvent] = []

    def begin_span(self, event: TraceEvent) -> None:
        self.heard.append(("begin", event.name))
        self.begun.append(event)

    def record(self, event: TraceEvent) -> None:
        assert event.kind != "span" or event is self.begun.pop()
        self.heard.append((event.kind, event.name))


def test_a_span_sink_hears_of_a_span_twice_and_of_the_rest_once() -> None:
    told = Told()
    add_sink(told)

    with span("outer"):
        tracing.instant("now")
        with span("inner"):
            pass
    remove_sink(told)
    with span("later"):
        pass

    assert told.heard == [
        ("begin", "outer"),
        ("instant", "now"),
        ("begin", "inner"),
        ("span", "inner"),
        ("span", "outer"),
    ]


def test_a_span_sink_hears_of_spans_while_torchs_profiler_runs() -> None:
    told = Told()
    add_sink(told)
    try:
        with profile(activities=[ProfilerActivity.CPU]), span("forward"):
            pass
    finally:
        remove_sink(told)

    assert told.heard == [("begin", "forward"), ("span", "forward")]


def test_a_span_sink_that_raises_at_the_beginning_is_removed_and_the_block_runs(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Broken(Told):
        def begin_span(self, event: TraceEvent) -> None:
            raise RuntimeError("no")

    add_sink(Broken())

    with span("forward"):
        ran = True

    assert ran
    assert tracing.sinks() == ()
    assert "Broken raised and was removed" in caplog.text

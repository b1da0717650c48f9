"""The profiler facade: what is counted, under which name, and what reaches the tracing seam."""

from __future__ import annotations

import asyncio
import inspect
import multiprocessing
import sys
import threading
import timeit
from collections.abc import Iterator
from contextlib import AbstractContextManager
from unittest.mock import Mock

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from trine.core import Device, profiler, trace, tracing
from trine.core.profiler import (
    TimeSummary,
    get_time_summary,
    record,
    record_function,
    record_iterable,
    time_summary,
)
from trine.core.runtime import BaseRuntime, runtime_registry
from trine.core.tracing import TraceEvent, add_sink, remove_sink


class ListSink:
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.events: list[TraceEvent] = []

    def record(self, event: TraceEvent) -> None:
        self.events.append(event)


@pytest.fixture(autouse=True)
def _begin_anew() -> Iterator[None]:
    """No sink and no time leaks from one test into the next."""
    with get_time_summary().summary(clear=True):
        pass
    yield
    for sink in tracing.sinks():
        remove_sink(sink)


@pytest.fixture
def sink() -> ListSink:
    """An installed sink."""
    sink = ListSink()
    add_sink(sink)
    return sink


def counted() -> list[str]:
    """The names that this thread's summary has counted, in order."""
    with get_time_summary().summary() as (summary, _):
        return list(summary.compute_mean())


def test_the_public_names_are_those_of_the_original() -> None:
    names = ("record", "record_function", "record_iterable", "TimeSummary", "get_time_summary")

    assert set(names) <= set(profiler.__all__)
    assert list(inspect.signature(record).parameters) == [
        "tag",
        "metric",
        "use_cuda",
        "enable",
        "device",
        "trace",
    ]
    assert list(inspect.signature(record_function).parameters) == [
        "tag",
        "use_cuda",
        "enable",
        "device",
        "trace",
    ]
    assert list(inspect.signature(record_iterable).parameters) == [
        "tag",
        "iter",
        "divide_metric",
        "use_cuda",
        "enable",
        "device",
        "trace",
    ]


# record


def test_record_counts_by_default_the_time_that_the_span_reports(sink: ListSink) -> None:
    with record("load"):
        sum(range(1000))

    (event,) = sink.events
    with get_time_summary().summary() as (summary, _):
        seconds = summary.compute_mean()["load"]
    # The report is inside the span, so it can only be shorter.
    assert 0 < seconds <= (event.end_ns - event.start_ns) / 1e9


def test_record_reports_a_span_of_category_user(sink: ListSink) -> None:
    with record("load"):
        pass

    (event,) = sink.events
    assert (event.kind, event.name, event.category) == ("span", "load", "user")


def test_record_counts_under_its_metric_and_keeps_the_tag_for_the_span(sink: ListSink) -> None:
    with record("load 3", metric="load"):
        pass

    (event,) = sink.events
    assert event.name == "load 3"
    assert event.args == {"arg": "load"}
    assert counted() == ["load"]


def test_without_a_tag_the_place_of_the_call_is_the_name() -> None:
    line = inspect.stack()[0].lineno + 1
    with record(None):
        pass

    place = f"test_profiler:{line}:test_without_a_tag_the_place_of_the_call_is_the_name"
    assert counted() == [place]


def test_not_enabled_means_nothing_counted_and_no_span(sink: ListSink) -> None:
    with record("load", enable=False) as report:
        report.defer()
        report.complete()

    assert (counted(), sink.events) == ([], [])


def test_trace_alone_reports_the_span_and_counts_nothing(sink: ListSink) -> None:
    with record("load", enable=False, trace=True):
        pass

    assert [event.name for event in sink.events] == ["load"]
    assert counted() == []


def test_a_block_that_raises_is_counted_and_its_exception_passes(sink: ListSink) -> None:
    with pytest.raises(KeyError, match="missing"), record("load"):
        raise KeyError("missing")

    assert counted() == ["load"]
    assert [event.name for event in sink.events] == ["load"]


def test_a_deferred_report_counts_when_it_is_completed_and_once() -> None:
    with record("load") as report:
        report.defer()
    before = counted()

    report.complete()
    report.complete()

    with get_time_summary().summary() as (summary, extremes):
        statistics = summary.make_statistics()
    assert before == []
    assert list(statistics) == ["load", "load.std"]
    assert extremes["load.min"] == extremes["load.max"] == statistics["load"]


def test_a_report_completed_inside_its_block_is_not_counted_again_at_the_end() -> None:
    summary = TimeSummary(auto_init=False)

    with summary.report("load") as report:
        report.complete()
        at_once = summary_of(summary)

    assert summary_of(summary) == at_once


def test_torchs_profiler_sees_what_is_recorded() -> None:
    with profile(activities=[ProfilerActivity.CPU]) as profiled, record("my block"):
        torch.ones(2) + 1

    assert any("my block" in event.key for event in profiled.key_averages())


def test_the_runtime_of_the_device_is_told_of_the_block_and_even_if_the_report_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[object] = []

    class Told:
        def __enter__(self) -> None:
            told.append("begin")

        def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
            told.append(kind)

    class OwnToolsRuntime(BaseRuntime):
        @classmethod
        def trace(cls, event_name: str | None, arg: object) -> AbstractContextManager[object]:
            told.append((event_name, arg))
            return Told()

    def no_device(spec: str) -> Device:
        raise_at_event = Mock(spec=Device)
        raise_at_event.event.side_effect = RuntimeError("no event")
        return raise_at_event

    monkeypatch.setattr(
        runtime_registry, "get_runtime_class_for_device_spec", lambda device: OwnToolsRuntime
    )
    monkeypatch.setattr(time_summary, "get_device", no_device)

    with record("load 1", metric="load", device="own"):
        pass
    with pytest.raises(RuntimeError, match="no event"), record("fails", use_cuda=True):
        pass

    assert told == [("load 1", "load"), "begin", None, ("fails", None), "begin", RuntimeError]
    assert counted() == ["load"]


def test_trace_reports_a_span_with_its_argument_and_counts_nothing(sink: ListSink) -> None:
    with trace("load", arg=3, device="cuda:1"):  # the kind chooses the class; no GPU is needed
        pass
    with trace("load"):
        pass

    assert [(event.name, event.args) for event in sink.events] == [
        ("load", {"arg": 3}),
        ("load", None),
    ]
    assert counted() == []


def test_trace_with_nobody_listening_costs_a_few_spans() -> None:
    names = {"trace": trace, "span": tracing.span}
    statements = ["with trace('x'): pass", "with span('x'): pass"]
    timers = [timeit.Timer(text, globals=names) for text in statements]
    tracer = sys.gettrace()
    sys.settrace(None)  # a coverage tracer charges for every Python line
    try:
        rounds = [[timer.timeit(2000) for timer in timers] for _ in range(25)]
    finally:
        sys.settrace(tracer)
    traced, spanned = (min(times) for times in zip(*rounds, strict=True))

    # Measured: 2.7; asking whether the name is a Device before whether it is a string: 7.
    assert not tracing.enabled
    assert traced < spanned * 5


def test_device_time_without_a_device_is_refused_by_name() -> None:
    if torch.cuda.device_count():
        pytest.skip("this machine has a CUDA device")

    with pytest.raises(ValueError, match="CUDA"), record("load", use_cuda=True):
        pass


def test_a_tracer_object_is_refused_with_the_way_to_listen() -> None:
    with pytest.raises(TypeError, match="add_sink"):
        record("load", trace=ListSink())  # type: ignore[arg-type]  # the point of the test


# record_function


def test_a_decorated_function_is_counted_under_its_own_name_at_each_call(sink: ListSink) -> None:
    @record_function(None)
    def double(x: int) -> int:
        """Twice x."""
        return 2 * x

    results = [double(1), double(x=2)]

    assert results == [2, 4]
    assert (double.__name__, double.__doc__) == ("double", "Twice x.")
    assert counted() == ["double"]
    assert [event.name for event in sink.events] == ["double", "double"]


def test_a_decorated_function_takes_the_tag_it_is_given() -> None:
    record_function("twice")(lambda x: 2 * x)(1)

    assert counted() == ["twice"]


def test_a_coroutine_function_is_timed_until_its_result() -> None:
    order: list[str] = []

    @record_function("wait")
    async def wait() -> int:
        order.extend(counted())
        await asyncio.sleep(0)
        order.extend(counted())
        return 3

    assert asyncio.run(wait()) == 3
    assert order == []  # neither when called nor when it was suspended
    assert counted() == ["wait"]


def test_a_generator_function_is_refused_because_its_body_would_not_be_timed() -> None:
    def elements() -> Iterator[int]:
        yield 1

    with pytest.raises(TypeError, match=r"elements is a generator function.*record_iterable"):
        record_function(None)(elements)


# record_iterable


def test_each_pass_of_a_loop_is_a_span_and_all_are_counted_under_one_name(sink: ListSink) -> None:
    elements = list(record_iterable("batch", ["a", "b", "c"]))

    assert elements == ["a", "b", "c"]
    assert [event.name for event in sink.events] == ["batch-0", "batch-1", "batch-2"]
    assert counted() == ["batch"]


def test_the_body_of_the_loop_is_timed_and_not_the_fetch_of_the_element() -> None:
    fetched: list[list[str]] = []

    def source() -> Iterator[int]:
        for i in range(2):
            with record(f"fetch {i}", trace=True):
                fetched.append(counted())
            yield i

    list(record_iterable("body", source()))

    # The body of pass 0 ends before element 1 is fetched.
    assert fetched == [[], ["fetch 0", "body"]]


def test_divided_metrics_count_each_pass_under_its_own_name() -> None:
    list(record_iterable("batch", range(2), divide_metric=True))

    assert counted() == ["batch-0", "batch-1"]


def test_a_loop_that_is_left_early_counts_the_pass_it_was_left_in() -> None:
    for _ in record_iterable("batch", range(10)):
        break

    assert counted() == ["batch"]


def test_a_loop_without_a_tag_is_named_by_its_place() -> None:
    for _ in record_iterable(None, range(1)):
        pass

    (name,) = counted()
    assert name.startswith("test_profiler:")
    assert name.endswith(":test_a_loop_without_a_tag_is_named_by_its_place")


# get_time_summary


def test_a_thread_has_one_summary_and_another_thread_another() -> None:
    found: list[TimeSummary] = []

    thread = threading.Thread(target=lambda: found.append(get_time_summary()))
    thread.start()
    thread.join()

    assert get_time_summary() is get_time_summary()
    assert found[0] is not get_time_summary()


def test_a_forked_process_has_a_summary_of_its_own_unless_it_can_report_here() -> None:
    here = get_time_summary()
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()

    def look() -> None:
        results.put(get_time_summary() is here)

    for prepare in (here.finalize, here.initialize):
        prepare()
        process = context.Process(target=look)
        process.start()
        process.join()
    here.finalize()

    assert [results.get(), results.get()] == [False, True]


def summary_of(summary: TimeSummary) -> dict[str, float]:
    with summary.summary() as (statistics, _):
        return statistics.make_statistics()

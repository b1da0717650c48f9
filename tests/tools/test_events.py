"""Events as columns: what is chosen, found and derived, with answers known by hand."""

from __future__ import annotations

import json
from pathlib import Path
from time import perf_counter

import pytest
import torch

from tests.tools.events import comm, event, step, write_rank_file
from trine.core.tracing import TraceEvent
from trine.tools.tracing import Events, read_rank_file
from trine.tools.tracing.columns import MAX_TABLE_BYTES, MAX_TEXT, ColumnsBuilder
from trine.tools.tracing.rank_file import MAX_HEAD_BYTES, Decoder, Encoder
from trine.tools.tracing.schema import ClockReading, Header


def parents_by_name(*events: TraceEvent) -> dict[str, str | None]:
    found = Events.of(events)
    names = [found[index].name for index in range(len(found))]
    return {
        name: names[parent] if parent >= 0 else None
        for name, parent in zip(names, found.parents().tolist(), strict=True)
    }


def test_columns_hold_what_was_reported() -> None:
    gather = comm("all_gather", "blocks.0", 10, 20, nbytes=4096, exposed_us=5)
    gather.args = {"group": "0", "seq": 7, "op": "all_gather", "enqueue_ns": 9_000, "more": 1}
    loss = event("loss", 30, kind="counter", value=2.5, step=4)

    events = Events.of([gather, loss])

    assert len(events) == 2
    assert events.start_ns.tolist() == [10_000, 30_000]
    assert events.end_ns.tolist() == [20_000, 30_000]
    assert events.enqueue_ns.tolist() == [9_000, 30_000]
    assert events.nbytes.tolist() == [4096, 0]
    assert events.step.tolist() == [0, 4]
    assert events.sequence.tolist() == [7, -1]
    assert events.value.tolist() == [0.0, 2.5]
    assert [events.texts[place] for place in events.operation.tolist()] == ["all_gather", ""]
    assert events.is_kind("counter").tolist() == [False, True]
    assert events.is_category("comm").tolist() == [True, False]
    assert events.attributes(0) == {"more": 1}
    assert events.attributes(1) == {}


def test_a_recording_without_events_has_empty_columns() -> None:
    events = Events.of([])

    assert len(events) == 0
    assert list(events) == []
    assert events.parents().tolist() == []
    assert len(events.where(events.is_kind("span"))) == 0


def test_a_mask_or_places_choose_events_with_all_that_belongs_to_them() -> None:
    events = Events.of(event(f"event {n}", n, args={"number": n}) for n in range(6))

    odd = events.where(torch.tensor([False, True] * 3))
    last_first = events.where(torch.tensor([5, 0]))

    assert [made.args for made in odd] == [{"number": 1}, {"number": 3}, {"number": 5}]
    assert [made.name for made in last_first] == ["event 5", "event 0"]
    assert last_first.attributes(0) == {"number": 5}


def test_no_event_has_the_place_of_a_text_that_is_not_there() -> None:
    events = Events.of([event("x", 1)])

    assert events.place("x") == int(events.name[0])
    assert events.place("y") == -1
    assert events.place("") == 0 == int(events.unit[0])
    assert not events.is_category("comm").any()


def test_a_parent_is_the_innermost_span_around() -> None:
    parents = parents_by_name(
        event("load batch", 0, 10),
        event("layer", 22, 28),
        event("forward", 20, 50),
        event("loss", 60, kind="counter"),
        step(0, 100),
        event("after", 110, 120),
    )

    assert parents == {
        "load batch": "step",
        "layer": "forward",
        "forward": "step",
        "loss": "step",
        "step": None,
        "after": None,
    }


def test_spans_that_touch_are_not_within_each_other() -> None:
    parents = parents_by_name(event("first", 0, 10), event("second", 10, 20))

    assert parents == {"first": None, "second": None}


def test_of_two_spans_with_the_same_times_the_inner_was_reported_first() -> None:
    parents = parents_by_name(event("inner", 0, 10), event("outer", 0, 10))

    assert parents == {"inner": "outer", "outer": None}


def test_a_point_at_the_end_of_a_span_lies_in_it() -> None:
    parents = parents_by_name(event("saved", 10, kind="instant"), event("save", 0, 10))

    assert parents == {"saved": "save", "save": None}


def test_asynchronous_work_has_the_span_that_asked_for_it() -> None:
    gather = comm("all_gather", "b", 60, 90)
    gather.args = {"enqueue_ns": 25_000}

    parents = parents_by_name(event("forward", 20, 50), gather, step(0, 100))

    assert parents == {"forward": "step", "all_gather": "forward", "step": None}


def test_asynchronous_work_is_no_parent() -> None:
    parents = parents_by_name(comm("all_gather", "b", 0, 90), event("layer", 10, 20))

    assert parents["layer"] is None


def test_what_lies_in_two_spans_that_cross_belongs_to_the_later_one() -> None:
    parents = parents_by_name(event("x", 6, 8), event("a", 0, 10), event("b", 5, 15))

    assert parents == {"x": "b", "a": None, "b": None}


def test_threads_do_not_mix() -> None:
    parents = parents_by_name(step(0, 100), event("io", 10, 20, thread=7002))

    assert parents == {"step": None, "io": None}


def test_parents_of_many_crossing_spans_take_no_search() -> None:
    # Each starts within all before it: a search through open ones would take 10^9 steps.
    events = Events.of(event("x", n, 100_000 + n) for n in range(50_000))

    start = perf_counter()
    parents = events.parents()

    assert (parents == -1).all()
    assert perf_counter() - start < 10


def test_a_hundred_thousand_events_are_written_and_read_back(tmp_path: Path) -> None:
    made = [event(f"layer {n % 100}", n, n + 1, nbytes=n, args={"n": n}) for n in range(100_000)]
    path = write_rank_file(tmp_path, *made)

    events = read_rank_file(path).events

    assert len(events) == 100_000
    assert events.nbytes.tolist() == list(range(100_000))
    assert events[77_777].name == "layer 77"
    assert events.attributes(99_999) == {"n": 99_999}
    assert path.stat().st_size < 100_000 * 80  # 64 bytes, and the attributes


def test_runs_share_tables_and_number_attributes_on() -> None:
    builder = ColumnsBuilder()
    runs = [
        builder.run([event("x", n, args={"n": n}), event("y", n), event("x", n, args={"n": -n})])
        for n in range(1, 4)
    ]

    events = Events.join(runs, builder.texts, builder.threads, builder.labels)

    assert [(made.args or {}).get("n") for made in events] == [
        1,
        None,
        -1,
        2,
        None,
        -2,
        3,
        None,
        -3,
    ]
    assert len(builder.labels) == 2  # x and y: attributes of their own make no label


def test_well_known_attributes_of_another_kind_stay_attributes() -> None:
    (made,) = Events.of([event("x", 5, 6, args={"seq": "first", "enqueue_ns": -1, "op": 3})])

    assert made.args == {"op": "3", "seq": "first", "enqueue_ns": -1}


def test_names_that_cannot_be_looked_up_are_kept_as_text() -> None:
    odd = event("x", 1, args={"group": [0, 1], "other": 1})
    odd.name = ["a", "list"]  # type: ignore[assignment]  # what a careless caller does

    (made,) = Events.of([odd])

    assert made.name == "['a', 'list']"
    assert made.args == {"group": "[0, 1]", "other": 1}


def test_attributes_whose_mapping_fails_do_not_lose_the_event() -> None:
    class Broken(dict[str, object]):
        def __iter__(self) -> object:  # type: ignore[override]
            raise RuntimeError("no")

    (made,) = Events.of([event("x", 1, args=Broken(a=1))])

    assert (made.name, made.args) == ("x", None)


def test_a_name_for_every_event_does_not_grow_a_recording_without_bound() -> None:
    builder = ColumnsBuilder()
    long = "n" * (MAX_TEXT - 10)
    for first in range(0, 20_000, 4_000):
        builder.run([event(f"{long}{n}", n) for n in range(first, first + 4_000)])

    names = [builder.texts[label[1]] for label in builder.labels]

    assert sum(len(json.dumps(text)) for text in builder.texts) < MAX_TABLE_BYTES + MAX_TEXT
    assert names[0] == f"{long}0"
    assert names[-1] == "(one of too many names)"


@pytest.mark.parametrize("letter", ["n", "\ud800", "\N{GRINNING FACE}"])
def test_the_longest_names_make_lines_that_are_read(letter: str) -> None:
    encoder, decoder = Encoder(), Decoder()
    header = Header(0, 1, "h", "c", 1, "3", "2", 1, 1)
    long = letter * (MAX_TEXT - 5)
    run = [event(f"{long}{n}", n, unit=f"{n}{long}") for n in range(4_096)]

    record = encoder.events(run, 0)

    line, _, body = record.partition(b"\n")
    assert len(line) < MAX_HEAD_BYTES
    decoder.take("header", decoder.head(encoder.header(header))[1], bytearray())
    what, head, _ = decoder.head(line)
    decoder.take(what, head, bytearray(body))
    assert decoder.runs[0].count == 4_096


def test_tables_stand_for_the_records_before_them() -> None:
    encoder, decoder = Encoder(), Decoder()
    decoder.take(
        *decoder.head(encoder.header(Header(0, 1, "h", "c", 1, "3", "2", 1, 1)))[:2], bytearray()
    )
    encoder.events([event("x", 1), event("y", 2)], 0)  # left out of the file
    encoder.held = 0

    for record in (
        encoder.tables(dropped=2),
        encoder.events([event("y", 3), event("z", 4)], 2),
        encoder.clock(ClockReading(5, -6, 7)),
        encoder.end(2, "closed"),
    ):
        line, _, body = record.partition(b"\n")
        what, head, _ = decoder.head(line)
        decoder.take(what, head, bytearray(body))

    events = Events.join(decoder.runs, decoder.texts, decoder.threads, decoder.labels)
    assert [made.name for made in events] == ["y", "z"]
    assert decoder.dropped == 2
    assert decoder.readings == [ClockReading(5, -6, 7)]


def test_names_of_attributes_may_hold_anything() -> None:
    events = Events.of([event("x", 1, args={"%d": 1, '"': 2}), event("x", 2, args={"\ud800": "ß"})])

    assert events.attributes(0) == {"%d": 1, '"': 2}
    assert events.attributes(1) == {"\ud800": "ß"}

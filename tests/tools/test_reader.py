"""Reading what recorders wrote, and refusing everything else with a reason."""

from __future__ import annotations

import json
import math
import os
import struct
import time
import tracemalloc
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import cast

import pytest
from click.testing import CliRunner
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.tools.events import event, write_rank_file
from trine.core.tracing import TraceEvent
from trine.tools.cli import main
from trine.tools.tracing import TraceFileError, read_rank_file, read_traces, reader
from trine.tools.tracing.rank_file import MAX_HEAD_BYTES, MAX_RUN_BYTES
from trine.tools.tracing.schema import LABEL, STORED, WELL_KNOWN

texts = st.text(max_size=20)
counts = st.integers(0, 2**63 - 1)
attributes = st.none() | st.dictionaries(
    texts.filter(lambda name: name not in WELL_KNOWN),
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers(-(2**63), 2**63 - 1)
        | st.floats(allow_nan=False, allow_infinity=False)
        | texts,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
        max_leaves=5,
    ),
    max_size=3,
)


well_known = st.fixed_dictionaries(
    {},
    optional={
        **dict.fromkeys(("group", "op", "dtype", "backend", "stream"), st.text(min_size=1)),
        "seq": counts,
    },
)


@st.composite
def any_event(draw: st.DrawFn) -> TraceEvent:
    start_ns, end_ns = sorted([draw(counts), draw(counts)])
    made = TraceEvent(
        draw(st.sampled_from(["span", "async", "instant", "counter"])),
        draw(texts),
        draw(texts),
        draw(texts),
        draw(counts),
        (draw(well_known) | (draw(attributes) or {})) or None,
        start_ns,
        end_ns,
        draw(st.floats()),
    )
    made.step = draw(st.integers(-(2**63), 2**63 - 1))
    made.thread = draw(st.integers(0, 2**64 - 1))
    return made


def fields(made: TraceEvent) -> dict[str, object]:
    found = {name: getattr(made, name) for name in TraceEvent.__slots__}
    if math.isnan(made.value):
        found["value"] = "nan"  # NaN equals nothing, itself included
    return found


# Without a deadline: a busy machine is no fault of the reader.
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(any_event(), max_size=5))
def test_what_is_written_is_read_back(events: list[TraceEvent]) -> None:
    with TemporaryDirectory() as folder:
        path = write_rank_file(Path(folder), *events)

        read = read_rank_file(path).events

    assert [fields(made) for made in read] == [fields(made) for made in events]


def test_ranks_are_read_in_order_whatever_their_number_of_digits(tmp_path: Path) -> None:
    for rank in (11, 2, 0, 7):
        write_rank_file(tmp_path, event(f"of {rank}", 0), rank=rank, world_size=12)

    traces = read_traces(tmp_path)

    assert [trace.header.rank for trace in traces] == [0, 2, 7, 11]
    assert [trace.events[0].name for trace in traces] == ["of 0", "of 2", "of 7", "of 11"]


def test_one_file_can_be_read_alone(tmp_path: Path) -> None:
    write_rank_file(tmp_path, rank=0, world_size=2)
    path = write_rank_file(tmp_path, rank=1, world_size=2)

    assert [trace.header.rank for trace in read_traces(path)] == [1]


Record = tuple[dict[str, object], bytes]

HEADER, RUN, END = range(3)
"""The records of a file with one event."""


def records_of(path: Path) -> list[Record]:
    """The line of each record, decoded, and the bytes that follow it."""
    found: list[Record] = []
    with path.open("rb") as file:
        while line := file.readline():
            head = json.loads(line)
            found.append((head, file.read(head["nbytes"])))
    return found


def write_records(path: Path, records: list[Record]) -> None:
    path.write_bytes(b"".join(json.dumps(head).encode() + b"\n" + body for head, body in records))


def head_with(place: int, **changes: object) -> Callable[[Path], None]:
    """The damage that writes something else into the line of a record."""

    def damage(path: Path) -> None:
        records = records_of(path)
        records[place][0].update(changes)
        write_records(path, records)

    return damage


def header_without(name: str) -> Callable[[Path], None]:
    """The damage that leaves a field of the header out."""

    def damage(path: Path) -> None:
        records = records_of(path)
        del records[HEADER][0][name]
        write_records(path, records)

    return damage


def event_with(**changes: int) -> Callable[[Path], None]:
    """The damage that writes other numbers into the only event of a file."""
    layout = "<qqqqqqdii"

    def damage(path: Path) -> None:
        records = records_of(path)
        head, body = records[RUN]
        size = struct.calcsize(layout)
        row = dict(zip(STORED, struct.unpack(layout, body[:size]), strict=True)) | changes
        records[RUN] = head, struct.pack(layout, *row.values()) + body[size:]
        write_records(path, records)

    return damage


def label_with(**changes: object) -> Callable[[Path], None]:
    """The damage that changes what the only event of a file has in common with others."""

    def damage(path: Path) -> None:
        records = records_of(path)
        labels = records[RUN][0]["labels"]
        assert isinstance(labels, list)
        labels[0] = [changes.get(name, old) for name, old in zip(LABEL, labels[0], strict=True)]
        write_records(path, records)

    return damage


def attributes_with(line: bytes) -> Callable[[Path], None]:
    """The damage that writes something else for the attributes of the only event."""

    def damage(path: Path) -> None:
        records = records_of(path)
        head, body = records[RUN]
        body = body[:64] + line
        records[RUN] = head | {"nbytes": len(body)}, body
        write_records(path, records)

    return damage


def line_instead(line: bytes) -> Callable[[Path], None]:
    """The damage that puts a line in the place of all after the header."""

    def damage(path: Path) -> None:
        header = path.read_bytes().split(b"\n")[0]
        path.write_bytes(header + b"\n" + line)

    return damage


def add(place: int) -> Callable[[Path], None]:
    """The damage that has one of the records once more at the end."""

    def damage(path: Path) -> None:
        records = records_of(path)
        write_records(path, [*records, records[place]])

    return damage


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (lambda path: path.unlink(), "does not exist"),
    "empty": (lambda path: path.write_text(""), "is empty"),
    "foreign text": (lambda path: path.write_text("hello\n"), "not the trace of a rank"),
    "foreign json": (lambda path: path.write_text('{"traceEvents":[]}\n'), "not the trace of"),
    "binary": (lambda path: path.write_bytes(b"\x80\x02}q\x00.\n"), "not the trace of a rank"),
    "a header without its end": (
        lambda path: path.write_bytes(path.read_bytes()[:40]),
        "its line does not end",
    ),
    "other version": (
        head_with(HEADER, version=1),
        "format version 1, and this trine-tools reads version 2",
    ),
    "a version of lists": (head_with(HEADER, version=[[2]]), r"version \[\[2\]\]"),
    "true for a version": (head_with(HEADER, version=True), "version True"),
    "a fraction for a version": (head_with(HEADER, version=2.0), "version 2.0"),
    "another format": (head_with(HEADER, format="spam"), "not the trace of a rank"),
    "no rank": (header_without("rank"), "header has rank = None"),
    "true for a rank": (head_with(HEADER, rank=True), "rank = True"),
    "rank too large": (head_with(HEADER, rank=9), "rank 9 of 1"),
    "world too large": (head_with(HEADER, world_size=10**12), "rank 0 of 1000000000000"),
    "number for a host": (head_with(HEADER, host=3), "host = 3"),
    "a list for an environment": (head_with(HEADER, environment=[]), r"environment = \[\]"),
    "numbers in an environment": (head_with(HEADER, environment={"a": 1}), "environment ="),
    "a header of gigabytes": (head_with(HEADER, nbytes=2**60), "its nbytes is 1152921504606846976"),
    "a second header": (add(HEADER), "record 4: it is a second header"),
    "a header in the middle": (head_with(RUN, record="header"), "record 2: it is a second header"),
    "events after the end": (add(RUN), "record 4: there is more after the end"),
    "not json": (line_instead(b"[1,\n"), "record 2: it is not JSON"),
    "not a record": (line_instead(b"[]\n"), "record 2: it is not a record"),
    "not ascii": (line_instead(b'{"record":"\xff\xff"}\n'), "record 2: byte 12 of it is not ASCII"),
    "nan": (line_instead(b'{"record":"clock","at_ns":NaN}\n'), "record 2: NaN is not JSON"),
    "nested too deeply": (line_instead(b"[" * 100_000 + b"]" * 100_000 + b"\n"), "too deeply"),
    "a number of too many digits": (line_instead(b'{"a":' + b"9" * 10_000 + b"}\n"), "record 2"),
    "an endless line": (
        line_instead(b" " * (MAX_HEAD_BYTES + 1)),
        f"its line does not end within {MAX_HEAD_BYTES} bytes",
    ),
    "no nbytes": (head_with(RUN, nbytes=None), "its nbytes is None"),
    "negative nbytes": (head_with(RUN, nbytes=-1), "its nbytes is -1"),
    "a fraction for nbytes": (head_with(RUN, nbytes=64.0), "its nbytes is 64.0"),
    "a run of gigabytes": (head_with(RUN, nbytes=MAX_RUN_BYTES + 1), "its nbytes is"),
    "more events than bytes": (head_with(RUN, count=2), "announces 2 events in 84 bytes"),
    "an absurd number of events": (head_with(RUN, count=2**62), "announces 46116860184273"),
    "a number beyond 64 bits": (head_with(RUN, count=2**64), "its count is 18446744073709551616"),
    "a negative number of events": (head_with(RUN, count=-1), "its count is -1"),
    "fewer events than bytes": (head_with(RUN, count=0), "not lines of JSON"),
    "more attributes than lines": (head_with(RUN, args=2), "announces 2 attributes and holds 1"),
    "attributes that are not ascii": (attributes_with(b'{"a":"\xff"}\n'), "not lines of JSON"),
    "attributes without an end": (attributes_with(b'{"a":1}'), "not lines of JSON"),
    "texts that are none": (head_with(RUN, texts="spam"), "its texts is 'spam'"),
    "a number among the texts": (head_with(RUN, texts=["x", 5]), "one of its texts is 5"),
    "a text twice": (head_with(RUN, texts=["x", "x"]), "the text 'x' a second time"),
    "an empty text": (head_with(RUN, texts=[""]), "the text '' a second time"),
    "a text of megabytes": (head_with(RUN, texts=["x" * 10_000]), "one of its texts is 'xxxx"),
    "a negative thread": (head_with(RUN, threads=[-1]), "one of its threads is -1"),
    "true for a thread": (head_with(RUN, threads=[True]), "one of its threads is True"),
    "a label that is none": (head_with(RUN, labels=[7]), "one of its labels is 7"),
    "a label too short": (head_with(RUN, labels=[[0]]), r"one of its labels is \[0\]"),
    "a kind out of range": (label_with(kind=4), "a label has kind = 4"),
    "a name out of range": (label_with(name=99), "a label has name = 99"),
    "a negative unit": (label_with(unit=-1), "one of its labels is"),
    "true for a group": (label_with(group=True), "one of its labels is"),
    "a thread out of range": (label_with(thread=1), "a label has thread = 1"),
    "a label out of range": (event_with(label=1), "an event has label = 1"),
    "a negative label": (event_with(label=-1), "an event has label = -1"),
    "attributes out of range": (event_with(args=1), "an event has args = 1"),
    "attributes before the first": (event_with(args=-2), "an event has args = -2"),
    "negative bytes": (event_with(nbytes=-1), "an event has nbytes = -1"),
    "a negative time": (event_with(start_ns=-5), "an event has start_ns = -5"),
    "a negative sequence": (event_with(sequence=-2), "an event has sequence = -2"),
    "ends before it starts": (event_with(end_ns=5), "an event ends before it starts"),
    "starts before it was asked for": (
        event_with(enqueue_ns=1_500),
        "an event starts before it was asked for",
    ),
    "an end of another file": (
        head_with(END, events=7),
        "announces 7 events, and the file holds 1",
    ),
    "an end for no reason": (head_with(END, reason="bored"), "its reason is 'bored'"),
    "a list for a reason": (head_with(END, reason=[]), r"its reason is \[\]"),
    "negative dropped events": (head_with(END, dropped=-1), "its dropped is -1"),
    "a text for dropped events": (head_with(RUN, dropped="no"), "its dropped is 'no'"),
    "half a clock": (head_with(END, record="clock", at_ns=1), "its offset_ns is None"),
    "a clock that is sure of too much": (
        head_with(END, record="clock", at_ns=1, offset_ns=1, error_ns=-1),
        "its error_ns is -1",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_refused_with_the_reason(tmp_path: Path, damage: str) -> None:
    path = write_rank_file(tmp_path, event("x", 1, 2, args={"key": "some text"}))
    do_damage, reason = DAMAGES[damage]

    do_damage(path)

    with pytest.raises(TraceFileError, match=reason) as caught:
        read_rank_file(path)
    assert str(path) in str(caught.value)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"[1,\n", "are not JSON"),
        (b"\n", "are not JSON"),
        (b"[]\n", "are not a JSON object"),
        (b'{"a":' + b"[" * 20_000 + b"]" * 20_000 + b"}\n", "are not JSON"),
        (b'{"a":' + b"9" * 10_000 + b"}\n", "are not JSON"),
    ],
)
def test_attributes_that_are_none_are_refused_when_they_are_asked_for(
    tmp_path: Path, line: bytes, reason: str
) -> None:
    path = write_rank_file(tmp_path, event("x", 1, 2, args={"key": "some text"}))
    attributes_with(line)(path)

    events = read_rank_file(path).events

    with pytest.raises(TraceFileError, match=reason):
        events.attributes(0)
    with pytest.raises(TraceFileError, match=reason):
        list(events)


def test_attributes_that_json_cannot_pass_on_become_text(tmp_path: Path) -> None:
    path = write_rank_file(tmp_path, event("x", 1, 2, args={"key": "some text"}))
    deep = "[" * 50 + "]" * 50
    attributes_with(b'{"a":NaN,"b":[1e999],"c":1%s,"d":%s}\n' % (b"0" * 400, deep.encode()))(path)

    (read,) = read_rank_file(path).events

    assert read.args is not None
    assert read.args["a"] == "nan"
    assert read.args["b"] == ["inf"]
    assert read.args["c"] == "1" + "0" * 400
    json.dumps(read.args, allow_nan=False)


def test_a_file_cut_anywhere_is_read_up_to_its_last_whole_record(tmp_path: Path) -> None:
    path = write_rank_file(tmp_path, *(event(f"event {n}", n) for n in range(1_500)))
    whole = path.read_bytes()
    records = records_of(path)
    lengths = [len(json.dumps(h, separators=(",", ":"))) + 1 + len(b) for h, b in records]
    ends = list(accumulate(lengths))
    held = list(accumulate(cast(int, head.get("count", 0)) for head, _ in records))
    assert ends[-1] == len(whole)  # so the ends of records are where they are thought to be

    for end, next_end, events in zip(ends, ends[1:], held, strict=False):
        for cut in {end, end + 1, end + 30, (end + next_end) // 2, next_end - 1}:
            path.write_bytes(whole[:cut])

            trace = read_rank_file(path)

            assert len(trace.events) == events
            assert trace.end is None
    path.write_bytes(whole)
    assert read_rank_file(path).end is not None


@pytest.mark.parametrize("nbytes", [MAX_RUN_BYTES, 10_000])
def test_a_record_that_is_not_there_takes_no_memory(tmp_path: Path, nbytes: int) -> None:
    path = write_rank_file(tmp_path, event("x", 1, 2))
    head_with(END, record="events", nbytes=nbytes, count=1, args=0, texts=[])(path)

    tracemalloc.start()
    trace = read_rank_file(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert len(trace.events) == 1
    assert trace.end is None
    assert peak < 10_000_000


def test_a_record_of_a_kind_to_come_is_passed_over(tmp_path: Path) -> None:
    path = write_rank_file(tmp_path, event("x", 1, 2))
    header, run, end = records_of(path)
    write_records(path, [header, ({"record": "weather", "nbytes": 3}, b"sun"), run, end])

    assert [read.name for read in read_rank_file(path).events] == ["x"]


numbers = st.integers() | st.floats() | st.sampled_from([2**63, -(2**64), 10**400, 1e308])
anything = st.recursive(
    st.none() | st.booleans() | numbers | texts | st.sampled_from(["nan", "exposed_ns", "comm"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=4,
) | st.integers(1, 990).map(lambda depth: json.loads("[" * depth + "]" * depth))


def assert_refused_in_one_sentence_or_valid(folder: Path) -> None:
    """What every command makes of a folder with one damaged file."""
    out = folder / "out"
    for command in (["summary"], ["summary", "--json"], ["merge", "--out", str(out)]):
        result = CliRunner().invoke(main, ["trace", command[0], str(folder), *command[1:]])

        if result.exit_code == 0:
            assert not out.exists() or json.loads(out.read_text(), parse_constant=pytest.fail)
        else:
            assert isinstance(result.exception, SystemExit), result.exception
            assert result.output.startswith("Error: ")
            assert result.output.count("\n") == 1


# Without a deadline: a busy machine is no fault of the reader.
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_any_json_in_any_place_is_refused_in_one_sentence_or_makes_a_valid_trace(
    data: st.DataObject,
) -> None:
    with TemporaryDirectory() as folder:
        path = write_rank_file(
            Path(folder),
            event("all_gather", 1, 2, kind="async", category="comm", args={"exposed_ns": 1}),
        )
        records = records_of(path)
        place = data.draw(st.sampled_from([HEADER, RUN, END]))
        head, _ = records[place]
        name = data.draw(st.sampled_from([*head, "in attributes"]))
        value = data.draw(anything)
        if name == "in attributes":
            line = json.dumps({"exposed_ns": value}).encode() + b"\n"
            records[RUN] = records[RUN][0], records[RUN][1][:64] + line
            records[RUN][0]["nbytes"] = 64 + len(line)
        elif isinstance(inner := head[name], list) and inner and data.draw(st.booleans()):
            inner[data.draw(st.integers(0, len(inner) - 1))] = value
        else:
            head[name] = value
        write_records(path, records)

        assert_refused_in_one_sentence_or_valid(Path(folder))


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_any_bytes_in_any_place_are_refused_in_one_sentence_or_make_a_valid_trace(
    data: st.DataObject,
) -> None:
    with TemporaryDirectory() as folder:
        path = write_rank_file(
            Path(folder),
            event("all_gather", 1, 2, kind="async", category="comm", args={"exposed_ns": 1}),
        )
        content = bytearray(path.read_bytes())
        # Most of the places lie in the header; those after it matter more.
        at = data.draw(
            st.integers(0, len(content)) | st.integers(content.index(b"\n"), len(content))
        )
        length = data.draw(st.sampled_from([0, 1, 4, 8]))
        content[at : at + length] = data.draw(st.binary(min_size=1, max_size=12))
        path.write_bytes(content)

        assert_refused_in_one_sentence_or_valid(Path(folder))


@settings(max_examples=50, deadline=None)
@given(st.binary(max_size=200))
def test_a_file_of_any_bytes_is_refused(content: bytes) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "trace-rank00000.trine"
        path.write_bytes(content)

        with pytest.raises(TraceFileError):
            read_rank_file(path)


def test_a_file_of_absurd_size_is_not_opened(tmp_path: Path) -> None:
    path = write_rank_file(tmp_path)
    os.truncate(path, reader.MAX_FILE_BYTES + 1)  # sparse: it takes no room

    with pytest.raises(TraceFileError, match=f"the most that is read is {reader.MAX_FILE_BYTES}"):
        read_rank_file(path)


def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "trace-rank00000.trine")

    with pytest.raises(TraceFileError, match="neither a file nor a folder"):
        read_traces(tmp_path)


def test_a_folder_without_traces_says_what_was_expected(tmp_path: Path) -> None:
    with pytest.raises(TraceFileError, match=r"holds no traces. Expected files named trace-rank"):
        read_traces(tmp_path)


def test_two_files_of_one_rank_are_refused(tmp_path: Path) -> None:
    path = write_rank_file(tmp_path)
    (tmp_path / "trace-rank-copy.trine").write_bytes(path.read_bytes())

    with pytest.raises(TraceFileError, match="two traces of rank 0"):
        read_traces(tmp_path)


@pytest.mark.parametrize("old", [0, 1])
def test_a_file_that_an_earlier_run_of_the_same_size_has_left_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old: int
) -> None:
    write_rank_file(tmp_path, rank=old, world_size=2)
    later_ns = time.perf_counter_ns() + 11_000_000_000
    monkeypatch.setattr("trine.tools.tracing.environment.perf_counter_ns", lambda: later_ns)
    write_rank_file(tmp_path, rank=1 - old, world_size=2)

    with pytest.raises(TraceFileError, match=f"rank0000{old}.trine ended long before .*{1 - old}"):
        read_traces(tmp_path)


def test_files_of_worlds_of_different_size_are_refused(tmp_path: Path) -> None:
    write_rank_file(tmp_path, rank=0, world_size=2)
    write_rank_file(tmp_path, rank=3, world_size=4)

    with pytest.raises(TraceFileError, match="files of different runs"):
        read_traces(tmp_path)


def test_a_file_cannot_send_control_characters_to_the_terminal(tmp_path: Path) -> None:
    path = write_rank_file(tmp_path, event("x", 1))
    head_with(END, reason="\x1b[2J")(path)

    with pytest.raises(TraceFileError) as caught:
        read_rank_file(path)

    assert str(caught.value).isprintable()

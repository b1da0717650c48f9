"""Reading what recorders wrote, and refusing everything else with a reason."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from click.testing import CliRunner
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.tools.events import event, write_rank_file
from trine.core.tracing import TraceEvent
from trine.tools.cli import main
from trine.tools.tracing import TraceFileError, read_rank_file, read_traces, reader

texts = st.text(max_size=20)
counts = st.integers(0, 2**63 - 1)
attributes = st.none() | st.dictionaries(
    texts,
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


@st.composite
def any_event(draw: st.DrawFn) -> TraceEvent:
    start_ns, end_ns = sorted([draw(counts), draw(counts)])
    made = TraceEvent(
        draw(st.sampled_from(["span", "async", "instant", "counter"])),
        draw(texts),
        draw(texts),
        draw(texts),
        draw(counts),
        draw(attributes),
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


def replace_in_header(path: Path, **changes: object) -> None:
    header, *events = path.read_text().splitlines()
    path.write_text("\n".join([json.dumps({**json.loads(header), **changes}), *events]) + "\n")


def replace_event(path: Path, line: str) -> None:
    header = path.read_text().splitlines()[0]
    path.write_text(f"{header}\n{line}\n")


GOOD = '["span","x","user","",0,1,2,0,7,0.0,null]'

DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (lambda path: path.unlink(), "does not exist"),
    "empty": (lambda path: path.write_text(""), "is empty"),
    "foreign text": (lambda path: path.write_text("hello\n"), "not the trace of a rank"),
    "foreign json": (lambda path: path.write_text('{"traceEvents":[]}\n'), "not the trace of"),
    "binary": (lambda path: path.write_bytes(b"\x80\x02}q\x00."), "line 1: byte 1 .* not UTF-8"),
    "other version": (
        lambda path: replace_in_header(path, version=2),
        r"format version 2, and this trine-tools reads version 1",
    ),
    "true for a version": (lambda path: replace_in_header(path, version=True), "version True"),
    "a fraction for a version": (lambda path: replace_in_header(path, version=1.0), "version 1.0"),
    "no rank": (lambda path: replace_in_header(path, rank=None), "header has rank = None"),
    "true for a rank": (lambda path: replace_in_header(path, rank=True), "rank = True"),
    "rank too large": (lambda path: replace_in_header(path, rank=9), "rank 9 of 1"),
    "world too large": (
        lambda path: replace_in_header(path, world_size=10**12),
        "claims rank 0 of 1000000000000",
    ),
    "number for a host": (lambda path: replace_in_header(path, host=3), "host = 3"),
    "last event cut in the middle": (
        lambda path: path.write_bytes(path.read_bytes()[:-9]),
        "ends early: its header announces 1 events, and it holds 0",
    ),
    "last event missing": (
        lambda path: path.write_text(path.read_text().splitlines()[0] + "\n"),
        "ends early",
    ),
    "an absurd number of events": (
        lambda path: replace_in_header(path, events=2**60),
        "announces 1152921504606846976 events, and it holds 1",
    ),
    "too many events": (
        lambda path: path.write_text(path.read_text() + GOOD + "\n"),
        "has too many lines",
    ),
    "not json": (lambda path: replace_event(path, "[1,"), "line 2: it is not JSON"),
    "not utf-8": (
        lambda path: path.write_bytes(path.read_bytes().replace(b"user", b"us\xff\xff")),
        "line 2: byte .* not UTF-8",
    ),
    "nan": (lambda path: replace_event(path, GOOD.replace("0.0", "NaN")), "NaN is not JSON"),
    "an object": (lambda path: replace_event(path, "{}"), "not a list of 11 fields"),
    "unknown kind": (
        lambda path: replace_event(path, GOOD.replace("span", "spam")),
        "unknown kind 'spam'",
    ),
    "a list for a kind": (
        lambda path: replace_event(path, GOOD.replace('"span"', "[]")),
        "unknown kind",
    ),
    "a number for a name": (
        lambda path: replace_event(path, GOOD.replace('"x"', "1")),
        "must be text",
    ),
    "ends before it starts": (
        lambda path: replace_event(path, GOOD.replace("1,2", "2,1")),
        r"ends \(1\) before it starts \(2\)",
    ),
    "negative bytes": (
        lambda path: replace_event(path, GOOD.replace('"",0', '"",-1')),
        "integers from 0",
    ),
    "a time beyond 64 bits": (
        lambda path: replace_event(path, GOOD.replace("1,2", f"1,{2**70}")),
        "integers from 0",
    ),
    "a fraction for a time": (
        lambda path: replace_event(path, GOOD.replace("1,2", "1,2.5")),
        "integers from 0",
    ),
    "a number of too many digits": (
        lambda path: replace_event(path, GOOD.replace("1,2", "1," + "9" * 10_000)),
        "line 2",
    ),
    "a text for a value": (
        lambda path: replace_event(path, GOOD.replace("0.0", '"high"')),
        "value is 'high'",
    ),
    "a list for a value": (
        lambda path: replace_event(path, GOOD.replace("0.0", "[1]")),
        r"value is \[1\]",
    ),
    "an object for a value": (
        lambda path: replace_event(path, GOOD.replace("0.0", "{}")),
        r"value is \{\}",
    ),
    "a value beyond all floats": (
        lambda path: replace_event(path, GOOD.replace("0.0", "1" + "0" * 400)),
        "value is 1000",
    ),
    "an attribute beyond 64 bits": (
        lambda path: replace_event(path, GOOD.replace("null", '{"exposed_ns":1%s}' % ("0" * 400))),
        "its attributes hold a number that is not finite or not below",
    ),
    "an attribute beyond all floats": (
        lambda path: replace_event(path, GOOD.replace("null", '{"x":[1e999]}')),
        "its attributes hold a number that is not finite or not below",
    ),
    "attributes nested too deeply": (
        lambda path: replace_event(
            path, GOOD.replace("null", '{"x":%s}' % ("[" * 900 + "]" * 900))
        ),
        "are nested more than 8 deep",
    ),
    "a deep list for a value": (
        lambda path: replace_event(path, GOOD.replace("0.0", "[" * 900 + "]" * 900)),
        "value is ",
    ),
    "a list for attributes": (
        lambda path: replace_event(path, GOOD.replace("null", "[]")),
        "attributes are not an object",
    ),
    "nested too deeply": (
        lambda path: replace_event(path, "[" * 100_000 + "]" * 100_000),
        "nested too deeply",
    ),
    "an endless line": (
        lambda path: replace_event(path, " " * 2_000_000),
        "line 2: it is longer than 1048576 bytes",
    ),
}


numbers = st.integers() | st.floats() | st.sampled_from([2**63, -(2**64), 10**400, 1e308])
anything = st.recursive(
    st.none() | st.booleans() | numbers | texts | st.sampled_from(["nan", "exposed_ns", "comm"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=4,
) | st.integers(1, 990).map(lambda depth: json.loads("[" * depth + "]" * depth))
EVENT = ["async", "all_gather", "comm", "u", 8, 1, 2, 0, 7, 0.0, {"exposed_ns": 1}]


# Without a deadline: a busy machine is no fault of the reader.
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_any_json_in_any_place_is_refused_in_one_sentence_or_makes_a_valid_trace(
    data: st.DataObject,
) -> None:
    with TemporaryDirectory() as folder:
        path = write_rank_file(Path(folder), event("x", 1, 2))
        header = json.loads(path.read_text().splitlines()[0])
        made: list[object] = list(EVENT)
        place = data.draw(st.sampled_from([*header, *range(len(EVENT)), "in attributes", "line"]))
        value = data.draw(anything)
        if place == "in attributes":
            made[10] = {"exposed_ns": value}
        elif isinstance(place, int):
            made[place] = value
        elif place != "line":
            header[place] = value
        line = json.dumps(value if place == "line" else made)
        path.write_text(f"{json.dumps(header)}\n{line}\n")

        for command in (["summary"], ["summary", "--json"], ["merge", "--out", f"{folder}/out"]):
            result = CliRunner().invoke(main, ["trace", command[0], folder, *command[1:]])

            if result.exit_code == 0:
                assert not path.with_name("out").exists() or json.loads(
                    path.with_name("out").read_text(), parse_constant=pytest.fail
                )
            else:
                assert isinstance(result.exception, SystemExit), (place, line[:200])
                assert result.output.startswith("Error: ")
                assert result.output.count("\n") == 1


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_refused_with_the_reason(tmp_path: Path, damage: str) -> None:
    path = write_rank_file(tmp_path, event("x", 1, 2))
    do_damage, reason = DAMAGES[damage]

    do_damage(path)

    with pytest.raises(TraceFileError, match=reason) as caught:
        read_rank_file(path)
    assert str(path) in str(caught.value)
    assert len(str(caught.value)) < 500


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


def test_files_of_worlds_of_different_size_are_refused(tmp_path: Path) -> None:
    write_rank_file(tmp_path, rank=0, world_size=2)
    write_rank_file(tmp_path, rank=3, world_size=4)

    with pytest.raises(TraceFileError, match="files of different runs"):
        read_traces(tmp_path)


def test_a_file_cannot_send_control_characters_to_the_terminal(tmp_path: Path) -> None:
    path = write_rank_file(tmp_path, event("x", 1))
    replace_event(path, GOOD.replace("span", "\\u001b[2J"))

    with pytest.raises(TraceFileError) as caught:
        read_rank_file(path)

    assert str(caught.value).isprintable()

"""Recordings of others: traces of torch.profiler and dumps of torch's flight recorder."""

from __future__ import annotations

import gzip
import json
import pickle
import zlib
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.profiler import ProfilerActivity, profile

from tests.tools.events import event, rank_trace, step, write_rank_file
from trine.core import tracing
from trine.tools.analysis.hang import find_hang
from trine.tools.errors import TraceFileError
from trine.tools.reports import summarize
from trine.tools.sources import join_profiler, read
from trine.tools.sources import text as text_of_files
from trine.tools.tracing import RankTrace, Recorder

BASE_NS = 1_790_857_026_000_000_000


def work(name: str, ts: float, dur: float, cat: str = "cpu_op", **given: Any) -> dict[str, Any]:
    """One slice of a Chrome trace as torch.profiler writes it, in us."""
    return {"ph": "X", "cat": cat, "name": name, "pid": 5, "tid": 5, "ts": ts, "dur": dur} | given


def kineto(*events: object, rank: int = 0, world_size: int = 2) -> dict[str, Any]:
    """A trace of torch.profiler."""
    return {
        "schemaVersion": 1,
        "distributedInfo": {"backend": "gloo", "rank": rank, "world_size": world_size},
        "host_name": "host-a",
        "baseTimeNanoseconds": BASE_NS,
        "traceEvents": list(events),
        "traceName": "/tmp/x.json",
    }


def entry(number: int, at_ns: int, *, over: bool = True, **given: Any) -> dict[str, Any]:
    """An entry of gloo's flight recorder as torch 2.13 writes it."""
    return {
        "collective_seq_id": number,
        "input_dtypes": ["Float"],
        "input_sizes": [[7, 11]],
        "is_p2p": False,
        "op_id": number,
        "process_group": ["0", "default_pg"],
        "profiling_name": "gloo:all_reduce",
        "record_id": number,
        "retired": over,
        "state": "scheduled",
        "time_created_ns": at_ns,
        "time_discovered_completed_ns": 0,
        "time_discovered_started_ns": 0,
    } | given


def dump(*entries: object, **given: Any) -> dict[str, Any]:
    """A dump of the flight recorder; gloo files its group under no name."""
    return {
        "entries": list(entries),
        "pg_config": {"": {"desc": "", "name": "", "ranks": "[0, 1]"}},
        "pg_status": {"0": {"last_completed_collective": "1"}},
        "version": "2.10",
    } | given


def put(folder: Path, name: str, content: object) -> Path:
    """Write a file: bytes as they are, all else as JSON."""
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    return path


def refusal(path: Path) -> str:
    with pytest.raises(TraceFileError) as caught:
        read(path)
    return str(caught.value)


def read_or_refuse(path: Path) -> list[RankTrace]:
    """What is read, nothing if it is refused in one sentence."""
    try:
        return read(path)
    except TraceFileError as error:
        message = str(error)
    assert "\n" not in message
    return []


# --- torch.profiler


def test_times_of_a_profiler_trace_are_those_of_the_wall_clock(tmp_path: Path) -> None:
    path = put(tmp_path, "a.json", kineto(work("aten::mm", 12.5, 2.25)))

    (trace,) = read(path)

    (found,) = trace.events
    assert (found.start_ns, found.end_ns) == (BASE_NS + 12_500, BASE_NS + 14_750)
    assert (found.kind, found.category, found.step) == ("span", "compute", -1)
    assert (trace.header.rank, trace.header.world_size) == (0, 2)


def test_collectives_of_gloo_are_summed_up_over_the_ranks_of_a_folder(tmp_path: Path) -> None:
    for rank in (0, 1):
        annotation = work("gloo:all_gather", 10, 4 + 2 * rank, cat="user_annotation", tid=9)
        packed = gzip.compress(json.dumps(kineto(annotation, rank=rank)).encode())
        put(tmp_path, f"host_{rank}.pt.trace.json.gz", packed)

    summary = summarize(read(tmp_path))

    assert summary.ranks == [0, 1]
    (unit,) = summary.units
    assert unit.collectives["all_gather"].count == 1
    assert unit.collectives["all_gather"].time_ns == 5_000


def test_a_kernel_of_nccl_says_group_number_and_bytes(tmp_path: Path) -> None:
    args = {
        "Collective name": "_allgather_base",
        "In msg nelems": 100,
        "Group size": 4,
        "dtype": "BFloat16",
        "Process Group Name": "0",
        "Seq": 7,
        "device": 0,
        "stream": 20,
    }
    kernel = work("ncclDevKernel_AllGather_RING_LL", 10, 4, cat="kernel", args=args)

    (trace,) = read(put(tmp_path, "a.json", kineto(kernel)))

    (found,) = trace.events
    assert (found.kind, found.name, found.category) == ("async", "all_gather", "comm")
    assert found.nbytes == 3 * 100 * 2
    assert found.args == {
        "op": "all_gather",
        "backend": "nccl",
        "dtype": "bfloat16",
        "group": "0",
        "seq": 7,
        "stream": "0:20",
    }


def test_the_steps_of_the_profiler_number_what_starts_in_them(tmp_path: Path) -> None:
    content = kineto(
        work("ProfilerStep#4", 10, 10, cat="user_annotation"),
        work("aten::add", 12, 1),
        work("aten::mul", 25, 1),
        work("ProfilerStep#5", 30, 10, cat="user_annotation"),
        work("aten::mm", 39, 5),
    )

    (trace,) = read(put(tmp_path, "a.json", content))

    steps = {found.name: found.step for found in trace.events if found.name != "step"}
    assert steps == {"aten::add": 4, "aten::mul": -1, "aten::mm": 5}
    assert [f.step for f in trace.events if f.category == "step"] == [4, 5]


def test_what_torch_annotates_by_itself_has_the_names_of_the_schema(tmp_path: Path) -> None:
    names = ("enumerate(DataLoader)#_Single.__next__", "Optimizer.step#Adam.step", "mine")
    slices = [work(name, at, 1, cat="user_annotation") for at, name in enumerate(names)]

    (trace,) = read(put(tmp_path, "a.json", kineto(*slices)))

    assert [(found.name, found.category) for found in trace.events] == [
        ("load batch", "io"),
        ("optimizer", "compute"),
        ("mine", "user"),
    ]


def test_memory_is_that_of_the_device_where_there_is_one(tmp_path: Path) -> None:
    def memory(ts: float, total: int, kind: int) -> dict[str, Any]:
        args = {"Total Allocated": total, "Device Type": kind, "Device Id": 0}
        return {"ph": "i", "name": "[memory]", "ts": ts, "tid": 5, "args": args}

    path = put(tmp_path, "a.json", kineto(memory(1, 500, 0), memory(2, 4096, 1)))

    (trace,) = read(path)

    assert [(f.kind, f.name, f.value) for f in trace.events] == [
        ("counter", "memory.allocated", 4096.0)
    ]


def test_what_torch_profiler_really_writes_is_read(tmp_path: Path) -> None:
    with profile(activities=[ProfilerActivity.CPU]) as running:
        torch.ones(8).add(1)
    running.export_chrome_trace(str(tmp_path / "trace.json"))

    (trace,) = read(tmp_path / "trace.json")

    assert "aten::add" in {found.name for found in trace.events}
    assert (trace.header.rank, trace.header.world_size) == (0, 1)


# --- both of one rank


def test_operators_of_the_profiler_lie_within_the_spans_that_were_recorded(
    tmp_path: Path,
) -> None:
    recorder = Recorder(tmp_path / "run", rank=0, world_size=1)
    tracing.add_sink(recorder)
    with profile(activities=[ProfilerActivity.CPU]) as running:
        for number in range(2):
            tracing.set_step(number)
            with tracing.span("step", "step"), tracing.span("forward", "compute", "layers.0"):
                torch.ones(8).add(1)
    tracing.set_step(-1)
    tracing.remove_sink(recorder)
    recorder.close()
    running.export_chrome_trace(str(tmp_path / "trace.json"))

    (joined,) = join_profiler(read(tmp_path / "run"), read(tmp_path / "trace.json"))

    events = joined.events
    parents = events.parents().tolist()
    adds = [place for place, found in enumerate(events) if found.name == "aten::add"]
    assert [events[parents[place]].name for place in adds] == ["forward", "forward"]
    assert [events[place].step for place in adds] == [0, 1]
    assert [found.name for found in events if "step" in found.name] == ["step", "step"]


def test_a_profiled_rank_without_a_recording_is_refused(tmp_path: Path) -> None:
    own = [rank_trace(step(0, 10), rank=0, world_size=2)]
    profiled = read(put(tmp_path, "a.json", kineto(rank=1)))

    with pytest.raises(TraceFileError, match="no recording of rank 1"):
        join_profiler(own, profiled)


# --- the flight recorder


def test_a_rank_that_did_not_come_is_named_from_gloos_dumps(tmp_path: Path) -> None:
    put(tmp_path, "dump-rank0.json", dump(entry(1, 10), entry(2, 20, over=False)))
    put(tmp_path, "dump-rank1.json", dump(entry(1, 11)))

    (stuck,) = find_hang(read(tmp_path)).stuck

    assert (stuck.group, stuck.number, stuck.kind) == ("0", 2, "absent")
    assert [seen.rank for seen in stuck.absent] == [1]
    (call,) = stuck.calls
    assert (call.operation, call.dtype, call.elements) == ("all_reduce", "float32", 77)


def test_nccl_says_when_a_collective_ran_and_how_large_its_group_is(tmp_path: Path) -> None:
    times: dict[str, Any] = {"time_discovered_started_ns": 15, "time_discovered_completed_ns": 40}
    given = entry(3, 10, state="completed", profiling_name="nccl:_all_gather_base", **times)
    config = {"0": {"desc": "default_pg", "name": "0", "ranks": "[0, 1, 2]"}}

    (trace,) = read(put(tmp_path, "nccl_trace_rank_2.json", dump(given, pg_config=config)))

    begun, through = trace.events
    assert begun.name == "start all_gather"
    assert (begun.args or {})["ranks"] == [0, 1, 2]
    assert (through.start_ns, through.end_ns) == (15, 40)
    assert (through.args or {})["enqueue_ns"] == 10
    assert through.nbytes == 2 * 77 * 4
    assert (trace.header.rank, trace.header.world_size) == (2, 3)


def test_a_dump_must_say_its_rank_in_its_name(tmp_path: Path) -> None:
    for name in ("dump.json", "dump-20261201.json"):
        assert "Give it a name that ends in the rank" in refusal(put(tmp_path, name, dump()))


def test_a_pickle_is_refused_with_the_way_to_json(tmp_path: Path) -> None:
    class Harmful:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.touch, (tmp_path / "harm",)

    path = put(tmp_path, "nccl_trace_rank_0", pickle.dumps(Harmful()))

    assert "_dump_fr_trace_json()" in refusal(path)
    assert "_dump_fr_trace_json()" in refusal(tmp_path)
    assert not (tmp_path / "harm").exists()


# --- what is wrong with files


def test_our_own_files_are_read_where_there_are_others_beside(tmp_path: Path) -> None:
    write_rank_file(tmp_path, event("load", 0, 5))
    put(tmp_path, "timeline.json", {"traceEvents": []})

    (trace,) = read(tmp_path)

    assert [found.name for found in trace.events] == ["load"]


def test_two_files_of_one_rank_are_refused(tmp_path: Path) -> None:
    put(tmp_path, "a.json", kineto())
    put(tmp_path, "b.json", kineto())

    assert "two recordings of rank 0" in refusal(tmp_path)


def test_files_of_two_kinds_are_refused(tmp_path: Path) -> None:
    put(tmp_path, "a.json", kineto())
    put(tmp_path, "dump-rank1.json", dump())

    assert "different runs or kinds" in refusal(tmp_path)


def test_a_folder_without_traces_says_what_was_expected(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("nothing")

    assert "holds no traces" in refusal(tmp_path)


def test_a_chrome_trace_of_somebody_else_is_refused(tmp_path: Path) -> None:
    path = put(tmp_path, "a.json", {"traceEvents": [work("x", 1, 1)]})

    assert "nor a trace of torch.profiler" in refusal(path)


def test_names_that_would_steer_a_terminal_or_leave_the_folder_are_only_labels(
    tmp_path: Path,
) -> None:
    name = "\x1b[2J../../../etc/passwd<script>"
    raw = json.dumps(kineto(work(name + "@", 1, 1))).encode().replace(b"@", b"\xff\xfe")

    (trace,) = read(put(tmp_path, "a.json", raw))

    assert [found.name for found in trace.events] == [name + "\ufffd\ufffd"]


def test_a_bomb_of_gzip_is_one_clear_error(tmp_path: Path) -> None:
    packer = zlib.compressobj(9, wbits=31)
    zeros = bytes(1 << 20)
    packed = b"".join(packer.compress(zeros) for _ in range(80)) + packer.flush()

    assert "more than 200 times its size" in refusal(put(tmp_path, "a.json.gz", packed))


def test_a_file_that_is_too_large_is_one_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_of_files, "MAX_TEXT_BYTES", 1 << 10)
    path = put(tmp_path, "a.json", kineto(*[work("aten::add", 1, 1)] * 20))

    assert "is larger than 1.00 KiB" in refusal(path)


WHOLE = json.dumps(kineto(work("aten::add", 1, 1)))
# Without the time, for these bytes name tests, and the names must be the same in every process.
PACKED = gzip.compress(WHOLE.encode(), mtime=0)


@pytest.mark.parametrize(
    "content",
    [
        WHOLE[: len(WHOLE) // 2].encode(),
        WHOLE[:-1].encode(),
        WHOLE.encode() + b"x",
        PACKED[:-9],
        PACKED[:40] + b"\xff" * 20,
        b"[" * 100_000,
        b'{"schemaVersion":1,"traceEvents":' + b"[" * 100_000,
        b'{"schemaVersion":1,"traceEvents":7}',
        json.dumps(kineto("no object")).encode(),
        json.dumps(dump(None)).encode(),
        json.dumps(kineto(rank=3, world_size=2)).encode(),
        json.dumps(kineto() | {"distributedInfo": {"rank": "0", "world_size": []}}).encode(),
        json.dumps(kineto(work("late", 4e15, 4e15))).encode(),
        b"{}",
        b"{1:2}",
        b"",
    ],
)
def test_whatever_is_wrong_is_said_in_one_sentence(tmp_path: Path, content: bytes) -> None:
    message = refusal(put(tmp_path, "dump-rank0.json", content))

    assert "dump-rank0.json" in message
    assert "\n" not in message


@pytest.mark.parametrize(
    "odd",
    [
        {"ts": "soon"},
        {"ts": -1},
        {"ts": float("nan")},
        {"dur": float("inf")},
        {"dur": None},
        {"name": 7},
        {"cat": []},
        {"args": "none"},
        {"tid": {"a": 1}},
        {"tid": -(1 << 80)},
    ],
)
def test_an_odd_event_spoils_no_other(tmp_path: Path, odd: dict[str, Any]) -> None:
    path = put(tmp_path, "a.json", kineto(work("odd", 1, 1) | odd, work("good", 2, 1)))

    (trace,) = read(path)

    assert "good" in {found.name for found in trace.events}


@pytest.mark.parametrize(
    "odd",
    [
        {"input_sizes": [["a"]]},
        {"input_sizes": [[1 << 62, 1 << 62]]},
        {"process_group": None},
        {"collective_seq_id": -4},
        {"time_created_ns": 1 << 70},
        {"time_discovered_completed_ns": 1},
        {"profiling_name": None},
        {"input_dtypes": [{}]},
    ],
)
def test_an_odd_entry_spoils_no_other(tmp_path: Path, odd: dict[str, Any]) -> None:
    path = put(tmp_path, "dump-rank0.json", dump(entry(1, 5), entry(2, 10, **odd)))

    (trace,) = read(path)

    over = [found for found in trace.events if found.kind == "async"]
    assert 1 in [(found.args or {}).get("seq") for found in over]


# --- whatever comes


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_change_to_a_file_gives_recordings_or_one_sentence(data: st.DataObject) -> None:
    whole = json.dumps(data.draw(st.sampled_from(SAMPLES))).encode()
    at = data.draw(st.integers(0, len(whole)))
    length = data.draw(st.integers(0, 20))
    changed = whole[:at] + data.draw(st.binary(max_size=20)) + whole[at + length :]

    with TemporaryDirectory() as folder:
        path = put(Path(folder), "dump-rank0.json", changed)
        traces = read_or_refuse(path)

    if traces:
        summarize(traces)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=5,
)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_value_in_the_place_of_another_gives_recordings_or_one_sentence(
    data: st.DataObject,
) -> None:
    content = json.loads(json.dumps(data.draw(st.sampled_from(SAMPLES))))
    places: list[tuple[Any, Any]] = []
    collect_places(content, places)
    holder, key = data.draw(st.sampled_from(places))
    holder[key] = data.draw(json_values)

    with TemporaryDirectory() as folder:
        path = put(Path(folder), "dump-rank0.json", content)
        traces = read_or_refuse(path)

    if traces:
        summarize(traces)
        find_hang(traces)


def collect_places(value: Any, places: list[tuple[Any, Any]]) -> None:
    """Every container in a value, with each of its keys."""
    keys = value.keys() if isinstance(value, dict) else range(len(value))
    for key in keys:
        places.append((value, key))
        if isinstance(value[key], dict | list):
            collect_places(value[key], places)


NCCL_KERNEL = work(
    "ncclDevKernel_AllReduce",
    20,
    5,
    cat="kernel",
    args={"Collective name": "allreduce", "In msg nelems": 9, "Group size": 2, "dtype": "Float"}
    | {"Process Group Name": "0", "Seq": 1, "device": 0, "stream": 7},
)
SAMPLES: list[Any] = [
    kineto(
        work("ProfilerStep#1", 1, 50, cat="user_annotation"),
        work("gloo:all_gather", 5, 10, cat="user_annotation"),
        work("trine::wait all_gather layers.0", 6, 3),
        NCCL_KERNEL,
        {"ph": "i", "name": "[memory]", "ts": 3, "tid": 5, "args": {"Total Allocated": 4}},
    ),
    dump(entry(1, 10), entry(2, 20, over=False)),
]

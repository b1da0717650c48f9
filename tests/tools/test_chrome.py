"""The timeline: ranks in order, lanes that viewers can draw, and the bytes of one example."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest

from tests.tools.events import comm, event, rank_trace, step
from trine.tools.tracing import RankTrace, TraceFileError, write_timeline
from trine.tools.tracing.attributes import StoredAttributes

GOLDEN = Path(__file__).parent / "golden" / "timeline.json"


def timeline(tmp_path: Path, *traces: RankTrace) -> dict[str, Any]:
    out = tmp_path / "timeline.json"
    write_timeline(traces, out)
    loaded: dict[str, Any] = json.loads(out.read_text())
    return loaded


def lanes(made: dict[str, Any], pid: int = 0) -> dict[str, list[dict[str, Any]]]:
    """Name of each lane of a rank to what is drawn in it."""
    names = {
        (drawn["pid"], drawn["tid"]): drawn["args"]["name"]
        for drawn in made["traceEvents"]
        if drawn["name"] == "thread_name"
    }
    found: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for drawn in made["traceEvents"]:
        if drawn["ph"] in "Xi" and drawn["pid"] == pid:
            found[names[drawn["pid"], drawn["tid"]]].append(drawn)
    return dict(found)


def order_in_perfetto(made: dict[str, Any]) -> list[int]:
    """The ranks as Perfetto sorts them: by slices, most first, then by first appearance."""
    slices = Counter(drawn["pid"] for drawn in made["traceEvents"] if drawn["ph"] in "Xi")
    # Metadata is at time 0, and after the events of that time: the sort there is not stable.
    by_time = sorted(made["traceEvents"], key=lambda e: (e.get("ts", 0), e["ph"] == "M"))
    first_seen = list(dict.fromkeys(seen["pid"] for seen in by_time))
    return sorted(slices, key=lambda pid: (-slices[pid], first_seen.index(pid)))


def test_the_timeline_of_two_ranks_is_the_golden_one(tmp_path: Path) -> None:
    rank_0 = rank_trace(step(1_050, 3_050), rank=0, world_size=2)  # needs five more slices
    rank_1 = rank_trace(
        event("load batch", 1_000, 1_200, category="io"),
        comm("all_gather", "(root)", 1_200, 1_500, nbytes=4096, exposed_us=250),
        event("forward", 1_200, 1_900, category="compute"),
        event("loss", 1_900, kind="counter", value=5.5),
        comm("reduce_scatter", "(root)", 2_000, 2_600, nbytes=8192, exposed_us=100),
        step(1_000, 3_000),
        event("checkpoint", 3_100, kind="instant", args={"path": "step-0"}),
        rank=1,
        world_size=2,
    )

    write_timeline([rank_0, rank_1], tmp_path / "timeline.json")

    assert (tmp_path / "timeline.json").read_text() == GOLDEN.read_text()


@pytest.mark.parametrize(
    "counts",
    [
        [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8],
        [1, 2, 3, 4, 5, 6, 7, 8, 9, 10],
        [9, 8, 7, 6, 5, 4, 3, 2, 1],
    ],
)
def test_ranks_are_drawn_in_order_however_many_events_each_has(
    tmp_path: Path, counts: list[int]
) -> None:
    traces = [
        rank_trace(*(event("x", at, at + 1) for at in range(n)), rank=rank, world_size=len(counts))
        for rank, n in enumerate(counts)
    ]

    made = timeline(tmp_path, *traces)

    assert order_in_perfetto(made) == list(range(len(counts)))


def test_a_later_rank_that_starts_first_is_still_drawn_later(tmp_path: Path) -> None:
    rank_0 = rank_trace(step(5, 9), rank=0, world_size=2)
    rank_1 = rank_trace(step(2, 9), rank=1, world_size=2)

    assert order_in_perfetto(timeline(tmp_path, rank_0, rank_1)) == [0, 1]


def test_ranks_with_equally_many_events_need_no_filler(tmp_path: Path) -> None:
    traces = [rank_trace(step(0, 9), rank=rank, world_size=9) for rank in range(9)]

    made = timeline(tmp_path, *traces)

    assert all(list(lanes(made, pid)) == ["main"] for pid in range(9))


def test_overlapping_gathers_get_lanes_of_their_own(tmp_path: Path) -> None:
    trace = rank_trace(
        comm("all_gather", "a", 0, 10),
        comm("all_gather", "b", 2, 8),  # within a: drawn in one lane it would look like a part
        comm("all_gather", "c", 9, 20),  # overlaps a, not b
        comm("reduce_scatter", "c", 5, 30),
        step(0, 40),
    )

    found = lanes(timeline(tmp_path, trace))

    names = {lane: [event["name"] for event in events] for lane, events in found.items()}
    assert names == {
        "main": ["step"],
        "all_gather": ["all_gather a"],
        "all_gather (2)": ["all_gather b", "all_gather c"],
        "reduce_scatter": ["reduce_scatter c"],
    }


def test_nested_spans_share_a_lane_and_crossing_ones_do_not(tmp_path: Path) -> None:
    trace = rank_trace(
        step(0, 100),
        event("forward", 0, 50),
        event("layer", 10, 50),
        event("crosses", 40, 60),
        event("backward", 50, 100),
    )

    found = lanes(timeline(tmp_path, trace))

    assert [made["name"] for made in found["main"]] == ["step", "forward", "layer", "backward"]
    assert [made["name"] for made in found["main (2)"]] == ["crosses"]


def test_the_thread_that_trains_comes_first(tmp_path: Path) -> None:
    trace = rank_trace(
        event("prefetch", 0, 5, thread=1), step(3, 9), event("prefetch", 6, 8, thread=1)
    )

    made = timeline(tmp_path, trace)

    assert {lane: len(events) for lane, events in lanes(made).items()} == {"main": 1, "thread 2": 2}
    tids = {lane: events[0]["tid"] for lane, events in lanes(made).items()}
    assert tids["main"] == 0  # that of its process, which is drawn first
    assert tids["thread 2"] > 0


def test_thread_numbers_are_never_used_twice(tmp_path: Path) -> None:
    traces = [
        rank_trace(step(0, 9), comm("all_gather", "a", 0, 1), rank=rank, world_size=4)
        for rank in range(4)
    ]

    made = timeline(tmp_path, *traces)

    tids = [event["tid"] for event in made["traceEvents"] if event["name"] == "thread_name"]
    assert len(tids) == len(set(tids)) == 8


def test_times_are_microseconds_to_the_nanosecond_and_the_first_is_one(tmp_path: Path) -> None:
    first, second = event("first", 5_000_000, 5_000_010), event("second", 5_000_100)
    second.start_ns += 1
    second.end_ns += 2_346

    made = lanes(timeline(tmp_path, rank_trace(first, second)))["main"]

    assert [(event["ts"], event["dur"]) for event in made] == [(1.0, 10.0), (101.001, 2.345)]


def test_ranks_of_one_clock_are_compared_as_they_are(tmp_path: Path) -> None:
    # The pairs of the two headers disagree by 7 ms, as wall clocks do when they are set.
    rank_0 = rank_trace(event("x", 100, 101), rank=0, world_size=2, unix_ns=1_000)
    rank_1 = rank_trace(event("x", 130, 131), rank=1, world_size=2, unix_ns=7_001_000)

    made = timeline(tmp_path, rank_0, rank_1)

    assert lanes(made, 1)["main"][0]["ts"] - lanes(made, 0)["main"][0]["ts"] == 30.0
    assert "compare exactly" in made["otherData"]["clock"]


def test_ranks_of_another_machine_are_aligned_by_wall_clock_and_say_so(tmp_path: Path) -> None:
    # At one moment a's clock reads 1 ms and b's 500 ms; b's event is 4 ms later.
    rank_0 = rank_trace(
        event("x", 1_000, 1_001), rank=0, world_size=2, perf_counter_ns=1_000_000, unix_ns=10**18
    )
    rank_1 = rank_trace(
        event("x", 504_000, 504_001),
        rank=1,
        world_size=2,
        clock="clock of host-b",
        host="host-b",
        perf_counter_ns=500_000_000,
        unix_ns=10**18,
    )

    made = timeline(tmp_path, rank_0, rank_1)

    assert lanes(made, 1)["main"][0]["ts"] - lanes(made, 0)["main"][0]["ts"] == 4_000.0
    assert made["otherData"]["clock"].startswith("Ranks of 2 machines, aligned by")
    labels = [e["args"]["labels"] for e in made["traceEvents"] if e["name"] == "process_labels"]
    assert labels[1] == "host-b, pid 4001, clock aligned by wall clock"


def test_counters_that_json_cannot_write_are_left_out(tmp_path: Path) -> None:
    trace = rank_trace(
        event("loss", 0, kind="counter", value=float("nan")),
        event("loss", 1, kind="counter", value=float("inf")),
        event("loss", 2, kind="counter", value=2.5),
    )

    made = timeline(tmp_path, trace)

    assert [e["args"] for e in made["traceEvents"] if e["ph"] == "C"] == [{"value": 2.5}]


def test_fields_of_an_event_count_more_than_attributes_of_the_same_name(tmp_path: Path) -> None:
    claims = {"step": 99, "unit": "other", "nbytes": 7, "more": [1]}
    trace = rank_trace(
        event("x", 0, 1, unit="a", nbytes=5, args=claims, step=3), event("y", 2, 3, args=claims)
    )

    made = lanes(timeline(tmp_path, trace))["main"]

    assert [slice_["args"] for slice_ in made] == [
        {"step": 3, "unit": "a", "nbytes": 5, "more": [1]},
        {"step": 0, "unit": "other", "nbytes": 7, "more": [1]},
    ]
    assert (tmp_path / "timeline.json").read_text().count('"unit"') == 2


def test_names_of_any_characters_give_a_valid_file(tmp_path: Path) -> None:
    name = '"\\\n\x00\ud800</script>\u202e'

    made = timeline(tmp_path, rank_trace(event(name, 0, 1)))

    assert lanes(made)["main"][0]["name"] == name


def test_traces_without_events_give_an_empty_timeline(tmp_path: Path) -> None:
    made = timeline(tmp_path, rank_trace(rank=0, world_size=2), rank_trace(rank=1, world_size=2))

    assert {event["ph"] for event in made["traceEvents"]} == {"M"}


def test_a_timeline_that_cannot_be_written_leaves_the_old_one(tmp_path: Path) -> None:
    out = tmp_path / "timeline.json"
    out.write_text("old")
    broken = rank_trace(event("x", 0, 1, args={"fine": 1}))
    object.__setattr__(broken.events, "_args", StoredAttributes([b"[no json\n"], [0]))

    with pytest.raises(TraceFileError, match="attributes of an event are not JSON"):
        write_timeline([broken], out)

    assert out.read_text() == "old"
    assert list(tmp_path.iterdir()) == [out]


def test_a_missing_folder_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(TraceFileError, match=r"cannot be written to .*: No such file"):
        write_timeline([rank_trace()], tmp_path / "missing" / "timeline.json")

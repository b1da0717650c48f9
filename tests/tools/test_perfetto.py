"""The Perfetto file, read back by a decoder of our own."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.tools.events import comm, event, rank_trace, step
from tests.tools.protobuf import decode, double, signed
from trine.core.tracing import TraceEvent
from trine.tools.tracing import RankTrace, TraceFileError, write_perfetto
from trine.tools.tracing.attributes import StoredAttributes

EXPLICIT = 3
BEGIN, END, INSTANT, COUNTER = 1, 2, 3, 4


@dataclass
class Track:
    name: str
    parent: int | None
    order: int
    child_ordering: int
    description: str
    counter: bool
    events: list[dict[str, Any]] = field(default_factory=list)


class Timeline:
    """What a reader of the file sees, from the field numbers in Perfetto's .proto files."""

    def __init__(self, content: bytes) -> None:
        self.tracks: dict[int, Track] = {}
        tables: dict[tuple[int, int, int], str] = {}  # sequence, table, iid
        cleared = set()
        for packet in map(decode, decode(content).get(1, [])):
            sequence = packet.get(10, [0])[0]
            flags = packet.get(13, [0])[0]
            if flags & 1:
                cleared.add(sequence)
            for interned in map(decode, packet.get(12, [])):
                for table, entries in interned.items():
                    for entry in map(decode, entries):
                        tables[sequence, table, entry[1][0]] = entry[2][0].decode()
            for made in map(decode, packet.get(60, [])):
                self.tracks[made[1][0]] = Track(
                    name=made[2][0].decode(),
                    parent=made.get(5, [None])[0],
                    order=made.get(12, [0])[0],
                    child_ordering=made.get(11, [0])[0],
                    description=made.get(14, [b""])[0].decode(),
                    counter=8 in made,
                )
            for made in map(decode, packet.get(11, [])):
                assert sequence in cleared  # or readers drop what needs interned strings
                assert flags & 2
                self.tracks[made[11][0]].events.append(
                    {
                        "ts": packet[8][0],
                        "type": made[9][0],
                        "name": tables[sequence, 2, made[10][0]] if 10 in made else None,
                        "category": tables[sequence, 1, made[3][0]] if 3 in made else None,
                        "args": {
                            tables[sequence, 3, note[1][0]]: value_of(note)
                            for note in map(decode, made.get(4, []))
                        },
                        "flow": made.get(47, [None])[0],
                        "value": double(made[44][0]) if 44 in made else None,
                    }
                )

    def children(self, parent: int | None) -> list[int]:
        found = [uuid for uuid, track in self.tracks.items() if track.parent == parent]
        return sorted(found, key=lambda uuid: self.tracks[uuid].order)

    def ranks(self) -> list[int]:
        (root,) = self.children(None)
        return self.children(root)

    def lanes(self, rank: int = 0) -> dict[str, list[tuple[str, int, int]]]:
        """Name of each lane of the rank to its slices: name, start, end, as a reader nests them."""
        own = self.ranks()[rank]
        return {self.tracks[u].name: slices(self.tracks[u]) for u in [own, *self.children(own)]}


def value_of(note: dict[int, list[Any]]) -> object:
    ((number, (value,)),) = [(number, value) for number, value in note.items() if number != 1]
    if number == 4:
        return signed(value)
    readers: dict[int, Callable[[Any], object]] = {2: bool, 5: double, 6: bytes.decode}
    return readers[number](value)


def slices(track: Track) -> list[tuple[str, int, int]]:
    found: list[tuple[str, int, int]] = []
    open_: list[int] = []
    for made in sorted(track.events, key=lambda made: made["ts"]):  # stable, as readers sort
        if made["type"] == BEGIN:
            open_.append(len(found))
            found.append((made["name"], made["ts"], -1))
        elif made["type"] == END:
            name, start, _ = found[open_[-1]]
            found[open_.pop()] = name, start, made["ts"]
    assert not open_
    return found


def written(tmp_path: Path, *traces: RankTrace) -> Timeline:
    write_perfetto(traces, tmp_path / "timeline.pftrace")
    return Timeline((tmp_path / "timeline.pftrace").read_bytes())


def collective(unit: str, start_us: int, end_us: int, sequence: int) -> TraceEvent:
    made = comm("all_gather", unit, start_us, end_us)
    made.args = {"group": "world", "seq": sequence, "op": "all_gather", "note": [1, 2]}
    return made


def test_ranks_are_in_order_whatever_each_recorded(tmp_path: Path) -> None:
    traces = [
        rank_trace(*(event("x", at, at + 1) for at in range(12 - rank)), rank=rank, world_size=12)
        for rank in range(12)
    ]

    made = written(tmp_path, *traces)

    (root,) = made.children(None)
    assert made.tracks[root].child_ordering == EXPLICIT
    assert [made.tracks[u].name for u in made.ranks()] == [f"rank {rank}" for rank in range(12)]
    assert [made.tracks[u].order for u in made.ranks()] == list(range(12))


def test_a_rank_shows_its_training_thread_and_below_it_its_other_lanes(tmp_path: Path) -> None:
    trace = rank_trace(
        step(0, 100),
        event("prefetch", 0, 5, thread=1),
        event("forward", 0, 50, category="compute"),
        comm("reduce_scatter", "a", 60, 80),
        comm("all_gather", "a", 0, 10),
        comm("all_gather", "b", 2, 8),
        event("memory.sharded", 1, kind="counter", category="mem", value=8.0),
    )

    made = written(tmp_path, trace)

    assert made.lanes() == {
        "rank 0": [("step", 0, 100_000), ("forward", 0, 50_000)],
        "thread 2": [("prefetch", 0, 5_000)],
        "all_gather": [("all_gather a", 0, 10_000)],
        "all_gather (2)": [("all_gather b", 2_000, 8_000)],
        "reduce_scatter": [("reduce_scatter a", 60_000, 80_000)],
        "memory.sharded": [],
    }


def test_slices_that_touch_or_have_no_length_stay_apart(tmp_path: Path) -> None:
    trace = rank_trace(
        event("outer", 0, 20), event("a", 0, 10), event("none", 10, 10), event("b", 10, 20)
    )

    made = written(tmp_path, trace)

    assert sorted(made.lanes()["rank 0"]) == [
        ("a", 0, 10_000),
        ("b", 10_000, 20_000),
        ("none", 10_000, 10_000),
        ("outer", 0, 20_000),
    ]


def test_a_collective_has_one_flow_on_all_ranks_and_each_its_own(tmp_path: Path) -> None:
    traces = [
        rank_trace(collective("a", 0, 9, 1), collective("b", 9, 20, 2), rank=r, world_size=3)
        for r in range(3)
    ]

    made = written(tmp_path, *traces)

    flows: dict[str, set[bytes]] = defaultdict(set)
    for track in made.tracks.values():
        for found in track.events:
            if found["type"] == BEGIN:
                flows[found["name"]].add(found["flow"])
    assert {name: len(ids) for name, ids in flows.items()} == {"all_gather a": 1, "all_gather b": 1}
    assert flows["all_gather a"] != flows["all_gather b"]


def test_attributes_become_arguments_with_their_types(tmp_path: Path) -> None:
    first = collective("a", 1, 9, 7)
    first.step, first.nbytes = 3, 4096
    first.args = {**(first.args or {}), "stream": "gather", "enqueue_ns": -500 + first.start_ns}
    mark = event("mark", 10, kind="instant", category="io")
    mark.args = {"flag": True, "count": -2, "part": 0.5, "path": "run/step-1", "none": None}

    made = written(tmp_path, rank_trace(first, mark))

    (uuid,) = made.ranks()
    (instant,) = made.tracks[uuid].events
    (begin, _) = made.tracks[made.children(uuid)[0]].events
    assert (begin["name"], begin["category"]) == ("all_gather a", "comm")
    assert begin["args"] == {
        "step": 3,
        "unit": "a",
        "nbytes": 4096,
        "group": "world",
        "seq": 7,
        "op": "all_gather",
        "stream": "gather",
        "queued_ns": 500,
        "note": "[1, 2]",
    }
    assert (instant["type"], instant["category"]) == (INSTANT, "io")
    assert instant["args"] == {
        "step": 0,
        "flag": True,
        "count": -2,
        "part": 0.5,
        "path": "run/step-1",
        "none": "null",
    }


def test_counters_are_curves_of_their_own_per_unit_without_nan(tmp_path: Path) -> None:
    def sample(at: int, value: float, unit: str = "") -> TraceEvent:
        return event("loss", at, kind="counter", value=value, unit=unit)

    trace = rank_trace(sample(1, 2.5), sample(2, float("nan")), sample(3, 1.5), sample(4, 9, "a"))

    made = written(tmp_path, trace)

    curves = {
        track.name: [(found["ts"], found["value"]) for found in track.events]
        for track in made.tracks.values()
        if track.counter
    }
    assert curves == {"(no unit)": [(0, 2.5), (2_000, 1.5)], "a": [(3_000, 9.0)]}
    (rank,) = made.ranks()
    (loss,) = made.children(rank)
    assert made.tracks[loss].name == "loss"
    assert [made.tracks[uuid].name for uuid in made.children(loss)] == list(curves)


def test_the_clocks_of_the_ranks_are_aligned(tmp_path: Path) -> None:
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

    made = written(tmp_path, rank_0, rank_1)

    assert made.lanes(0)["rank 0"][0][1] == 0
    assert made.lanes(1)["rank 1"][0][1] == 4_000_000
    assert "wall clock" in made.tracks[made.children(None)[0]].description


def test_names_of_any_characters_give_a_valid_file(tmp_path: Path) -> None:
    name = '"\\\n\x00\ud800</script>\u202e'

    made = written(tmp_path, rank_trace(event(name, 0, 1, args={name: name})))

    ((found, _, _),) = made.lanes()["rank 0"]
    assert found == name.replace("\ud800", "\\ud800")


def test_traces_without_events_give_tracks_without_events(tmp_path: Path) -> None:
    made = written(tmp_path, rank_trace(rank=0, world_size=2), rank_trace(rank=1, world_size=2))

    assert [made.tracks[u].name for u in made.ranks()] == ["rank 0", "rank 1"]
    assert all(not track.events for track in made.tracks.values())


def test_a_timeline_that_cannot_be_written_leaves_the_old_one(tmp_path: Path) -> None:
    out = tmp_path / "timeline.pftrace"
    out.write_text("old")
    broken = rank_trace(event("x", 0, 1, args={"fine": 1}))
    object.__setattr__(broken.events, "_args", StoredAttributes([b"[no json\n"], [0]))

    with pytest.raises(TraceFileError, match="attributes of an event are not JSON"):
        write_perfetto([broken], out)

    assert out.read_text() == "old"
    assert list(tmp_path.iterdir()) == [out]


def test_a_missing_folder_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(TraceFileError, match=r"cannot be written to .*: No such file"):
        write_perfetto([rank_trace()], tmp_path / "missing" / "timeline.pftrace")

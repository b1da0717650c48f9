"""The Perfetto file, read by the classes that Perfetto publishes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tools.events import comm, rank_trace, step
from trine.tools.tracing import write_perfetto


def test_the_official_classes_read_the_same(tmp_path: Path) -> None:
    pb2 = pytest.importorskip(
        "perfetto.protos.perfetto.trace.perfetto_trace_pb2", reason="perfetto is not installed"
    )
    write_perfetto([rank_trace(step(0, 9), comm("all_gather", "a", 1, 3))], tmp_path / "t.pftrace")

    trace = pb2.Trace.FromString((tmp_path / "t.pftrace").read_bytes())

    tracks = [
        packet.track_descriptor for packet in trace.packet if packet.HasField("track_descriptor")
    ]
    assert [track.name for track in tracks] == ["Ranks", "rank 0", "all_gather"]
    explicit = pb2.TrackDescriptor.ChildTracksOrdering.EXPLICIT
    assert all(track.child_ordering == explicit for track in tracks)
    kinds = [packet.track_event.type for packet in trace.packet if packet.HasField("track_event")]
    begin, end = pb2.TrackEvent.Type.TYPE_SLICE_BEGIN, pb2.TrackEvent.Type.TYPE_SLICE_END
    assert kinds == [begin, end, begin, end]

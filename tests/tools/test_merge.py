"""Merging: one timeline out of a folder, and nothing overwritten that was read."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.tools.events import step, write_rank_file
from trine.tools.tracing import TraceFileError, merge


def test_a_folder_becomes_one_timeline(tmp_path: Path) -> None:
    for rank in range(3):
        write_rank_file(tmp_path, step(0, 10 + rank), rank=rank, world_size=3)
    out = tmp_path / "timeline.json"

    traces = merge(tmp_path, out)

    events = json.loads(out.read_text())["traceEvents"]
    assert [(e["pid"], e["dur"]) for e in events if e["ph"] == "X"] == [
        (0, 10.0),
        (1, 11.0),
        (2, 12.0),
    ]
    assert [trace.header.rank for trace in traces] == [0, 1, 2]


@pytest.mark.parametrize("whole_folder", [True, False])
def test_a_timeline_never_takes_the_place_of_a_trace(tmp_path: Path, whole_folder: bool) -> None:
    trace = write_rank_file(tmp_path, step(0, 10))
    content = trace.read_bytes()
    link = tmp_path / "link.json"
    link.symlink_to(trace)

    for out in (trace, link):
        with pytest.raises(TraceFileError, match="take the place of a trace"):
            merge(tmp_path if whole_folder else trace, out)

    assert trace.read_bytes() == content


def test_a_timeline_takes_the_place_of_a_file_only(tmp_path: Path) -> None:
    write_rank_file(tmp_path, step(0, 10))
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)

    for out in (pipe, tmp_path):
        with pytest.raises(TraceFileError, match="which exists and is not a file"):
            merge(tmp_path, out)

    assert pipe.is_fifo()

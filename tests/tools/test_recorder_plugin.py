"""The plug-in as a program meets it: found, opened on each rank, finished once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tools.events import comm, step, write_rank_file
from trine.core.recording import Recorder, find_recorder
from trine.tools import recorder_plugin
from trine.tools.tracing import TraceFileError, read_traces


def test_core_finds_the_plugin_where_tools_is_installed() -> None:
    plugin: Recorder = recorder_plugin  # the types agree, too

    assert find_recorder() is plugin


def test_a_run_ends_with_a_timeline_and_a_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank in range(2):
        recording = recorder_plugin.open(tmp_path, rank=rank, world_size=2)
        recording.record(comm("all_gather", "blocks.0", 10, 20, nbytes=2048, exposed_us=5))
        recording.record(step(0, 100))
        recording.close()

    report = recorder_plugin.finish(tmp_path)

    assert report.files == {"timeline": tmp_path / "timeline.json"}
    assert report.files["timeline"].is_file()
    assert report.dropped == 0
    printed = capsys.readouterr().out
    assert printed.startswith("2 ranks, 1 step\n")
    assert "blocks.0" in printed


def test_the_traces_of_a_larger_earlier_run_are_gone(tmp_path: Path) -> None:
    for rank in range(4):
        write_rank_file(tmp_path, step(0, 5), rank=rank, world_size=4)

    # Rank 1 is quick: it is done before rank 0 starts.
    recorder_plugin.open(tmp_path, rank=1, world_size=2).close()
    recorder_plugin.open(tmp_path, rank=0, world_size=2).close()

    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "trace-rank00000.trine",
        "trace-rank00001.trine",
    ]
    recorder_plugin.finish(tmp_path)


def test_a_rank_that_dies_leaves_no_trace_of_an_earlier_run(tmp_path: Path) -> None:
    write_rank_file(tmp_path, step(0, 5))

    recorder = recorder_plugin.open(tmp_path, rank=0, world_size=1)

    (trace,) = read_traces(tmp_path)
    assert len(trace.events) == 0
    assert trace.end is None
    recorder.close()


def test_a_folder_that_cannot_be_made_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("not a folder")

    with pytest.raises(TraceFileError, match="The trace of rank 0 cannot be written to"):
        recorder_plugin.open(tmp_path / "taken", rank=0, world_size=1)

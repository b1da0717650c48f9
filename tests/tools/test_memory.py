"""Whose memory it was, from hand-made counters with known answers."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.tools.events import event, rank_trace, write_rank_file
from trine.core.tracing import TraceEvent
from trine.tools.analysis.memory import Holder, memory_use
from trine.tools.analysis.memory_series import memory_series
from trine.tools.cli import main
from trine.tools.reports.memory_table import print_memory
from trine.tools.tracing import Events

MIB = 2**20


def holds(at_us: int, kind: str, unit: str, mib: float, step: int = 0) -> TraceEvent:
    """A counter: from now on `unit` has so much memory of that kind."""
    return event(
        f"memory.{kind}",
        at_us,
        kind="counter",
        category="mem",
        unit=unit,
        value=mib * MIB,
        step=step,
    )


def phase(at_us: int, name: str, unit: str) -> TraceEvent:
    return event(name, at_us, kind="instant", category="compute", unit=unit)


RUN = [
    holds(0, "sharded", "a", 1),
    holds(0, "sharded", "b", 2),
    phase(1, "forward", "a"),
    holds(2, "unsharded", "a", 10),
    holds(3, "activations", "a", 5),
    holds(4, "unsharded", "a", 0),
    phase(5, "forward", "b"),
    holds(6, "unsharded", "b", 20),  # 28 MiB: 1 + 2 + 5 + 20
    event("another counter", 6, kind="counter", category="user", value=10**12),
    event("memory.other", 6, kind="counter", category="mem", value=10**12),
    holds(7, "unsharded", "b", 0),
    phase(8, "backward", "b"),
    holds(9, "communication", "", 3, step=1),
]


def test_totals_are_what_all_holders_have_at_once() -> None:
    series = memory_series(Events.of(RUN))

    assert [total / MIB for total in series.total.tolist()] == [1, 3, 13, 18, 8, 28, 8, 11]
    assert series.most()["unsharded", "b"] == 20 * MIB
    assert series.at(2) == {
        ("sharded", "a"): MIB,
        ("sharded", "b"): 2 * MIB,
        ("unsharded", "a"): 10 * MIB,
    }


def test_the_peak_is_found_and_taken_apart() -> None:
    use = memory_use([rank_trace(*RUN)])

    (peak,) = use.ranks
    assert peak.nbytes == 28 * MIB
    assert (peak.step, peak.where, peak.at_ns) == (0, "in forward of b", 6000)
    assert peak.by_kind == {
        "sharded": 3 * MIB,
        "unsharded": 20 * MIB,
        "activations": 5 * MIB,
    }
    assert use.largest[0] == Holder("unsharded", "b", 20 * MIB)
    assert use.explained == (
        "The peak is 28.0 MiB, in step 0, in forward of b: 20.0 MiB whole parameters, 5.00 MiB "
        "activations, 3.00 MiB parameter shards; the largest part is the whole parameters of b, "
        "20.0 MiB (71%)."
    )
    assert "make units smaller" in use.advice
    assert use.missing == ["gradients", "optimizer"]


def test_units_have_the_most_of_each_kind_and_what_they_had_at_the_peak() -> None:
    use = memory_use([rank_trace(*RUN)])

    units = {each.unit: each for each in use.units}
    assert [each.unit for each in use.units] == ["b", "a", ""]
    assert units["a"].most == {"sharded": MIB, "unsharded": 10 * MIB, "activations": 5 * MIB}
    assert units["a"].at_peak == {"sharded": MIB, "unsharded": 0, "activations": 5 * MIB}
    assert units[""].at_peak == {"communication": 0}


def test_a_memory_hog_on_one_rank_is_named() -> None:
    hog = [*RUN, holds(20, "activations", "head", 500)]

    use = memory_use([rank_trace(*RUN, world_size=2), rank_trace(*hog, rank=1, world_size=2)])

    assert use.worst == 1
    assert "of rank 1" in use.explained
    assert "the largest part is the activations of head, 500 MiB" in use.explained
    assert "checkpoint them" in use.advice


def test_what_is_allocated_in_all_stands_beside_the_sum() -> None:
    use = memory_use([rank_trace(*RUN, holds(10, "allocated", "", 40))])

    assert use.ranks[0].nbytes == 28 * MIB
    assert use.ranks[0].allocated == 40 * MIB
    file = io.StringIO()
    print_memory(use, file)
    assert "allocated in all 40.0 MiB, 12.0 MiB of it for what is not listed" in file.getvalue()


def test_a_recording_without_memory_says_so() -> None:
    use = memory_use([rank_trace(phase(1, "forward", "a"))])

    assert use.explained == "No memory was recorded."
    assert use.ranks == []
    file = io.StringIO()
    print_memory(use, file)
    assert "use trine trace run --memory, or profile(memory=True)" in file.getvalue()


@pytest.mark.parametrize("value", [math.nan, math.inf, -5.0])
def test_values_that_are_no_sizes_count_as_nothing(value: float) -> None:
    odd = event("memory.sharded", 7, kind="counter", category="mem", unit="a", value=value)

    assert memory_use([rank_trace(*RUN, odd)]).ranks[0].nbytes == 28 * MIB


def test_the_table_has_a_line_for_each_unit(tmp_path: Path) -> None:
    for rank in range(2):
        write_rank_file(tmp_path, *RUN, rank=rank, world_size=2)

    result = CliRunner().invoke(main, ["trace", "memory", str(tmp_path)])

    assert result.exit_code == 0, result.output
    lines = [" ".join(line.split()) for line in result.output.splitlines()]
    assert "b 2.00 MiB 20.0 MiB 22.0 MiB" in lines
    assert "a 1.00 MiB 10.0 MiB 5.00 MiB 6.00 MiB" in lines
    assert lines[-1] == "total 28.0 MiB"
    assert "peaks by rank: 0: 28.0 MiB, 1: 28.0 MiB" in lines


def test_json_has_bytes(tmp_path: Path) -> None:
    write_rank_file(tmp_path, *RUN)

    result = CliRunner().invoke(main, ["trace", "memory", str(tmp_path), "--json"])

    data = json.loads(result.output)
    assert (data["format"], data["version"]) == ("trine-memory", 1)
    assert data["ranks"][0]["nbytes"] == 28 * MIB
    assert data["units"][0]["at_peak"]["unsharded"] == 20 * MIB


def test_names_cannot_steer_the_terminal() -> None:
    file = io.StringIO()

    print_memory(memory_use([rank_trace(holds(0, "sharded", "\x1b[31mred", 1))]), file)

    assert "\x1b" not in file.getvalue()
    assert "\\x1b[31mred" in file.getvalue()

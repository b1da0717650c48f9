"""What torch's flight recorder really writes over gloo, read by `trine trace`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as _untyped

from trine.distributed.testing import run_on_ranks
from trine.tools.analysis.hang import find_hang
from trine.tools.reports import summarize
from trine.tools.sources import read

c10d: Any = _untyped  # what torch says of its types lacks the dumps

pytestmark = pytest.mark.skipif(
    not hasattr(c10d, "_dump_fr_trace_json"), reason="this torch writes no JSON"
)


def leave_rank_1_out(folder: Path) -> None:
    """All reduce twice, of which rank 1 comes to the second one late; dump in between."""
    rank = dist.get_rank()
    dist.all_reduce(torch.ones(3))
    ahead = dist.all_reduce(torch.ones(7, 11), async_op=True) if rank == 0 else None
    while not json.loads(dump := c10d._dump_fr_trace_json())["entries"][0]["retired"]:
        pass  # the wait is over a moment before the recorder knows
    (folder / f"rank{rank}.json").write_bytes(dump)
    if rank == 1:
        dist.all_reduce(torch.ones(7, 11))
    if ahead is not None:
        ahead.wait()


def test_who_did_not_come_is_found_in_dumps_of_gloo(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "200")

    run_on_ranks(leave_rank_1_out, 2, tmp_path)
    traces = read(tmp_path)

    (stuck,) = find_hang(traces).stuck
    assert [seen.rank for seen in stuck.absent] == [1]
    (call,) = stuck.calls
    assert (call.operation, call.elements, call.dtype) == ("all_reduce", 77, "float32")
    (unit,) = summarize(traces).units
    assert "all_reduce" in unit.collectives

"""Where the time of a real run went: a rank that dawdles shows as the other's waiting."""

from __future__ import annotations

import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from trine.core import tracing
from trine.distributed.fsdp import fully_shard
from trine.distributed.testing import run_on_ranks
from trine.tools.analysis.breakdown import PARTS, break_down
from trine.tools.analysis.summary import summarize
from trine.tools.tracing import Recorder, read_traces

WORLD_SIZE = 2
STEPS = 4
LATE_S = 0.2
"""By so much rank 1 is late in each step: far more than a loaded machine adds."""


def train(directory: Path) -> None:
    """Train two sharded blocks; rank 1 takes its time with each batch."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    for block in model:
        fully_shard(block)
    fully_shard(model)
    rank = dist.get_rank()
    recorder = Recorder(directory, rank=rank, world_size=dist.get_world_size())
    tracing.add_sink(recorder)
    for number in range(STEPS):
        tracing.set_step(number)
        with tracing.span("step", category="step"):
            with tracing.span("load batch", category="io"):
                time.sleep(LATE_S * rank)
            with tracing.span("forward", category="compute"):
                loss = model(torch.ones(4, 64)).sum()
            with tracing.span("backward", category="compute"):
                loss.backward()
    tracing.remove_sink(recorder)
    recorder.close()


def test_a_rank_that_dawdles_shows_as_waiting_of_the_other(tmp_path: Path) -> None:
    run_on_ranks(train, WORLD_SIZE, tmp_path)

    traces = read_traces(tmp_path)
    early, late = break_down(traces).ranks
    planted_ns = LATE_S * 1e9
    # In the first step the ranks meet to compare their models before any collective.
    for waiting, dawdling in zip(early.steps[1:], late.steps[1:], strict=True):
        assert dawdling.data_ns >= planted_ns
        assert waiting.wait_ns > 0.5 * planted_ns
        assert dawdling.wait_ns < 0.5 * planted_ns
        assert waiting.exposed_ns < 0.5 * planted_ns
        for row in (waiting, dawdling):
            assert sum(getattr(row, f"{name}_ns") for name in PARTS) == row.total_ns
    said = summarize(traces).dominant
    assert "; rank 1 makes the others wait" in said

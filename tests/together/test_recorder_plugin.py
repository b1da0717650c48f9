"""The engine emits, tools record: what a sharded run looks like in its traces."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from trine.core import tracing
from trine.core.recording import find_recorder
from trine.distributed.fsdp import fully_shard
from trine.distributed.testing import run_on_ranks
from trine.tools.reports import summarize
from trine.tools.tracing import read_traces

WORLD_SIZE = 2
STEPS = 3
FEATURES = 64


def train(directory: Path) -> None:
    """Train two sharded blocks for a few steps, recorded as the demo records."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(FEATURES, FEATURES, bias=False), nn.Linear(FEATURES, FEATURES, bias=False)
    )
    for block in model:
        fully_shard(block)
    fully_shard(model)
    recorder = find_recorder()
    assert recorder is not None
    recording = recorder.open(directory, rank=dist.get_rank(), world_size=dist.get_world_size())
    tracing.add_sink(recording)
    for number in range(STEPS):
        tracing.set_step(number)
        with tracing.span("step", category="step"):
            model(torch.ones(4, FEATURES)).sum().backward()
    tracing.remove_sink(recording)
    recording.close()


def test_a_sharded_run_is_summed_up_per_unit(tmp_path: Path) -> None:
    run_on_ranks(train, WORLD_SIZE, tmp_path)

    summary = summarize(read_traces(tmp_path))

    assert summary.steps is not None
    assert summary.steps.count == STEPS
    assert [unit.unit for unit in summary.units] == ["0", "1"]
    # Of two ranks each sends its half to the other, and half of the gradients.
    half = FEATURES * FEATURES * 4 // 2
    for unit in summary.units:
        gather = unit.collectives["all_gather"]
        reduction = unit.collectives["reduce_scatter"]
        assert gather.nbytes == gather.count * half
        assert reduction.count == 1
        # The engine may send a few words about the gradients along with them.
        assert half <= reduction.nbytes < half + 64
        assert 0 <= unit.exposed_ns <= summary.steps.mean_ns
    # Gathered for forward, and for backward too, except where it was not resharded between.
    assert summary.units[0].collectives["all_gather"].count == 2

"""`trine trace run`: programs that do not know of us are recorded, and nothing else changes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from trine.tools.analysis.memory import memory_use
from trine.tools.cli import main
from trine.tools.tracing import RankTrace, read_traces

SCRIPT = """
import sys
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for (batch,) in DataLoader(TensorDataset(torch.ones(32, 8)), batch_size=8, num_workers=1):
    model(batch).mean().backward()
    optimizer.step()
torch.save(model, "model.pt")
print("trained", sys.argv[1])
sys.exit(3)
"""

# The ranks know who they are from init_process_group only. The parent computes as well.
SPAWNED = """
import sys
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import fully_shard

def train(rank, store):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
    for block in model:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(2):
        model(torch.ones(4, 64)).sum().backward()
        optimizer.step()
    dist.all_reduce(torch.ones(10), async_op=True).wait()
    dist.barrier()
    try:
        dist.broadcast("no tensor", 0)
    except TypeError:
        pass
    dist.destroy_process_group()

if __name__ == "__main__":
    nn.Linear(2, 2)(torch.ones(2))
    mp.spawn(train, (sys.argv[1],), nprocs=2)
"""


ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    # Torch says once for each process that there is no NumPy, which nobody here needs.
    "PYTHONWARNINGS": "ignore:Failed to initialize NumPy",
}


def trine_trace_run(
    folder: Path, *arguments: str, **variables: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "trine.tools", "trace", "run", "--out", "run", *arguments],
        cwd=folder,
        env=os.environ | ENVIRONMENT | variables,
        capture_output=True,
        text=True,
        timeout=300,
    )


def names(trace: RankTrace, step: int) -> list[str]:
    return [event.name for event in trace.events if event.step == step]


def test_a_script_is_recorded_and_notices_nothing(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text("print('as before')")
    before = os.pathsep.join([str(tmp_path / "site"), os.environ.get("PYTHONPATH", "")])

    done = trine_trace_run(
        tmp_path, "--steps", "1-2", "--", sys.executable, "train.py", "well", PYTHONPATH=before
    )

    assert done.returncode == 3
    # The command is Python, too, and so has its sitecustomize.
    assert done.stdout == "as before\nas before\ntrained well\n"
    assert done.stderr == "trine: 1 rank recorded. Next: trine trace summary run\n"
    (trace,) = read_traces(tmp_path / "run")
    assert set(trace.events.step.tolist()) == {1, 2}
    assert names(trace, 1) == ["load batch", "forward", "backward", "optimizer", "step"]
    assert set(trace.events.parents().tolist()) == {4, 9, -1}  # all lie in their steps
    assert trace.end is not None


def test_the_memory_of_a_script_is_recorded_if_asked_for(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)

    done = trine_trace_run(tmp_path, "--memory", "--", sys.executable, "train.py", "well")

    assert done.stdout == "trained well\n"
    use = memory_use(read_traces(tmp_path / "run"))
    assert use.ranks[0].by_kind["unsharded"] == 4 * (8 * 8 + 8 + 8 + 1)
    # The layers save the batch, and what the first one makes of it: eight rows of eight each.
    most = {unit.unit: unit.most for unit in use.units}
    assert most["(root)"]["activations"] == 2 * 4 * 8 * 8


def test_of_ranks_that_failed_it_is_asked_who_did_not_come(tmp_path: Path) -> None:
    write = (
        "import pathlib, sys; folder = pathlib.Path('run'); folder.mkdir(); "
        "[(folder / f'trace-rank0000{rank}.trine').touch() for rank in range(2)]; sys.exit(1)"
    )

    done = trine_trace_run(tmp_path, "--", sys.executable, "-c", write)

    assert done.returncode == 1
    assert done.stderr == "trine: 2 ranks recorded. Next: trine trace hang run\n"


def test_spawned_ranks_are_recorded_with_their_collectives(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SPAWNED)

    done = trine_trace_run(tmp_path, "--", sys.executable, "train.py", str(tmp_path / "store"))

    assert done.returncode == 0, done.stderr
    assert done.stderr.endswith("trine: 2 ranks recorded. Next: trine trace summary run\n")
    traces = read_traces(tmp_path / "run")
    assert [(trace.header.rank, trace.header.world_size) for trace in traces] == [(0, 2), (1, 2)]
    begun = []
    for trace in traces:
        asked = [event for event in trace.events if event.kind == "async"]
        begun.append([(event.args or {})["seq"] for event in asked])
        assert {name: sum(event.name == name for event in asked) for name in ("all_gather",)} == {
            "all_gather": 8  # two blocks, before forward and before backward, in two steps
        }
        half = 64 * 64 * 4 // 2
        assert {event.nbytes for event in asked if event.name == "all_gather"} == {half}
        assert {event.nbytes for event in asked if event.name == "reduce_scatter"} == {half}
        assert [event.nbytes for event in asked if event.name == "all_reduce"] == [40]
        waits = [event for event in trace.events if event.name.startswith("wait ")]
        starts = [event for event in trace.events if event.name.startswith("start ")]
        assert len(waits) == len(starts) == len(asked) + 1
        # What failed was begun and waited for, and never through.
        assert (starts[-1].name, waits[-1].name) == ("start broadcast", "wait broadcast")
        assert (starts[0].args or {})["ranks"] == [0, 1]
        assert [event.step for event in trace.events if event.name == "step"] == [0, 1]
    assert begun[0] == begun[1] == list(range(1, len(begun[0]) + 1))


def test_a_command_that_does_not_train_says_that_nothing_was_recorded(tmp_path: Path) -> None:
    done = trine_trace_run(tmp_path, "--", sys.executable, "-c", "print('hello')")

    assert (done.returncode, done.stdout) == (0, "hello\n")
    assert done.stderr.startswith("trine: nothing was recorded. Is trine-tools installed")


def test_a_command_that_a_signal_ends_ends_as_in_a_shell(tmp_path: Path) -> None:
    done = trine_trace_run(tmp_path, "--", "sh", "-c", "kill -TERM $$")

    assert done.returncode == 128 + 15


def test_a_command_that_does_not_exist_is_one_sentence(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["trace", "run", "--out", str(tmp_path), "--", "no-such"])

    assert result.exit_code == 1
    assert result.stderr == "Error: no-such cannot be started: No such file or directory.\n"


@pytest.mark.parametrize("steps", ["x", "-3", "5-2", "1-", "1-2-3"])
def test_steps_that_are_none_are_a_usage_error(tmp_path: Path, steps: str) -> None:
    result = CliRunner().invoke(main, ["trace", "run", f"--steps={steps}", "--", "true"])

    assert result.exit_code == 2
    assert "neither the number of a step nor a first and a last one" in result.stderr

"""A recorded training run in which rank 1 stops coming in the third step.

Started as `python stuck.py FOLDER kill|leave|other` on every rank of a gloo job: rank 1 is
killed, or leaves the loop and goes on to something else, or skips a layer that rank 0 uses.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trine.core import tracing
from trine.distributed import init_process_group
from trine.distributed.fsdp import fully_shard
from trine.tools.tracing import Recorder


class Net(nn.Module):
    """Three layers, of which one can be skipped."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.skipped: int | None = None

    def forward(self, x: Tensor) -> Tensor:
        """All layers, one after the other."""
        for number, layer in enumerate(self.layers):
            x = x if number == self.skipped else torch.tanh(layer(x))
        return x


def wait_until_written(path: Path, name: str) -> None:
    """Return when an event of a new name is in the file, and so is all that was before it."""
    deadline = time.monotonic() + 60
    while name.encode() not in path.read_bytes():
        assert time.monotonic() < deadline, f"{name!r} was not written within a minute"
        time.sleep(0.01)


def main(folder: Path, fault: str) -> None:
    """Train for five steps; rank 1 does something else in step 2."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    init_process_group("gloo", timeout=timedelta(seconds=10 if fault == "other" else 30))
    recorder = Recorder(folder, rank=rank, world_size=world_size)
    tracing.add_sink(recorder)
    torch.manual_seed(0)
    net = Net()
    for layer in net.layers:
        fully_shard(layer)
    fully_shard(net)
    for step in range(5):
        tracing.set_step(step)
        with tracing.span("step", category="step"):
            with tracing.span("load batch", category="io"):
                batch = torch.randn(4, 8)
            if step == 2 and rank == 1:
                if fault == "other":
                    net.skipped = 1
                else:
                    with tracing.span("evaluate"):
                        tracing.instant("evaluation begins")
                        wait_until_written(recorder.path, "evaluation begins")
                    if fault == "leave":
                        break
                    os.kill(os.getpid(), signal.SIGKILL)
            net(batch).sum().backward()
            net.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])

"""A training run in which one rank fails at a place of one's choice.

Started as `python faulty.py FAULT PLACE RANK COPIES TIMEOUT_S` on every rank of a gloo job.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trine.distributed import init_mesh, init_process_group
from trine.distributed.fsdp import clip_grad_norm_, fully_shard

FAULTS: dict[str, Callable[[], object]] = {
    "raise": lambda: raise_error(),
    "exit 0": lambda: os._exit(0),
    "exit 3": lambda: os._exit(3),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "sleep": lambda: time.sleep(600),
}
PLACES = ("init", "start", "first gather", "gather", "reduce", "clip", "end")


def raise_error() -> None:
    raise ValueError("planted")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        out: Tensor = self.head(x)
        return out


class Plan:
    """Which rank fails, how and where; steps are counted from 0."""

    def __init__(self, fault: str, place: str, rank: int) -> None:
        self.fault, self.place, self.rank = fault, place, rank
        self.step = 0

    def reached(self, place: str) -> None:
        if place == self.place and int(os.environ["RANK"]) == self.rank:
            print(f"fault planted at {time.monotonic()}", flush=True)
            FAULTS[self.fault]()

    def watch(self, layer: nn.Module) -> None:
        """Reach places inside of a step when `layer` computes."""

        def before(module: nn.Module, args: tuple[Tensor, ...]) -> Any:
            self.reached("first gather" if self.step == 0 else "gather" if self.step == 2 else "")
            if self.step == 2:
                hook: Any = args[0].register_hook
                hook(lambda grad: self.reached("reduce"))

        layer.register_forward_pre_hook(before)


def main(fault: str, place: str, rank: int, copies: int, timeout_s: float) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    plan = Plan(fault, place, rank)
    plan.reached("init")
    init_process_group("gloo", timeout=timedelta(seconds=timeout_s))
    shards = dist.get_world_size() // copies
    mesh = init_mesh({"copies": copies, "shards": shards} if copies > 1 else {"shards": shards})
    net = Net()
    plan.watch(net.layers[1])
    for layer in net.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    plan.reached("start")
    for plan.step in range(4):
        net(torch.randn(4, 8)).sum().backward()
        if plan.step == 2:
            plan.reached("clip")
        clip_grad_norm_(net.parameters(), 1.0)
        net.zero_grad()
    plan.reached("end")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), float(sys.argv[5]))

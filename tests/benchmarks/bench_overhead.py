"""What the engine itself costs per parameter group and step: no transport, tiny tensors.

    python tests/benchmarks/bench_overhead.py [--world 8] [--groups 8] [--params 12]

torch's fake process group pretends to be a world of `--world` ranks. Each contestant's
step is timed in turn, in CPU time of the process; the same model without sharding is
taken off, so that what is left is the cost of sharding. Exits with 1 over the limit.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP1
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from trine.distributed.fsdp import FullyShardedDataParallel, fully_shard

# For groups of 12 parameters in a world of 8: ours, torch's, and the most that ours may cost.
PAIRS = (("trine", "torch FSDP2", 0.35), ("trine FSDP", "torch FSDP1", 0.30))


class Group(nn.Module):
    """So many parameters of 16 elements, each used once."""

    def __init__(self, params: int) -> None:
        super().__init__()
        self.params = nn.ParameterList(torch.full((16,), 1.0) for _ in range(params))

    def forward(self, x: Tensor) -> Tensor:
        for param in self.params:
            x = x * param
        return x


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    for name, default in (("world", 8), ("groups", 8), ("params", 12), ("steps", 60)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("fake", rank=0, world_size=options.world, store=FakeStore())
    mesh = init_device_mesh("cpu", (options.world,))
    original = nn.Sequential(*(Group(options.params) for _ in range(options.groups)))

    def sharded(shard: Callable[..., object]) -> nn.Module:
        model = copy.deepcopy(original)
        for group in model:
            shard(group, mesh=mesh)
        shard(model, mesh=mesh)
        return model

    def wrapped(wrapper: Callable[..., nn.Module], **options: object) -> nn.Module:
        model = copy.deepcopy(original)
        for position, group in enumerate(model):
            model[position] = wrapper(group, **options)
        return wrapper(model, **options)

    models = {
        "whole": copy.deepcopy(original),
        "torch FSDP2": sharded(torch_fully_shard),
        "trine": sharded(fully_shard),
        "torch FSDP1": wrapped(TorchFSDP1, device_id=torch.device("cpu"), use_orig_params=True),
        "trine FSDP": wrapped(FullyShardedDataParallel),
    }
    x = torch.ones(16)
    taken: dict[str, list[float]] = {name: [] for name in models}
    for step in range(-10, options.steps):
        for name, model in models.items():
            start = time.process_time()
            model(x).sum().backward()
            model.zero_grad()
            if step >= 0:
                taken[name].append(time.process_time() - start)
    medians = {name: statistics.median(times) for name, times in taken.items()}
    print(f"world {options.world} (fake), {options.groups} groups of {options.params} parameters")
    costs = {name: (medians[name] - medians["whole"]) / options.groups for name in models}
    over = False
    for ours, theirs, limit in PAIRS:
        ratio = costs[ours] / costs[theirs]
        print(f"{theirs:12} {costs[theirs] * 1e6:8.0f} us a group")
        print(f"{ours:12} {costs[ours] * 1e6:8.0f} us a group  ratio {ratio:.2f}, limit {limit}")
        over |= ratio > limit
    sys.exit(over)


if __name__ == "__main__":
    main()

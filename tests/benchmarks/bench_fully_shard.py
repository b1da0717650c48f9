"""What a sharded step costs next to torch's own FSDP2, FSDP1 and DDP, in the same processes.

    python tests/benchmarks/bench_fully_shard.py [--ranks 2] [--layers 8] [--width 512] ...

The contestants take turns step by step in one job, so that a busy machine slows all of
them. CPU time counts all threads of a rank; it is the figure to trust where cores are
shared. Bytes are what the loopback interface carried, divided by the ranks.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP1
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel

from trine.distributed.fsdp import fully_shard
from trine.distributed.testing import run_on_ranks


class Block(nn.Module):
    """A decoder block: causal attention and a feed-forward part."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = max(width // 64, 1)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, self.heads, -1).transpose(1, 2)
            for part in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        hidden: Tensor = self.down(nn.functional.gelu(self.up(self.norm2(x))))
        return x + hidden


class Decoder(nn.Module):
    """Embedding, blocks, head."""

    def __init__(self, layers: int, width: int, vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x)
        return logits


def _functional(shard: Callable[..., object]) -> Callable[[Decoder], nn.Module]:
    def wrap(model: Decoder) -> nn.Module:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for block in model.blocks:
            shard(block, mesh=mesh)
        shard(model, mesh=mesh)
        return model

    return wrap


def _fsdp1(model: Decoder) -> nn.Module:
    return TorchFSDP1(
        model,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        device_id=torch.device("cpu"),
        use_orig_params=True,
    )


CONTESTANTS: dict[str, Callable[[Decoder], nn.Module]] = {
    "torch FSDP2": _functional(torch_fully_shard),
    "trine": _functional(fully_shard),
    "torch FSDP1": _fsdp1,
    "DDP": DistributedDataParallel,
}


@dataclass
class Row:
    """Figures of one contestant on one rank."""

    cpu_s: list[float] = field(default_factory=list)
    wall_s: list[float] = field(default_factory=list)
    sent: list[int] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)


def _loopback_bytes() -> int:
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == "lo":
            return int(numbers.split()[8])
    return 0


def measure(
    names: list[str], layers: int, width: int, vocabulary: int, length: int, batch: int, steps: int
) -> dict[str, Row]:
    """Runs on every rank: the contestants take turns for `steps` steps after two to warm up."""
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    original = Decoder(layers, width, vocabulary)
    models = {name: CONTESTANTS[name](copy.deepcopy(original)) for name in names}
    optimizers = {
        name: torch.optim.AdamW(model.parameters(), lr=1e-4) for name, model in models.items()
    }
    rows = {name: Row() for name in names}
    for step in range(-2, steps):
        seed = step * dist.get_world_size() + dist.get_rank() + 1000
        tokens = torch.randint(
            vocabulary, (batch, length), generator=torch.Generator().manual_seed(seed)
        )
        for name, model in models.items():
            dist.barrier()
            sent, wall, cpu = _loopback_bytes(), time.perf_counter(), time.process_time()
            loss = nn.functional.cross_entropy(
                model(tokens).flatten(0, 1), tokens.roll(-1, 1).flatten()
            )
            loss.backward()  # type: ignore[no-untyped-call]  # torch's own
            optimizers[name].step()
            optimizers[name].zero_grad()
            cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
            dist.barrier()
            sent = (_loopback_bytes() - sent) // dist.get_world_size()
            if step >= 0:
                row = rows[name]
                row.cpu_s.append(cpu)
                row.wall_s.append(wall)
                row.sent.append(sent)
                row.losses.append(loss.item())
    return rows


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    for name, default in (
        ("ranks", 2),
        ("layers", 8),
        ("width", 512),
        ("vocabulary", 2048),
        ("length", 128),
        ("batch", 2),
        ("steps", 8),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--only", nargs="*", default=list(CONTESTANTS), choices=list(CONTESTANTS))
    options = parser.parse_args()
    by_rank = run_on_ranks(
        measure,
        options.ranks,
        options.only,
        options.layers,
        options.width,
        options.vocabulary,
        options.length,
        options.batch,
        options.steps,
        timeout_s=1800,
    )
    rows = by_rank[0]
    base = rows[options.only[0]]
    print(
        f"{options.layers} blocks of width {options.width}, {options.ranks} gloo ranks, "
        f"{options.steps} steps; medians of rank 0, ratios to {options.only[0]}"
    )
    heads = ("CPU ms", "ratio", "wall ms", "ratio", "MB sent", "ratio")
    print(" " * 12 + "".join(f" {head:>{8 - 2 * (i % 2)}}" for i, head in enumerate(heads)))
    for name, row in rows.items():
        print(
            f"{name:12}"
            f" {statistics.median(row.cpu_s) * 1e3:8.1f} {_ratio(row.cpu_s, base.cpu_s):6.2f}"
            f" {statistics.median(row.wall_s) * 1e3:8.1f} {_ratio(row.wall_s, base.wall_s):6.2f}"
            f" {statistics.median(row.sent) / 1e6:8.1f} {_ratio(row.sent, base.sent):6.2f}"
        )
        for ours, theirs in zip(row.losses, base.losses, strict=True):
            assert abs(ours - theirs) < 1e-4, f"{name} trains differently: {ours} and {theirs}"


def _ratio(figures: list[float] | list[int], base: list[float] | list[int]) -> float:
    return statistics.median(a / b for a, b in zip(figures, base, strict=True) if b)


if __name__ == "__main__":
    main()

"""What a sharded step costs next to torch's own, taking turns with it, against limits.

    python tests/benchmarks/bench_fully_shard.py [--pairs wrapper] [--cases small ...]
        [--rounds 8] [--also DDP ...]

Two pairs: `fully_shard` and torch's FSDP2, our wrapper and torch's FSDP1. The contestants take
turns step by step, so that a busy machine slows all of them, each in processes of its own: in
shared ones, either would find in the allocator what the other has just freed. CPU time counts all
threads of all ranks; it is the figure to trust where cores are shared. Bytes are what the ranks
wrote to their sockets, by the kernel's count. Peak memory is what torch's allocator had given
out at most at once, with parameters, gradients, optimizer state and activations, in a step of
its own.

Exits with 1 if a limit is broken: bytes and memory are the same in every run; CPU time must
be over its limit in three rounds of four.
"""

from __future__ import annotations

import argparse
import copy
import ctypes
import gc
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

# torch's profiler announces each start and stop on stderr unless told to be quiet; and its
# allocator warns of what was there before it began to count.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._profiler import _EventType
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch's stubs
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP1
from torch.distributed.fsdp import MixedPrecisionPolicy as TorchMixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

from trine.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    fully_shard,
)
from trine.distributed.testing import run_on_ranks

VOCABULARY, LENGTH, BATCH = 2048, 128, 2
_LONGEST_TURN = timedelta(minutes=10)


@dataclass(frozen=True)
class Case:
    """A decoder of so many blocks on so many ranks.

    Attributes:
        copies: how many copies of the model the ranks hold between them.
        mixed: gather in bf16 and reduce in fp32; else both in fp32.
    """

    ranks: int
    layers: int
    width: int
    copies: int = 1
    mixed: bool = False

    def mesh(self) -> DeviceMesh:
        """The ranks, as copies of shards if there are several."""
        if self.copies == 1:
            return init_device_mesh("cpu", (self.ranks,))
        return init_device_mesh(
            "cpu", (self.copies, self.ranks // self.copies), mesh_dim_names=("copy", "shard")
        )

    def least_bytes(self, blocks: int, rest: int) -> float:
        """Bytes each rank must send in a step, on average.

        Blocks are gathered for forward and for backward, the rest once; all is reduced to
        one rank each, then all-reduced over the copies.

        Args:
            blocks: elements of parameters in blocks.
            rest: elements of the others.
        """
        gathered, reduced = 2 if self.mixed else 4, 4
        shards = self.ranks // self.copies
        sent = (shards - 1) / shards * ((2 * gathered + reduced) * blocks)
        sent += (shards - 1) / shards * ((gathered + reduced) * rest)
        copied = 2 * (self.copies - 1) / self.copies * reduced * (blocks + rest) / shards
        return sent + copied


@dataclass(frozen=True)
class Pair:
    """Ours and torch's, with the limits of ours.

    Attributes:
        reference: the contestant to compare with.
        ours: the contestant to judge.
        cpu: the most CPU time, of the reference's.
        least_bytes: the most bytes, of the minimum; None for no limit.
        bytes: the most bytes, of the reference's; None for no limit.
        peak: the most memory, of the reference's.
        cases: those that both can train.
    """

    reference: str
    ours: str
    cpu: float
    least_bytes: float | None
    bytes: float | None
    peak: float
    cases: tuple[str, ...]


CASES = {
    "tiny": Case(ranks=2, layers=4, width=64),
    "tiny-4": Case(ranks=4, layers=4, width=64),
    "small": Case(ranks=2, layers=8, width=512),
    "small-4": Case(ranks=4, layers=8, width=512),
    "small-hsdp": Case(ranks=4, layers=8, width=512, copies=2),
    "small-bf16": Case(ranks=2, layers=8, width=512, mixed=True),
    "wide": Case(ranks=2, layers=4, width=1024),
}

PAIRS = {
    "fully_shard": Pair("torch FSDP2", "trine", 1.00, 1.01, None, 1.00, tuple(CASES)),
    "wrapper": Pair(
        "torch FSDP1", "trine FSDP", 0.85, None, 0.75, 0.95, ("tiny", "small", "small-4", "wide")
    ),
}


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

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x)
        return logits


def _functional(
    shard: Callable[..., object], policy: Callable[..., object]
) -> Callable[[Decoder, Case], nn.Module]:
    def wrap(model: Decoder, case: Case) -> nn.Module:
        mesh = case.mesh()
        options = (
            {"mp_policy": policy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)}
            if case.mixed
            else {}
        )
        for block in model.blocks:
            shard(block, mesh=mesh, **options)
        shard(model, mesh=mesh, **options)
        return model

    return wrap


def _wrapper(wrapper: Callable[..., nn.Module]) -> Callable[[Decoder, Case], nn.Module]:
    return lambda model, case: wrapper(
        model,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        device_id=torch.device("cpu"),
        use_orig_params=True,
    )


CONTESTANTS: dict[str, Callable[[Decoder, Case], nn.Module]] = {
    "torch FSDP2": _functional(torch_fully_shard, TorchMixedPrecisionPolicy),
    "trine": _functional(fully_shard, MixedPrecisionPolicy),
    "torch FSDP1": _wrapper(TorchFSDP1),
    "trine FSDP": _wrapper(FullyShardedDataParallel),
    "DDP": lambda model, case: DistributedDataParallel(model),
}


@dataclass
class Row:
    """Figures of one contestant on one rank."""

    peak_bytes: int = 0
    cpu_s: list[float] = field(default_factory=list)
    wall_s: list[float] = field(default_factory=list)
    sent: list[int] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)


class Training:
    """One contestant's model and optimizer."""

    def __init__(self, name: str, original: Decoder, case: Case) -> None:
        self.model = CONTESTANTS[name](copy.deepcopy(original), case)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)

    def step(self, tokens: Tensor) -> float:
        """One whole step; returns its loss."""
        logits = self.model(tokens).float()
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens.roll(-1, 1).flatten())
        loss.backward()  # type: ignore[no-untyped-call]  # torch's own
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()


def _batch(step: int) -> Tensor:
    seed = step * dist.get_world_size() + dist.get_rank() + 1000
    return torch.randint(VOCABULARY, (BATCH, LENGTH), generator=torch.Generator().manual_seed(seed))


def _sent_bytes() -> int:
    """What this process has written so far, of which nearly all goes to gloo's sockets."""
    try:
        lines = Path("/proc/self/io").read_text().splitlines()
    except FileNotFoundError:
        return 0  # not on Linux
    return next(int(line.split()[1]) for line in lines if line.startswith("wchar"))


def peak_bytes(name: str, original: Decoder, case: Case) -> int:
    """The most memory that tensors take at once in a third step, all that lives on included."""
    _count_frees_of_all_threads()
    mark = 12_345_677  # of this odd size there is one block, between the second step and the third
    gc.collect()  # what another contestant has left behind must not be freed in our account
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        torch.empty(mark, dtype=torch.uint8)
        training = Training(name, original, case)
        for step in range(3):
            tokens = _batch(step)
            if step == 2:
                gc.collect()
                torch.empty(mark, dtype=torch.uint8)
            training.step(tokens)
    changes: list[tuple[int, int, int]] = []
    events = list(recorded.profiler.kineto_results.experimental_event_tree())
    while events:
        event = events.pop()
        events += event.children
        if event.tag == _EventType.Allocation:
            fields = event.extra_fields
            changes.append((event.start_time_ns, fields.alloc_size, fields.total_allocated))
    changes.sort(key=lambda change: change[0])
    before, second = [at for at, (_, nbytes, _) in enumerate(changes) if nbytes == -mark]
    return max(total for _, _, total in changes[second:]) - changes[before][2]


def _count_frees_of_all_threads() -> None:
    """Have torch's allocator count every tensor that is freed, on whatever thread.

    The profiler alone misses those of which a thread of gloo is the last user: these seem to
    live for ever, a few or many of them, as the threads happen to take turns.
    """
    for library in Path(torch.__file__).parent.glob("lib/libc10.*"):
        counts = ctypes.c_bool.in_dll(
            ctypes.CDLL(str(library)), "FLAGS_caffe2_report_cpu_memory_usage"
        )
        counts.value = True


@dataclass(frozen=True)
class Turns:
    """Whose step it is: one job of `ranks` after the other, and each rank when its job's turn is.

    Attributes:
        port: of a store on this machine that outlives the jobs.
        ranks: of each job.
    """

    port: int
    ranks: int

    def store(self) -> TCPStore:
        """To be connected to once by each rank."""
        return TCPStore("127.0.0.1", self.port, is_master=False, timeout=_LONGEST_TURN)

    def take(self, store: TCPStore, turn: int) -> None:
        """Wait until all ranks have ended the turn before this one."""
        if turn:
            store.wait([f"ended {turn - 1}"])

    def end(self, store: TCPStore, turn: int) -> None:
        """Be done with this rank's part of a turn."""
        if store.add(f"ranks done {turn}", 1) == self.ranks:
            store.set(f"ended {turn}", "")


def measure(name: str, position: int, of: int, turns: Turns, case: Case, rounds: int) -> Row:
    """Runs on every rank: `rounds` after two to warm up, `of` contestants by turns.

    Args:
        name: which of the contestants.
        position: its place among them.
        of: how many there are.
        turns: whose step it is.
        case: what to train.
        rounds: how many steps to measure.
    """
    warnings.simplefilter("ignore")
    store = turns.store()
    torch.manual_seed(0)
    original = Decoder(case.layers, case.width)
    turns.take(store, position)
    row = Row(peak_bytes(name, original, case))
    training = Training(name, original, case)
    turns.end(store, position)
    for step in range(-2, rounds):
        tokens = _batch(step)
        # Whoever comes second finds the caches as the first has left them.
        place = position if step % 2 else of - 1 - position
        turn = (step + 3) * of + place
        turns.take(store, turn)
        dist.barrier()
        sent, wall, cpu = _sent_bytes(), time.perf_counter(), time.process_time()
        loss = training.step(tokens)
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
        sent = _sent_bytes() - sent
        turns.end(store, turn)
        if step >= 0:
            row.cpu_s.append(cpu)
            row.wall_s.append(wall)
            row.sent.append(sent)
            row.losses.append(loss)
    return row


def race(names: list[str], case: Case, rounds: int) -> dict[str, list[Row]]:
    """The figures of each contestant, rank by rank; each is a job of its own."""
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    turns = Turns(server.port, case.ranks)

    def job(position: int) -> list[Row]:
        about = names[position], position, len(names), turns, case, rounds
        return run_on_ranks(measure, case.ranks, *about, timeout_s=1800)

    with ThreadPoolExecutor(len(names)) as jobs:
        return dict(zip(names, jobs.map(job, range(len(names))), strict=True))


@dataclass
class Figures:
    """What all ranks took together, round by round."""

    cpu_s: list[float]
    wall_s: list[float]
    sent: float
    peak_bytes: int

    @classmethod
    def of(cls, rows: list[Row]) -> Figures:
        """Those of one contestant; `rows` has one for each rank."""
        return cls(
            [sum(times) for times in zip(*(row.cpu_s for row in rows), strict=True)],
            [max(times) for times in zip(*(row.wall_s for row in rows), strict=True)],
            statistics.median(map(sum, zip(*(row.sent for row in rows), strict=True))) / len(rows),
            max(row.peak_bytes for row in rows),
        )


def report(name: str, case: Case, pair: Pair, rows: dict[str, list[Row]]) -> list[str]:
    """Print one line for each contestant; return the limits that ours has broken."""
    with torch.device("meta"):
        model = Decoder(case.layers, case.width)
    blocks = sum(param.numel() for param in model.blocks.parameters())
    least = case.least_bytes(blocks, sum(param.numel() for param in model.parameters()) - blocks)
    figures = {who: Figures.of(ranks) for who, ranks in rows.items()}
    base = figures[pair.reference]
    broken: list[str] = []
    for who, each in figures.items():
        cpu, wall = _ratios(each.cpu_s, base.cpu_s), _ratios(each.wall_s, base.wall_s)
        sent, peak = each.sent / least, each.peak_bytes / base.peak_bytes
        print(
            f"{name:12}{who:12}"
            f" {statistics.median(each.cpu_s) * 1e3:9.1f} {statistics.median(cpu):6.3f}"
            f" {statistics.median(each.wall_s) * 1e3:9.1f} {statistics.median(wall):6.3f}"
            f" {each.sent / 1e6:9.2f} {sent:6.3f}"
            f" {each.peak_bytes / 2**20:9.1f} {peak:6.3f}",
            flush=True,
        )
        if who != pair.ours:
            continue
        if sorted(cpu)[len(cpu) // 4] > pair.cpu:
            broken.append(f"{name}: CPU time {statistics.median(cpu):.3f}, limit {pair.cpu}")
        if pair.least_bytes is not None and sent > pair.least_bytes:
            broken.append(f"{name}: bytes {sent:.3f} of the minimum, limit {pair.least_bytes}")
        if pair.bytes is not None and each.sent > pair.bytes * base.sent:
            broken.append(f"{name}: bytes {each.sent / base.sent:.3f}, limit {pair.bytes}")
        if round(peak, 2) > pair.peak:  # the limit has two digits
            broken.append(f"{name}: peak memory {peak:.3f}, limit {pair.peak}")
    for who, ranks in rows.items():
        for row, reference in zip(ranks, rows[pair.reference], strict=True):
            for ours, theirs in zip(row.losses, reference.losses, strict=True):
                # bf16 has 8 bits.
                allowed = 2**-8 * theirs if case.mixed else 1e-4
                assert abs(ours - theirs) < allowed, f"{who} trains differently: {ours}, {theirs}"
    return broken


def _ratios(figures: list[float], base: list[float]) -> list[float]:
    return [a / b for a, b in zip(figures, base, strict=True)]


def main() -> None:
    """Measure, print, and judge."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--pairs", nargs="*", default=list(PAIRS), choices=list(PAIRS))
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=list(CASES))
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--also", nargs="*", default=[], choices=list(CONTESTANTS))
    options = parser.parse_args()
    print("A step: medians over rounds; CPU of all ranks, bytes sent and peak of one.")
    heads = ("CPU ms", "ratio", "wall ms", "ratio", "MB sent", "/least", "peak MiB", "ratio")
    print(" " * 24 + "".join(f" {head:>{9 - 3 * (i % 2)}}" for i, head in enumerate(heads)))
    broken: list[str] = []
    chosen = [
        (PAIRS[pair], name)
        for pair in options.pairs
        for name in PAIRS[pair].cases
        if name in options.cases
    ]
    for position, (pair, name) in enumerate(chosen):
        case = CASES[name]
        progress = f"({position + 1} of {len(chosen)}) measuring {pair.ours}, {name}"
        print(f"{progress}, {case.ranks} ranks", file=sys.stderr, flush=True)
        names = list(dict.fromkeys([pair.reference, pair.ours, *options.also]))
        broken += report(name, case, pair, race(names, case, options.rounds))
    print("\n".join(f"OVER THE LIMIT {line}" for line in broken) or "all within the limits")
    sys.exit(bool(broken))


if __name__ == "__main__":
    main()

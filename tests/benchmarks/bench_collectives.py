"""What collectives take over MPI next to gloo, in the same processes, against limits.

    python tests/benchmarks/bench_collectives.py [--ranks 2 4] [--kib 1 64 ...] [--rounds 9]

mpiexec starts the ranks; each has a group over MPI and one over gloo, which take turns round
by round, so that a busy machine slows both. A size is that of the whole: what an all-gather
fills and a reduce-scatter takes. `engine` is what `fully_shard` calls, made for each backend;
`c10d` is torch's own function over the group.

Exits with 1 if a limit is missed, in three rounds (or small calls) of four. The load of the
machine stands beside the figures, since ranks that outnumber idle cores wait for each other's
turns.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
# With MPI's group as the default one, torch's gloo announces each connection of another.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

import torch
import torch.distributed as dist

from trine.distributed._fsdp.buffers import BufferPool
from trine.distributed._fsdp.collectives import comm_for
from trine.distributed.testing import run_on_ranks

KIB = (1, 16, 256, 4096, 65536)
LIMIT, LIMIT_LARGE = 1.0, 3.0  # gloo / mpi, the second for the largest with torch's functions
LARGE_KIB = 65536
SMALL_LIMIT_US = 25.0  # for an all-reduce of 16 bytes on two ranks
SMALL_BYTES, SMALL_CALLS = 16, 2000
BEHIND_KIB, PRODUCT, TRIALS, COMPLETE = 16384, 2048, 10, 9
SAMPLE_S = 0.02  # a round lasts about this long, whatever the size
MOST_CALLS = 50

# torch 2.13 renamed these and warns about the old names; 2.11 has only the old ones.
_by_name: dict[str, Callable[..., object]] = vars(dist)
all_gather_single = _by_name.get("all_gather_single") or _by_name["all_gather_into_tensor"]
reduce_scatter_single = _by_name.get("reduce_scatter_single") or _by_name["reduce_scatter_tensor"]


@dataclass(frozen=True)
class Cell:
    """One line of the table.

    Attributes:
        through: "engine" or "c10d".
        operation: "all-gather" or "reduce-scatter".
        kib: of the whole.
    """

    through: str
    operation: str
    kib: int

    @property
    def limit(self) -> float:
        """The least ratio of times, gloo to mpi."""
        return LIMIT_LARGE if self.kib >= LARGE_KIB and self.through == "c10d" else LIMIT

    def __str__(self) -> str:
        size = f"{self.kib // 1024} MiB" if self.kib >= 1024 else f"{self.kib} KiB"
        return f"{self.operation} of {size} ({self.through})"


Times = dict[str, list[float]]  # by backend, seconds per call, round by round


@dataclass(frozen=True)
class Figures:
    """Of one rank."""

    library: str
    times: dict[Cell, Times]


def contestant(cell: Cell, group: dist.ProcessGroup) -> Callable[[], None]:
    """One call of the operation over a group, waited for."""
    ranks = group.size()
    numel = cell.kib * 256 // ranks
    part, whole = torch.ones(numel), torch.ones(ranks, numel)
    if cell.through == "c10d":
        if cell.operation == "all-gather":
            return partial(_call, all_gather_single, whole.view(-1), part, group)
        return partial(_call, reduce_scatter_single, part, whole.view(-1), group)
    comm = comm_for(group, BufferPool(), "cpu")
    if cell.operation == "all-gather":
        # Where the engine keeps its shards: in a place of their own.
        out = whole[: ranks - 1] if comm.gathers_others_only(part) else whole
        return lambda: comm.all_gather(out, part).wait()

    def reduce_scatter() -> None:
        rows = comm.pool.acquire((ranks, numel), torch.float32, torch.device("cpu"))
        comm.reduce_scatter(rows).sum_into(part, 1.0)

    return reduce_scatter


def _call(
    function: Callable[..., object],
    out: torch.Tensor,
    given: torch.Tensor,
    group: dist.ProcessGroup,
) -> None:
    function(out, given, group=group)


def take_turns(calls: dict[str, Callable[[], None]], rounds: int) -> Times:
    """Seconds per call on this rank, after a round to warm up."""
    times: Times = {name: [] for name in calls}
    count = 1
    for turn in range(-1, rounds):
        # Whoever comes second finds the caches as the first has left them.
        for name in calls if turn % 2 else reversed(calls):
            dist.barrier()
            started = time.perf_counter()
            for _ in range(count):
                calls[name]()
            times[name].append((time.perf_counter() - started) / count)
        if turn == -1:
            count = _agreed_count(min(each[0] for each in times.values()))
            times = {name: [] for name in calls}
    return times


def _agreed_count(seconds: float) -> int:
    count = torch.tensor([max(1, min(MOST_CALLS, int(SAMPLE_S / seconds)))])
    dist.broadcast(count, 0)
    return int(count)


def measure(cells: Sequence[Cell], rounds: int) -> Figures:
    """Runs on every rank, over MPI."""
    from mpi4py import MPI

    gloo = dist.new_group(backend="gloo")
    groups = {"gloo": gloo, "mpi": dist.group.WORLD}
    times = {}
    for cell in cells:
        calls = {
            name: contestant(cell, group)
            for name, group in groups.items()
            if isinstance(group, dist.ProcessGroup)
        }
        times[cell] = take_turns(calls, rounds)
    library = MPI.Get_library_version().strip("\0").splitlines()[0].split(",")[0]
    return Figures(" ".join(library.split()), times)


def small_all_reduce() -> list[float]:
    """Runs on every rank: seconds for each of many all-reduces of 16 bytes."""
    tensor = torch.zeros(SMALL_BYTES // 4)
    times = []
    for _ in range(SMALL_CALLS):
        started = time.perf_counter()
        dist.all_reduce(tensor)
        times.append(time.perf_counter() - started)
    return times[SMALL_CALLS // 10 :]


def behind_a_product() -> list[tuple[bool, float]]:
    """Runs on every rank: whether an all-gather was complete when a product was; its seconds."""
    group = dist.group.WORLD
    assert isinstance(group, dist.ProcessGroup)
    part = torch.ones(BEHIND_KIB * 256 // group.size())
    whole = torch.empty(BEHIND_KIB * 256)
    a, b = torch.ones(PRODUCT, PRODUCT), torch.ones(PRODUCT, PRODUCT)
    product = torch.mm(a, b)
    trials = []
    for _ in range(TRIALS + 1):
        dist.barrier()
        started = time.perf_counter()
        work = all_gather_single(whole, part, group=group, async_op=True)
        torch.mm(a, b, out=product)
        ended = time.perf_counter()
        assert isinstance(work, dist.Work)
        trials.append((work.is_completed(), ended - started))
        work.wait()
    return trials[1:]  # the first touches fresh memory


def load() -> str:
    """What else the machine does."""
    return f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"


def report(ranks: int, by_rank: Sequence[Figures]) -> list[str]:
    """Print a line for each cell; return the limits that were missed."""
    missed = []
    for cell in by_rank[0].times:
        # A collective takes as long as on the rank that is last.
        gloo, mpi = (
            [max(each) for each in zip(*(rank.times[cell][name] for rank in by_rank), strict=True)]
            for name in ("gloo", "mpi")
        )
        ratios = sorted(a / b for a, b in zip(gloo, mpi, strict=True))
        ratio = statistics.median(ratios)
        print(
            f"{cell.through:8}{cell.operation:16}{ranks:5}{cell.kib:8}"
            f"{statistics.median(gloo) * 1e6:12.0f}{statistics.median(mpi) * 1e6:12.0f}"
            f"{ratio:8.2f}{cell.limit:7.1f}",
            flush=True,
        )
        if ratios[len(ratios) * 3 // 4] < cell.limit:
            missed.append(
                f"{cell} on {ranks} ranks: gloo takes {ratio:.2f} times as long as mpi, and should "
                f"take at least {cell.limit:g} times as long."
            )
    return missed


def report_small() -> list[str]:
    """Print what a small all-reduce takes; return the limit if it was missed."""
    by_rank = run_on_ranks(small_all_reduce, 2, backend="mpi", timeout_s=600)
    quarters = [max(each) * 1e6 for each in zip(*map(statistics.quantiles, by_rank), strict=True)]
    least, median, most = (f"{us:.1f}" for us in quarters)
    what = f"all-reduce of {SMALL_BYTES} bytes on 2 ranks"
    print(f"{what}: {median} us, half of them {least} to {most} ({load()})")
    if quarters[0] <= SMALL_LIMIT_US:
        return []
    return [f"{what} takes {median} us, and should take {SMALL_LIMIT_US:g} us at most."]


def report_behind() -> list[str]:
    """Print how often an operation is complete behind a product; return a missed limit."""
    by_rank = run_on_ranks(behind_a_product, 2, backend="mpi", timeout_s=600)
    complete = min(sum(done for done, _ in trials) for trials in by_rank)
    product_ms = statistics.median(s for trials in by_rank for _, s in trials) * 1e3
    what = f"all-gather of {BEHIND_KIB // 1024} MiB behind a product of {product_ms:.0f} ms"
    print(f"{what} on 2 ranks: complete in {complete} of {TRIALS} trials ({load()})")
    if complete >= COMPLETE:
        return []
    return [f"The {what} was complete in {complete} of {TRIALS} trials, {COMPLETE} are expected."]


def main() -> None:
    """Measure, print, and judge."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4])
    parser.add_argument("--kib", type=int, nargs="*", default=KIB, help="sizes of the whole")
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    cells = [
        Cell(through, operation, kib)
        for through in ("engine", "c10d")
        for operation in ("all-gather", "reduce-scatter")
        for kib in options.kib
    ]
    missed = report_small() + report_behind()
    heads = ("ranks", "KiB", "gloo us", "mpi us", "ratio", "limit")
    for ranks in options.ranks:
        before = load()
        by_rank = run_on_ranks(measure, ranks, cells, options.rounds, backend="mpi", timeout_s=1800)
        print(f"\n{by_rank[0].library}; {ranks} ranks; {before} before, {load()} after")
        widths = (5, 8, 12, 12, 8, 7)
        print(" " * 24 + "".join(f"{h:>{w}}" for h, w in zip(heads, widths, strict=True)))
        missed += report(ranks, by_rank)
    for each in missed:
        print(f"MISSED: {each}")
    sys.exit(bool(missed))


if __name__ == "__main__":
    main()

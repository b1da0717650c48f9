"""What preparing batches ahead saves: an epoch with a prefetch_fn, against doing all in turn.

Run as `python tests/benchmarks/bench_loader.py`. Every round runs an epoch of each kind, so
load from elsewhere falls on all alike. The work is a wait, which leaves the cores to others:
what is measured is the overlap, and what the loader itself costs.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from trine.core import get_device

LIMIT = 0.6


def epoch_s(loader: Iterable[Any], work_s: float) -> float:
    """Seconds that a loop takes whose step takes `work_s`."""
    started = time.perf_counter()
    for _ in loader:
        time.sleep(work_s)
    return time.perf_counter() - started


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="how often each kind is run")
    parser.add_argument("--batches", type=int, default=100, help="how many batches an epoch has")
    parser.add_argument("--work-ms", type=float, default=10.0, help="of the step and prefetch_fn")
    given = parser.parse_args()
    work_s = given.work_ms / 1e3

    def prepare(batch: Tensor) -> Tensor:
        time.sleep(work_s)
        return batch

    device = get_device("cpu")
    loader = DataLoader(TensorDataset(torch.ones(given.batches, 8)), batch_size=1)
    kinds: dict[str, Callable[[], Iterable[Any]]] = {"in turn": lambda: map(prepare, loader)}
    for depth in (1, 2, 4):
        wrapped = device.dataloader_to_device(loader, prepare, depth=depth)
        kinds[f"depth {depth}"] = lambda wrapped=wrapped: wrapped  # type: ignore[misc]  # bound now
    times_s: dict[str, list[float]] = {kind: [] for kind in kinds}
    for _ in range(given.rounds):
        for kind, make in kinds.items():
            times_s[kind].append(epoch_s(make(), work_s))

    print(
        f"Python {platform.python_version()}, torch {torch.__version__}, {given.rounds} rounds of "
        f"{given.batches} batches, {given.work_ms:g} ms each for prefetch_fn and for the step"
    )
    line = "{:<10}{:>10}{:>10}{:>8}   {}"
    print(line.format("prepared", "median s", "of serial", "limit", "").rstrip())
    serial = statistics.median(times_s["in turn"])
    for kind, each in times_s.items():
        share = statistics.median(each) / serial
        limit, verdict = "-", ""
        if kind == "depth 2":
            limit, verdict = f"{LIMIT}", "within" if share <= LIMIT else "over"
        print(
            line.format(
                kind, f"{statistics.median(each):.3f}", f"{share:.3f}", limit, verdict
            ).rstrip()
        )


if __name__ == "__main__":
    main()

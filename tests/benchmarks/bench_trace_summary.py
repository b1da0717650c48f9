"""What it takes to sum up the recordings of a long run: time, and memory of all processes.

Run as `python tests/benchmarks/bench_trace_summary.py`. The recordings are made up, but of
the shape of a real run: layers within forward and backward, collectives of three events
each, counters of memory. By default a tenth of the size that the limits are for, of which
it then may take a tenth of the time; `--steps 1000` for all of it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import torch
from torch import Tensor

from trine.tools.tracing.rank_file import Encoder, rank_file_name
from trine.tools.tracing.schema import DTYPES, KINDS, LABEL, STORED, TEXT_COLUMNS, Header

LIMIT_S = 60.0
LIMIT_STEPS = 1000
LIMIT_BYTES = 2 << 30
START_S = 10.0
"""What a smaller size may take beside its share, for Python and torch to start."""

US = 1000
STEP_US = 100_000
UNITS = 40
COLLECTIVES = 400
"""Of a step, so ten for each unit."""

EVENTS = 2000
RUN = 4096


class Row(NamedTuple):
    """One event of a step, in microseconds from its beginning."""

    kind: str
    name: str
    category: str
    start: float
    end: float
    unit: str = ""
    operation: str = ""
    sequence: int = -1
    nbytes: int = 0
    value: float = 0.0


def step_rows() -> list[Row]:
    """The events of a step, by their ends."""
    rows = [
        Row("span", "step", "step", 0, STEP_US - 100),
        Row("span", "load batch", "io", 0, 4_000),
        Row("span", "forward", "compute", 4_000, 34_000),
        Row("span", "backward", "compute", 34_000, 90_000),
        Row("span", "optimizer", "compute", 90_000, 99_000),
    ]
    apart = 85_000 / COLLECTIVES
    for number in range(COLLECTIVES):
        unit, start = f"blocks.{number % UNITS}", 4_100 + number * apart
        name = "reduce_scatter" if number % 3 == 2 else "all_gather"
        rows += [
            Row("instant", f"start {name}", "comm", start, start, unit, name, number),
            Row("span", f"wait {name}", "comm", start + 120, start + 150, unit, name, number),
            Row("async", name, "comm", start, start + 150, unit, name, number, 1 << 20),
        ]
    layers = 300
    for number in range(layers):
        start = 4_050 + number * 85_000 / layers
        rows.append(Row("span", "layer", "user", start, start + 250, f"blocks.{number % UNITS}"))
    for number in range(EVENTS - len(rows)):
        start = 100 + number * STEP_US / EVENTS
        value = float(number << 20)
        rows.append(Row("counter", "memory.unsharded", "mem", start, start, value=value))
    return sorted(rows, key=lambda row: row.end)


def write_rank(folder: Path, rank: int, world_size: int, steps: int) -> None:
    """Write the recording of one rank; all but the last are a little early everywhere."""
    rows = step_rows()
    texts = [""]
    labels: list[list[int]] = []
    label_of: list[int] = []
    for row in rows:
        named = {
            "name": row.name,
            "category": row.category,
            "unit": row.unit,
            "group": "0" if row.operation else "",
            "operation": row.operation,
        }
        places = {name: text for name, text in named.items() if name in TEXT_COLUMNS}
        for text in places.values():
            if text not in texts:
                texts.append(text)
        label = [
            KINDS.index(row.kind) if name == "kind" else texts.index(places.get(name, ""))
            for name in LABEL
        ]
        if label not in labels:
            labels.append(label)
        label_of.append(labels.index(label))
    one = {
        "sequence": torch.tensor([row.sequence for row in rows]),
        "nbytes": torch.tensor([row.nbytes for row in rows]),
        "start_ns": torch.tensor([round(row.start * US) for row in rows]),
        "end_ns": torch.tensor([round(row.end * US) for row in rows]),
        "value": torch.tensor([row.value for row in rows], dtype=torch.float64),
        "label": torch.tensor(label_of),
    }
    number = torch.arange(steps).repeat_interleave(len(rows))
    every = {name: column.repeat(steps) for name, column in one.items()}
    shift = number * (STEP_US * US) + 10**12
    late = (every["sequence"] >= 0) & (rank == world_size - 1)
    every["start_ns"] += shift + late * (130 * US)
    every["end_ns"] += shift + late * (130 * US)
    every["sequence"] = torch.where(
        every["sequence"] >= 0, every["sequence"] + number * COLLECTIVES + 1, -1
    )
    every |= {
        "step": number,
        "enqueue_ns": every["start_ns"],
        "args": torch.full_like(number, -1),
    }
    header = Header(rank, world_size, "host", "clock", 1, "3", "2", 0, 0)
    encoder = Encoder()
    with (folder / rank_file_name(rank)).open("wb") as file:
        file.write(encoder.header(header))
        for first in range(0, number.numel(), RUN):
            news = (texts[1:], [1], labels) if not first else ([], [], [])
            part = {name: every[name][first : first + RUN] for name in STORED}
            file.write(run_record(part, *news))
        encoder.held = number.numel()
        file.write(encoder.end(0, "closed"))


def run_record(
    columns: dict[str, Tensor], texts: list[str], threads: list[int], labels: list[list[int]]
) -> bytes:
    """The record of a run of events, as an `Encoder` makes it."""
    body = bytearray()
    for name, code in STORED.items():
        column = bytearray(columns[name].numel() * DTYPES[code].itemsize)
        torch.frombuffer(column, dtype=DTYPES[code]).copy_(columns[name])
        body += column
    head = {
        "record": "events",
        "count": columns["label"].numel(),
        "args": 0,
        "dropped": 0,
        "texts": texts,
        "threads": threads,
        "labels": labels,
        "nbytes": len(body),
    }
    return json.dumps(head).encode("ascii") + b"\n" + bytes(body)


def resident_bytes(pid: int) -> int:
    """Memory of a process and all that it started."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except (OSError, IndexError):  # it has ended
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE") + sum(
        resident_bytes(int(child)) for child in children
    )


def measure(folder: Path) -> tuple[float, int]:
    """Seconds and bytes that `trine trace summary` takes."""
    command = [sys.executable, "-m", "trine.tools", "trace", "summary", "--json", str(folder)]
    start = time.perf_counter()
    peak = 0
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        while process.poll() is None:
            peak = max(peak, resident_bytes(process.pid))
            time.sleep(0.02)
    if process.returncode:
        sys.exit(f"trine trace summary ended with status {process.returncode}.")
    return time.perf_counter() - start, peak


def main() -> None:
    """Make recordings, measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args()
    with TemporaryDirectory() as name:
        folder = Path(name)
        for rank in range(options.ranks):
            write_rank(folder, rank, options.ranks, options.steps)
        size = sum(file.stat().st_size for file in folder.iterdir())
        took_s, peak = measure(folder)
    limit_s = min(LIMIT_S, START_S + LIMIT_S * options.steps / LIMIT_STEPS)
    events = options.ranks * options.steps * EVENTS
    print(f"Python {platform.python_version()}, torch {torch.__version__}")
    print(
        f"{options.ranks} ranks x {options.steps} steps x {EVENTS} events = "
        f"{events / 1e6:.1f} million, {size / 2**20:.0f} MiB of files"
    )
    print(f"{took_s:.1f} s (limit {limit_s:.0f} s), {events / took_s / 1e6:.2f} million events/s")
    print(f"{peak / 2**20:.0f} MiB at most (limit {LIMIT_BYTES / 2**20:.0f} MiB)")
    if took_s > limit_s or peak > LIMIT_BYTES:
        sys.exit("over a limit")


if __name__ == "__main__":
    main()

"""Cores and memory: what of this machine the process may use."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import torch

from trine.core.doctor.cgroups import Limits, read_limits
from trine.core.doctor.checks import Check

__all__ = ["check_cores", "check_memory"]

_ONE_PROCESS = 256 * 2**20  # that has imported torch, before any model
_ENOUGH_SHARED = 256 * 2**20  # a few batches of images


def check_cores(environ: Mapping[str, str], limits: Limits | None = None) -> Iterator[Check]:
    """The cores this process may use, against the threads that torch will start."""
    machine = os.cpu_count() or 1
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else machine
    quota = (read_limits() if limits is None else limits).cores
    usable = allowed if quota is None else min(float(allowed), quota)
    threads = torch.get_num_threads()
    ranks = _positive(environ.get("LOCAL_WORLD_SIZE")) or 1
    details = {
        "machine": machine,
        "affinity": allowed,
        "quota": quota,
        "usable": usable,
        "torch_threads": threads,
        "local_world_size": ranks,
        "OMP_NUM_THREADS": environ.get("OMP_NUM_THREADS"),
    }
    why = [f"affinity {allowed}"] if allowed < machine else []
    why += [f"cgroup quota {quota:g}"] if quota is not None and quota < allowed else []
    held = f" ({', '.join(why)})" if why else ""
    starts = "one thread" if threads == 1 else f"{threads} threads"
    summary = f"{usable:g} of {machine} usable{held}; torch starts {starts} per process"
    if threads * ranks <= max(1, usable):
        yield Check("cores", "ok", summary, details=details)
    elif threads > 1:
        each = max(1, int(usable / ranks))
        of = f", {ranks} processes here" if ranks > 1 else ""
        yield Check(
            "cores",
            "warning",
            f"{summary}{of}: more threads than cores slow each other down",
            f"Set OMP_NUM_THREADS={each}.",
            details,
        )
    else:
        yield Check(
            "cores",
            "warning",
            f"{summary}, {ranks} processes here: they will take turns",
            f"Start at most {max(1, int(usable))} processes on this machine.",
            details,
        )


def check_memory(limits: Limits | None = None, shared: Path = Path("/dev/shm")) -> Iterator[Check]:
    """The memory that is left for this process, and for handing batches between processes."""
    limits = read_limits() if limits is None else limits
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    available = _available() or total
    left = available if limits.memory_left is None else min(available, limits.memory_left)
    limit = total if limits.memory is None else min(total, limits.memory)
    details = {
        "machine_bytes": total,
        "limit_bytes": limits.memory,
        "usable_bytes": left,
    }
    of = "of this machine" if limit == total else "allowed by the cgroup"
    summary = f"{_size(left)} free of {_size(limit)} {of}"
    if left < _ONE_PROCESS:
        yield Check(
            "memory",
            "error",
            f"{summary}: one process with torch needs {_size(_ONE_PROCESS)}",
            "End other programs, or give the container or job more memory.",
            details,
        )
    else:
        yield Check("memory", "ok", summary, details=details)
    with suppress(OSError):
        files = os.statvfs(shared)
        size = files.f_frsize * files.f_blocks
        if size < _ENOUGH_SHARED:
            yield Check(
                "memory",
                "warning",
                f"{shared} holds {_size(size)}: workers of a DataLoader hand their batches over "
                "there and die with a bus error when it is full",
                "Start the container with --ipc=host or a larger --shm-size.",
                {"shared_bytes": size},
            )


def _available() -> int | None:
    """Bytes that programs can get without swapping, where the system says so."""
    with suppress(OSError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            name, _, value = line.partition(":")
            if name == "MemAvailable":
                return int(value.split()[0]) * 1024
    return None


def _positive(text: str | None) -> int | None:
    return int(text) if text and text.isdecimal() and int(text) else None


def _size(nbytes: float) -> str:
    unit = "GiB" if nbytes >= 2**30 else "MiB"
    return f"{nbytes / (2**30 if unit == 'GiB' else 2**20):.1f} {unit}"

"""What the header of a recording says about the process, its machine and its settings."""

from __future__ import annotations

import os
import platform
import socket
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from time import perf_counter_ns, time_ns
from typing import Final

import torch
import torch.distributed as dist

from trine.tools.tracing.schema import Header

__all__ = ["make_header"]

_PACKAGES: Final = ("trine-core", "trine-distributed", "trine-tools")
_VARIABLES: Final = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "CUDA_VISIBLE_DEVICES")
_PREFIXES: Final = ("TORCH_", "PYTORCH_", "NCCL_", "GLOO_", "TRINE_", "UCX_", "FI_")
# Settings explain numbers; a password that somebody gave such a name does not, and neither
# does how `trine trace run` talks to the ranks.
_NOT_SHOWN: Final = ("TOKEN", "KEY", "SECRET", "PASS", "CREDENTIAL", "AUTH", "TRINE_TRACE_")
_MAX_VALUE: Final = 200


def make_header(rank: int, world_size: int) -> Header:
    """The header for a recording that this process begins now."""
    before = perf_counter_ns()
    unix_ns = time_ns()
    after = perf_counter_ns()
    host = socket.gethostname()
    return Header(
        rank=rank,
        world_size=world_size,
        host=host,
        clock=_clock_name() or host,
        pid=os.getpid(),
        python=platform.python_version(),
        torch=version("torch"),
        perf_counter_ns=(before + after) // 2,
        unix_ns=unix_ns,
        environment=_environment(),
    )


def _clock_name() -> str:
    # On Linux the monotonic clock starts with the kernel, so containers of one machine
    # share it whatever their host names are, and two machines never do.
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def _environment() -> dict[str, str]:
    found = {
        "platform": platform.platform(),
        "cpus": str(os.cpu_count()),
        "torch threads": str(torch.get_num_threads()),
    }
    if dist.is_available() and dist.is_initialized():
        found["backend"] = dist.get_backend()
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    for name, value in sorted(os.environ.items()):
        settles = name in _VARIABLES or name.startswith(_PREFIXES)
        if settles and not any(word in name for word in _NOT_SHOWN):
            found[name] = value[:_MAX_VALUE]
    return found

"""The limits that a container or a batch system puts on this process (cgroups v1 and v2).

A limit counts wherever it is set between the process's own group and the root, so all
levels are read. Files that are not there limit nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Limits", "read_limits"]

_UNLIMITED = 2**60  # what v1 writes is the largest number of pages in bytes


@dataclass(frozen=True)
class Limits:
    """What is allowed; None where nothing limits.

    Attributes:
        cores: processor time per time; may be a fraction.
        memory: bytes, the smallest limit of any level.
        memory_left: bytes below the nearest limit; reclaimable file cache counts as free.
    """

    cores: float | None = None
    memory: int | None = None
    memory_left: int | None = None


def read_limits(
    groups: Path = Path("/proc/self/cgroup"), mount: Path = Path("/sys/fs/cgroup")
) -> Limits:
    """The limits on this process.

    Args:
        groups: the file that says which groups it is in.
        mount: where their files are.
    """
    try:
        lines = groups.read_text().splitlines()
    except OSError:
        return Limits()
    cores: list[float] = []
    memory: list[tuple[int, int]] = []  # limit, used
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            for folder in _levels(mount, path):
                cores += _quota_v2(folder)
                memory += _memory(folder, "memory.max", "memory.current", "inactive_file")
        if "cpu" in controllers.split(","):
            for folder in _levels(mount / "cpu", path):
                cores += _quota_v1(folder)
        if "memory" in controllers.split(","):
            for folder in _levels(mount / "memory", path):
                limit, used = "memory.limit_in_bytes", "memory.usage_in_bytes"
                memory += _memory(folder, limit, used, "total_inactive_file")
    return Limits(
        cores=min(cores, default=None),
        memory=min((limit for limit, _ in memory), default=None),
        memory_left=min((max(0, limit - used) for limit, used in memory), default=None),
    )


def _levels(mount: Path, path: str) -> Iterator[Path]:
    """From the process's own group up to the mount.

    In a container the path may be the one outside, of which only the mount exists here.
    """
    folder = mount / path.strip("/")
    while folder != mount and mount in folder.parents:
        yield folder
        folder = folder.parent
    yield mount


def _quota_v2(folder: Path) -> list[float]:
    with suppress(OSError, ValueError):
        quota, period = (folder / "cpu.max").read_text().split()
        return [int(quota) / int(period)]  # "max" is no number: no limit
    return []


def _quota_v1(folder: Path) -> list[float]:
    with suppress(OSError, ValueError):
        quota = int((folder / "cpu.cfs_quota_us").read_text())
        period = int((folder / "cpu.cfs_period_us").read_text())
        if quota > 0:
            return [quota / period]
    return []


def _memory(folder: Path, limit: str, used: str, cache: str) -> list[tuple[int, int]]:
    with suppress(OSError, ValueError):
        most = int((folder / limit).read_text())
        if most < _UNLIMITED:
            return [(most, int((folder / used).read_text()) - _statistic(folder, cache))]
    return []


def _statistic(folder: Path, name: str) -> int:
    with suppress(OSError, ValueError):
        for line in (folder / "memory.stat").read_text().splitlines():
            key, _, value = line.partition(" ")
            if key == name:
                return int(value)
    return 0

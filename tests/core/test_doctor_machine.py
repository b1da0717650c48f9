"""What the doctor reads of this machine: packages, limits, cores, memory, launcher variables."""

from __future__ import annotations

import os
import platform
import socket
import threading
from collections.abc import Iterable
from email.message import Message
from importlib.metadata import Distribution, PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import trine
from trine.core.doctor import Check, hardware, software, world
from trine.core.doctor.cgroups import Limits, read_limits
from trine.core.doctor.hardware import check_cores, check_memory
from trine.core.doctor.software import (
    check_packages,
    check_python,
    check_torch,
    requirements,
    satisfies,
)
from trine.core.doctor.world import check_world


def one(checks: Iterable[Check]) -> Check:
    (check,) = checks
    return check


# Versions.


@pytest.mark.parametrize(
    ("have", "wanted", "met"),
    [
        ("2.13.0+cpu", ">=2.11", True),
        ("2.9.1", ">=2.11", False),  # numbers, not letters
        ("2.11.0rc1", ">=2.11", False),
        ("0.1.0", ">=0.1,<0.2", True),
        ("0.2.0", ">=0.1,<0.2", False),
        ("0.3", "==0.3.0", True),
        ("0.3", "!=0.3.0", False),
        ("0.3", "<=0.3", True),
        ("0.3", ">0.3", False),
        ("0.3", "", True),
        ("0.3", "~=0.9", True),  # not judged
    ],
)
def test_versions_are_compared_as_packaging_does(have: str, wanted: str, met: bool) -> None:
    assert satisfies(have, wanted) == met


class FakeDistribution(Distribution):
    """An installed distribution, without files."""

    def __init__(self, name: str, version: str, *requires: str) -> None:
        self._metadata = Message()
        self._metadata["Name"] = name
        self._metadata["Version"] = version
        for line in requires:
            self._metadata["Requires-Dist"] = line

    def read_text(self, filename: str) -> str | None:
        return self._metadata.as_string() if filename == "METADATA" else None

    def locate_file(self, path: object) -> Path:
        return Path("/site") / str(path)


def install(monkeypatch: pytest.MonkeyPatch, *installed: FakeDistribution) -> None:
    """Make these the installed distributions, first on the path first."""

    def version(name: str) -> str:
        for each in installed:
            if each.name == name:
                return each.version
        raise PackageNotFoundError(name)

    monkeypatch.setattr(software, "distributions", lambda: iter(installed))
    monkeypatch.setattr(software, "version", version)


CORE = FakeDistribution("trine-core", "0.1.0", "torch>=2.11")
TORCH = FakeDistribution("torch", "2.13.0+cpu")


def test_requirements_of_extras_and_of_some_platforms_are_left_out() -> None:
    each = FakeDistribution(
        "x", "1", "torch (>=2.11)", "mpi4py>=4 ; extra == 'mpi'", "rich[all] >= 13, <15", "click"
    )

    assert list(requirements(each)) == [("torch", ">=2.11"), ("rich", ">=13,<15"), ("click", "")]


def test_packages_that_fit_together_are_listed_with_whoever_builds_on_core(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plugin = FakeDistribution("A_Plugin", "3.0", "Trine.Core>=0.1,<0.2")
    old_copy = FakeDistribution("trine-core", "0.0.1")
    install(monkeypatch, CORE, TORCH, plugin, old_copy, FakeDistribution("numpy", "2.0"))
    monkeypatch.setattr(software, "version", {"torch": "2.13.0", "Trine.Core": "0.1.0"}.__getitem__)

    check = one(check_packages())

    assert (check.status, check.summary) == (
        "ok",
        "a-plugin 3.0, trine-core 0.1.0: fit together",
    )
    assert check.details["trine-core"] == {"version": "0.1.0", "location": "/site"}


def test_a_package_made_for_another_core_keeps_training_from_starting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install(monkeypatch, CORE, TORCH, FakeDistribution("b", "2.0", "trine-core>=0.2,<0.3"))

    check = one(check_packages())

    assert check.status == "error"
    assert check.summary == "b 2.0 needs trine-core>=0.2,<0.3, but 0.1.0 is installed"
    assert check.mend == "pip install --upgrade b 'trine-core>=0.2,<0.3'"


def test_a_requirement_that_is_missing_keeps_training_from_starting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install(monkeypatch, CORE, TORCH, FakeDistribution("b", "2.0", "trine-core", "rich>=13"))

    check = one(check_packages())

    assert check.summary == "b 2.0 needs rich>=13, which is not installed"


def test_a_file_that_hides_the_other_packages_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, CORE, TORCH)
    monkeypatch.setattr(trine, "__file__", "/site/trine/__init__.py", raising=False)

    _, check = check_packages()

    assert check.status == "error"
    assert check.mend.startswith("Remove /site/trine/__init__.py")


def test_the_packages_of_this_environment_fit_together() -> None:
    check = one(check_packages())

    assert check.status == "ok"
    assert "trine-core" in check.details


def test_this_python_is_good_enough_and_an_old_one_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    here = one(check_python())
    monkeypatch.setattr(platform, "python_version", lambda: "3.9.1")
    old = one(check_python())

    assert here.status == "ok"
    assert old.status == "error"
    assert "asks for >=3.11" in old.summary


@pytest.mark.parametrize(
    ("cuda", "hip", "accelerator", "built_for"),
    [
        (None, None, None, "the CPU"),
        ("12.8", None, torch.device("cuda"), "CUDA 12.8"),
        (None, "6.3", torch.device("cuda"), "ROCm 6.3"),
        (None, None, torch.device("mps"), "the CPU and mps"),
    ],
)
def test_the_build_of_torch_is_named(
    monkeypatch: pytest.MonkeyPatch,
    cuda: str | None,
    hip: str | None,
    accelerator: torch.device | None,
    built_for: str,
) -> None:
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: accelerator)
    monkeypatch.setattr(software, "has_nvidia_driver", lambda: False)

    check = one(check_torch())

    assert check.status == "ok"
    assert check.summary.endswith(f", built for {built_for}")


def test_a_cpu_build_beside_an_nvidia_gpu_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: None)
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")

    _, check = check_torch()

    assert check.status == "warning"
    assert "CUDA build" in check.mend


def test_a_torch_without_distributed_cannot_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_available", lambda: False)

    assert one(check_torch()).status == "error"


# Limits of containers.


def write(folder: Path, **files: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_text(f"{content}\n")


def limits(tmp_path: Path, *groups: str) -> Limits:
    file = tmp_path / "self_cgroup"
    file.write_text("".join(f"{line}\n" for line in groups))
    return read_limits(file, tmp_path / "fs")


def test_v2_takes_the_tightest_limit_of_any_level(tmp_path: Path) -> None:
    slice_, job = tmp_path / "fs" / "slice", tmp_path / "fs" / "slice" / "job"
    write(slice_, cpu__max="150000 100000", memory__max=1000, memory__current=900)
    write(job, cpu__max="max 100000", memory__max=800, memory__current=500)
    (slice_ / "memory.stat").write_text("anon 600\ninactive_file 300\n")

    assert limits(tmp_path, "0::/slice/job") == Limits(cores=1.5, memory=800, memory_left=300)


def test_v2_in_a_container_reads_the_mount_whatever_the_path_outside(tmp_path: Path) -> None:
    write(tmp_path / "fs", cpu__max="200000 100000", memory__max="max", memory__current=5)

    assert limits(tmp_path, "0::/docker/0123abc") == Limits(cores=2.0)


def test_v1_reads_the_folders_of_its_controllers(tmp_path: Path) -> None:
    cpu, memory = tmp_path / "fs" / "cpu" / "a", tmp_path / "fs" / "memory" / "b"
    write(cpu, cpu__cfs_quota_us=50000, cpu__cfs_period_us=100000)
    write(cpu.parent, cpu__cfs_quota_us=-1, cpu__cfs_period_us=100000)
    write(memory, memory__limit_in_bytes=700, memory__usage_in_bytes=650)
    write(memory.parent, memory__limit_in_bytes=2**63 - 4096, memory__usage_in_bytes=10**9)
    (memory / "memory.stat").write_text("total_inactive_file 50\n")

    found = limits(tmp_path, "4:memory:/b", "3:cpu,cpuacct:/a", "0::/")

    assert found == Limits(cores=0.5, memory=700, memory_left=100)


def test_a_limit_that_is_overstepped_leaves_nothing_rather_than_less(tmp_path: Path) -> None:
    write(tmp_path / "fs", memory__max=100, memory__current=130)

    assert limits(tmp_path, "0::/") == Limits(memory=100, memory_left=0)


def test_a_path_that_leads_out_of_the_mount_reads_the_mount(tmp_path: Path) -> None:
    write(tmp_path / "fs", cpu__max="100000 100000")

    assert limits(tmp_path, "0::/../../elsewhere").cores == 1.0


def test_without_cgroups_nothing_limits(tmp_path: Path) -> None:
    assert limits(tmp_path, "4:memory:/b", "3:cpu,cpuacct:/a", "0::/") == Limits()
    assert read_limits(tmp_path / "missing", tmp_path) == Limits()


# Cores and memory.


@pytest.fixture
def cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine of 16 cores of which 8 may be used."""
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)


@pytest.mark.usefixtures("cores")
@pytest.mark.parametrize(
    ("threads", "environ", "quota", "summary", "mend"),
    [
        (8, {}, None, "8 of 16 usable (affinity 8); torch starts 8 threads per process", ""),
        (
            8,
            {},
            2.5,
            "2.5 of 16 usable (affinity 8, cgroup quota 2.5); torch starts 8 threads per process: "
            "more threads than cores slow each other down",
            "Set OMP_NUM_THREADS=2.",
        ),
        (
            8,
            {"LOCAL_WORLD_SIZE": "4"},
            None,
            "8 of 16 usable (affinity 8); torch starts 8 threads per process, 4 processes here: "
            "more threads than cores slow each other down",
            "Set OMP_NUM_THREADS=2.",
        ),
        (
            1,
            {"LOCAL_WORLD_SIZE": "9"},
            20.0,
            "8 of 16 usable (affinity 8); torch starts one thread per process, 9 processes here: "
            "they will take turns",
            "Start at most 8 processes on this machine.",
        ),
        (
            1,
            {"LOCAL_WORLD_SIZE": "many"},
            0.5,
            "0.5 of 16 usable (affinity 8, cgroup quota 0.5); torch starts one thread per process",
            "",
        ),
    ],
)
def test_threads_are_held_against_the_cores_that_may_be_used(
    monkeypatch: pytest.MonkeyPatch,
    threads: int,
    environ: dict[str, str],
    quota: float | None,
    summary: str,
    mend: str,
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)

    check = one(check_cores(environ, Limits(cores=quota)))

    assert (check.summary, check.mend) == (summary, mend)
    assert check.status == ("warning" if mend else "ok")


def test_where_there_is_no_affinity_all_cores_may_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)

    check = one(check_cores({}, Limits()))

    assert check.summary == "4 of 4 usable; torch starts 4 threads per process"


GIB = 2**30


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine of 64 GiB of which 32 are free, with a large /dev/shm."""
    pages = {"SC_PHYS_PAGES": 64 * GIB // 4096, "SC_PAGE_SIZE": 4096}
    monkeypatch.setattr(os, "sysconf", pages.__getitem__)
    monkeypatch.setattr(hardware, "_available", lambda: 32 * GIB)
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_frsize=1, f_blocks=GIB))


@pytest.mark.usefixtures("memory")
@pytest.mark.parametrize(
    ("found", "status", "summary"),
    [
        (Limits(), "ok", "32.0 GiB free of 64.0 GiB of this machine"),
        (
            Limits(memory=8 * GIB, memory_left=GIB // 2),
            "ok",
            "512.0 MiB free of 8.0 GiB allowed by the cgroup",
        ),
        (
            Limits(memory=8 * GIB, memory_left=GIB // 8),
            "error",
            "128.0 MiB free of 8.0 GiB allowed by the cgroup: one process with torch needs "
            "256.0 MiB",
        ),
    ],
)
def test_memory_is_what_the_machine_and_the_container_leave(
    found: Limits, status: str, summary: str
) -> None:
    check = one(check_memory(found))

    assert (check.status, check.summary) == (status, summary)


@pytest.mark.usefixtures("memory")
def test_a_small_shared_memory_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    docker = SimpleNamespace(f_frsize=4096, f_blocks=64 * 2**20 // 4096)
    monkeypatch.setattr(os, "statvfs", lambda path: docker)

    _, check = check_memory(Limits())

    assert check.status == "warning"
    assert "holds 64.0 MiB" in check.summary
    assert "--shm-size" in check.mend


@pytest.mark.usefixtures("memory")
def test_a_system_without_shared_memory_as_files_has_nothing_to_warn_of(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def statvfs(path: Path) -> object:
        raise FileNotFoundError(path)

    monkeypatch.setattr(os, "statvfs", statvfs)

    assert one(check_memory(Limits())).status == "ok"


def test_where_the_system_does_not_say_what_is_free_it_is_the_whole(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pages = {"SC_PHYS_PAGES": 2 * GIB // 4096, "SC_PAGE_SIZE": 4096}
    monkeypatch.setattr(os, "sysconf", pages.__getitem__)
    monkeypatch.setattr(hardware, "Path", lambda path: tmp_path / "missing")

    check = one(check_memory(Limits(), shared=tmp_path / "missing"))

    assert check.summary == "2.0 GiB free of 2.0 GiB of this machine"


# The launcher's variables.

RANK_1_OF_2 = {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}


def test_a_process_that_nobody_launched_is_the_only_rank() -> None:
    check = one(check_world({"RANK": ""}, gpus=0))  # empty is unset

    assert check.status == "ok"
    assert "only rank" in check.summary


@pytest.mark.parametrize(
    ("more", "by"), [({}, "its environment"), ({"TORCHELASTIC_RUN_ID": "x"}, "torchrun")]
)
def test_a_rank_is_described_with_its_meeting_point(more: dict[str, str], by: str) -> None:
    check = one(check_world(RANK_1_OF_2 | more, gpus=2))

    assert check.status == "ok"
    assert check.summary == f"rank 1 of 2 by {by}, meeting at 127.0.0.1:29500"
    assert check.details == RANK_1_OF_2


def test_a_rank_of_an_mpi_launcher_is_no_fault() -> None:
    check = one(check_world({"PMI_SIZE": "2", "PMI_RANK": "0"}, gpus=0))

    assert check.status == "ok"
    assert check.summary.startswith("launched by MPICH")


@pytest.mark.parametrize(
    ("change", "summary"),
    [
        ({"MASTER_PORT": ""}, "RANK, WORLD_SIZE, MASTER_ADDR set, but not MASTER_PORT"),
        ({"RANK": "one"}, "RANK=one is not a whole number from 0"),
        ({"RANK": "-1"}, "RANK=-1 is not a whole number from 0"),
        ({"RANK": "2"}, "RANK=2, but WORLD_SIZE=2"),
        ({"LOCAL_RANK": "3"}, "LOCAL_RANK=3, but LOCAL_WORLD_SIZE=2"),
        ({"MASTER_PORT": "0"}, "MASTER_PORT=0 is not a port"),
        ({"MASTER_PORT": "65536"}, "MASTER_PORT=65536 is not a port"),
        ({"GLOO_SOCKET_IFNAME": "nowhere0"}, "GLOO_SOCKET_IFNAME names nowhere0"),
    ],
)
def test_each_fault_of_the_variables_is_named_and_has_a_mend(
    change: dict[str, str], summary: str
) -> None:
    check = one(check_world(RANK_1_OF_2 | change, gpus=0))

    assert check.status == "error"
    assert check.summary.startswith(summary)
    assert check.mend


def test_more_ranks_than_gpus_are_found() -> None:
    check = one(check_world(RANK_1_OF_2, gpus=1))

    assert check.summary == "LOCAL_RANK=1, but this process sees 1 GPUs"


def test_all_faults_are_reported_at_once() -> None:
    faults = list(check_world({"RANK": "x", "MASTER_PORT": "0"}, gpus=0))

    assert len(faults) == 3


def test_an_interface_of_this_machine_is_no_fault() -> None:
    names = ",".join(name for _, name in socket.if_nameindex())

    assert one(check_world({"GLOO_SOCKET_IFNAME": names}, gpus=0)).status == "ok"


def test_a_port_that_is_taken_is_found_by_rank_0_alone_and_not_under_torchrun() -> None:
    with socket.create_server(("", 0)) as server:
        taken = RANK_1_OF_2 | {"MASTER_PORT": str(server.getsockname()[1]), "LOCAL_RANK": "0"}

        rank_0 = one(check_world(taken | {"RANK": "0"}, gpus=0))
        rank_1 = one(check_world(taken, gpus=0))
        elastic = one(check_world(taken | {"RANK": "0", "TORCHELASTIC_RUN_ID": "x"}, gpus=0))

    assert rank_0.status == "error"
    assert "is taken by another program" in rank_0.summary
    assert (rank_1.status, elastic.status) == ("ok", "ok")
    assert one(check_world(taken | {"RANK": "0"}, gpus=0)).status == "ok"  # free again


def test_a_port_that_may_not_be_opened_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def bind(self: socket.socket, address: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(socket.socket, "bind", bind)

    check = one(check_world(RANK_1_OF_2 | {"RANK": "0", "MASTER_PORT": "80"}, gpus=0))

    assert "cannot be opened: Permission denied" in check.summary


def test_an_address_that_does_not_resolve_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def getaddrinfo(host: str, port: None) -> object:
        raise socket.gaierror("Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)

    check = one(check_world(RANK_1_OF_2, gpus=0))

    assert check.summary.startswith("MASTER_ADDR=127.0.0.1 does not resolve")


def test_a_name_server_that_does_not_answer_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answer = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, port: [answer.wait(60)])
    monkeypatch.setattr(world, "_LOOKUP_S", 0.05)

    check = one(check_world(RANK_1_OF_2, gpus=0))
    answer.set()

    assert check.status == "error"

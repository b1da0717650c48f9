"""The backends' checks: what each outcome of the probes means, and what it advises."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol

import pytest
import torch
import torch.distributed as dist

from trine.core.doctor import Check, backends, devices
from trine.core.doctor.backends import check_gloo, check_mpi, check_nccl
from trine.core.doctor.children import Ended
from trine.core.doctor.devices import check_devices

WORKED = Ended("exited", 0, '{"seconds": 0.002}\n', "")
FAILED = Ended("exited", 1, '{"error": "RuntimeError: no route"}\n', "frames")
STOPPED = Ended("stopped", -9, "", "")


class Ran(Protocol):
    """Replaces the probes of the backends by results, and gives the commands asked for."""

    def __call__(self, *ended: Ended) -> list[list[str]]: ...


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> Ran:
    asked: list[list[str]] = []

    def replace(*ended: Ended) -> list[list[str]]:
        def run_together(commands: list[list[str]], limit_s: float) -> list[Ended]:
            asked.extend(commands)
            assert len(commands) == len(ended)
            return list(ended)

        monkeypatch.setattr(backends, "run_together", run_together)
        return asked

    return replace


def one(checks: Iterable[Check]) -> Check:
    (check,) = checks
    return check


# gloo


def test_gloo_is_two_processes_of_one_world(ran: Ran) -> None:
    asked = ran(WORKED, WORKED)

    check = one(check_gloo(7.0))

    assert (check.status, check.summary) == ("ok", "an all-reduce of two processes took 2.0 ms")
    assert [command[3:-1] for command in asked] == [
        ["all_reduce", "7", "gloo", str(rank), "2", asked[0][8]] for rank in (0, 1)
    ]


def test_gloo_on_the_loopback_says_so(ran: Ran) -> None:
    warned = Ended("exited", 0, WORKED.output, "Warning: Unable to resolve hostname to a ...\n")
    ran(WORKED, warned)

    check = one(check_gloo(7.0))

    assert check.status == "ok"
    assert "loopback: this machine's name does not resolve" in check.summary


@pytest.mark.parametrize(("needed", "status"), [(True, "error"), (False, "warning")])
def test_gloo_that_fails_gives_the_reason_of_the_process_that_failed_by_itself(
    ran: Ran, needed: bool, status: str
) -> None:
    ran(STOPPED, FAILED)

    check = one(check_gloo(7.0, needed=needed))

    assert check.status == status
    assert check.summary.endswith("could not talk: RuntimeError: no route")
    assert "GLOO_SOCKET_IFNAME to one of this machine's interfaces (" in check.mend
    assert check.details["rank 1"] == {"how": "exited", "errors": "frames"}


def test_gloo_that_is_not_built_in_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_gloo_available", lambda: False)

    check = one(check_gloo(7.0))

    assert (check.status, check.summary) == ("error", "this torch was built without gloo")


@pytest.mark.parametrize(("needed", "status"), [(True, "error"), (False, "warning")])
@pytest.mark.parametrize(
    "error",
    [dist.DistNetworkError("no route\nframe of C++"), OSError(24, "Too many open files")],
    ids=["no loopback", "no process"],
)
def test_gloo_whose_processes_cannot_even_be_started_has_failed(
    monkeypatch: pytest.MonkeyPatch, error: Exception, needed: bool, status: str
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(dist, "TCPStore", refuse)

    check = one(check_gloo(7.0, needed=needed))

    assert check.status == status
    assert check.summary.endswith(str(error).partition("\n")[0])
    assert "loopback" in check.mend
    assert "ulimit" in check.mend


def test_a_wrong_network_interface_is_found_by_the_real_probe(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nowhere0")

    check = one(check_gloo(60.0))

    assert check.status == "error"
    assert "nowhere0" in check.summary


# nccl


@pytest.mark.parametrize(("gpus", "ranks"), [(1, 1), (2, 2), (8, 2)])
def test_nccl_takes_one_process_per_gpu_and_two_at_most(
    ran: Ran, monkeypatch: pytest.MonkeyPatch, gpus: int, ranks: int
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    asked = ran(*[WORKED] * ranks)

    check = one(check_nccl(7.0))

    assert check.status == "ok"
    assert [command[5:8] for command in asked] == [
        ["nccl", str(rank), str(ranks)] for rank in range(ranks)
    ]


def test_nccl_is_not_tried_without_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    # A wheel for CUDA has nccl on a machine without a GPU too.
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)

    assert one(check_nccl(7.0)).status == "absent"


def test_nccl_missing_beside_gpus_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)

    check = one(check_nccl(7.0))

    assert check.status == "warning"
    assert "4 GPUs" in check.summary


def test_nccl_that_fails_keeps_training_from_starting(
    ran: Ran, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    ran(FAILED, STOPPED)

    check = one(check_nccl(7.0))

    assert (check.status, check.summary) == (
        "error",
        "the GPUs could not talk: RuntimeError: no route",
    )
    assert "NCCL_DEBUG=INFO" in check.mend


@pytest.mark.gpu
def test_nccl_really_works_where_there_is_a_gpu() -> None:
    assert one(check_nccl(60.0)).status == "ok"


# mpi, with an mpi4py and an mpiexec made for the test


FAKE_MPI = """
import os

class _World:
    def Get_rank(self):
        return int(os.environ.get("FAKE_RANK", 0))
    def Get_size(self):
        return int(os.environ.get("FAKE_SIZE", 1))
    def allreduce(self, value):
        return sum(range(1, self.Get_size() + 1))

COMM_WORLD = _World()

def get_vendor():
    return "Fake MPI", (1, 2, 3)
"""
STARTS_TWO = 'for r in 0 1; do FAKE_RANK=$r FAKE_SIZE=2 "$@" || exit 1; done'
STARTS_STRANGERS = 'for r in 0 1; do "$@" || exit 1; done'


@pytest.fixture
def mpi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Install a fake mpi4py, and an mpiexec that drops `-n 2` and runs a line of shell."""
    package = tmp_path / "site" / "mpi4py"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("class rc: pass\n__version__ = '4.0'\n")
    (package / "MPI.py").write_text(FAKE_MPI)
    monkeypatch.setenv("PYTHONPATH", str(package.parent), prepend=os.pathsep)
    monkeypatch.syspath_prepend(package.parent)
    for size in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE"):
        monkeypatch.delenv(size, raising=False)

    def install(line: str) -> Path:
        launcher = tmp_path / "bin" / "mpiexec"
        launcher.parent.mkdir()
        launcher.write_text(f"#!/bin/sh\nshift 2\n{line}\n")
        launcher.chmod(launcher.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("PATH", str(launcher.parent), prepend=os.pathsep)
        return launcher

    return install


def test_without_mpi4py_mpi_is_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr(dist, "is_mpi_available", lambda: False)

    check = one(check_mpi(7.0))

    assert (check.status, check.summary) == ("absent", "no mpi4py")


def test_an_mpi_that_torch_was_built_with_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr(dist, "is_mpi_available", lambda: True)

    check = one(check_mpi(7.0))

    assert check.status == "ok"
    assert "built in" in check.summary


def test_vendor_and_launcher_of_an_mpi_that_works_are_named(mpi: Callable[[str], Path]) -> None:
    launcher = mpi(STARTS_TWO)

    check = one(check_mpi(60.0))

    assert check.status == "ok"
    assert check.summary == f"Fake MPI 1.2.3, mpi4py 4.0; {launcher} works"
    assert check.details["launcher"] == str(launcher)


def test_a_launcher_of_another_mpi_is_found_out(mpi: Callable[[str], Path]) -> None:
    mpi(STARTS_STRANGERS)

    check = one(check_mpi(60.0))

    assert check.status == "warning"
    assert check.summary.endswith("not find each other: it is not the launcher of this MPI")
    assert "mpiexec of Fake MPI" in check.mend


def test_a_launcher_that_fails_gives_its_last_words(mpi: Callable[[str], Path]) -> None:
    launcher = mpi("echo no slots >&2; exit 5")

    check = one(check_mpi(60.0))

    assert check.status == "warning"
    assert check.summary.endswith(f"{launcher} failed: no slots")
    assert f"{launcher} -n 2 hostname" in check.mend


def test_a_launcher_that_hangs_is_ended(mpi: Callable[[str], Path]) -> None:
    mpi('case "$*" in *mpi_rank*) sleep 3600;; esac')

    check = one(check_mpi(3.0))

    assert check.status == "warning"
    assert check.summary.endswith("failed: did not end in time")


def test_a_launcher_that_refuses_root_says_what_to_set(
    mpi: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    mpi("echo mpiexec has detected an attempt to run as root >&2; exit 1")
    monkeypatch.setattr(os, "geteuid", lambda: 0)

    check = one(check_mpi(60.0))

    assert check.summary.endswith("failed: it does not run as root")
    assert "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1" in check.mend


def test_a_library_that_cannot_be_loaded_is_a_warning(
    mpi: Callable[[str], Path], tmp_path: Path
) -> None:
    mpi(STARTS_TWO)
    (tmp_path / "site" / "mpi4py" / "MPI.py").write_text("raise ImportError('no libmpi.so')")

    check = one(check_mpi(60.0))

    assert check.status == "warning"
    assert check.summary.endswith("cannot be used: ImportError: no libmpi.so")


def test_under_a_launcher_no_second_one_is_started(
    mpi: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    mpi("exit 5")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")

    check = one(check_mpi(60.0))

    assert (check.status, check.summary.split("; ")[1]) == ("ok", "launched by Open MPI")


def test_a_missing_launcher_is_a_warning(
    mpi: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.which", lambda name, path=None: None)

    check = one(check_mpi(60.0))

    assert check.status == "warning"
    assert "no mpiexec" in check.summary


# Devices, with a torch made for the test in the probe's process


FAKE_TORCH = """
class _Device:
    type = "cuda"

class _Accelerator:
    current_accelerator = staticmethod(lambda: _Device)
    is_available = staticmethod(lambda: COUNT > 0)
    device_count = staticmethod(lambda: COUNT)

class _Module:
    get_device_name = staticmethod(lambda index: "Fake GPU")
    mem_get_info = staticmethod(lambda index: (2**30, 2 * 2**30))
    @staticmethod
    def init():
        raise RuntimeError("driver too old\\nframe #0")

class _Ones:
    def __init__(self, index):
        self.index = index
    def __matmul__(self, other):
        if self.index == 1:
            raise RuntimeError("out of memory\\nframe #0")
        return self
    def sum(self):
        return self
    def item(self):
        return 0 if self.index == 2 else 64**3

accelerator = _Accelerator()
get_device_module = lambda kind: _Module
device = lambda kind, index: f"{kind}:{index}"
ones = lambda rows, columns, device: _Ones(int(device[-1]))
"""


@pytest.fixture
def fake_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Give the probes a torch with so many devices, and let this process expect one."""

    def install(count: int, code: str = FAKE_TORCH) -> None:
        (tmp_path / "torch.py").write_text(f"COUNT = {count}\n{code}")
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))

    return install


def test_each_device_is_tried_and_a_broken_one_keeps_training_from_starting(
    fake_torch: Callable[..., None],
) -> None:
    fake_torch(3)

    cpu, good, full, wrong = check_devices(60.0)

    assert (cpu.status, cpu.summary) == ("ok", "cpu")
    assert (good.status, good.summary) == ("ok", "cuda:0, Fake GPU, 2 GiB")
    assert good.details["free_bytes"] == 2**30
    assert (full.status, full.summary) == (
        "error",
        "cuda:1, Fake GPU does not work: out of memory",
    )
    assert (wrong.status, wrong.details["error"]) == (
        "error",
        "a product of matrices came out wrong",
    )


@pytest.mark.parametrize(("driver", "status"), [(True, "warning"), (False, "absent")])
def test_a_gpu_that_torch_cannot_use_is_a_warning_if_there_is_a_driver(
    fake_torch: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    driver: bool,
    status: str,
) -> None:
    fake_torch(0)
    monkeypatch.setattr(devices, "has_nvidia_driver", lambda: driver)

    _, check = check_devices(60.0)

    assert check.status == status
    assert check.summary.endswith(": driver too old")


def test_a_device_that_hangs_is_an_error_after_those_that_answered(
    fake_torch: Callable[..., None],
) -> None:
    fake_torch(2, FAKE_TORCH.replace('raise RuntimeError("out', "import time; time.sleep(3600)\n#"))

    _, good, hung = check_devices(2.0)

    assert good.status == "ok"
    assert hung.status == "error"
    assert "did not end in time: it stood at File" in hung.summary


def test_a_torch_without_accelerator_is_not_asked_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: None)
    monkeypatch.setattr(devices, "run_together", None)

    assert one(check_devices(60.0)).status == "ok"


def test_a_torch_that_fails_in_the_probe_is_an_error(fake_torch: Callable[..., None]) -> None:
    fake_torch(0, "raise OSError('libcudart.so is missing')")

    _, check = check_devices(60.0)

    assert check.status == "error"
    assert check.summary == "the devices could not be tried: OSError: libcudart.so is missing"

"""The process group backend: by the device, what is installed, who launched us, what was said."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from trine.core import CPUDevice, CUDADevice, MPSDevice, XPUDevice
from trine.core.devices import backends

LAUNCHERS = (
    "RANK",
    "WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "OMPI_COMM_WORLD_SIZE",
    "PMI_SIZE",
    "MPI_LOCALNRANKS",
    "PMIX_RANK",
    "LOCAL_RANK",
    "TRINE_DIST_BACKEND",
)


@pytest.fixture(autouse=True)
def _launched_by_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in LAUNCHERS:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def _mpi4py(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "find_spec", lambda name: name if name == "mpi4py" else None)


def under_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in zip(LAUNCHERS[:4], ("0", "2", "localhost", "29500"), strict=True):
        monkeypatch.setenv(name, value)


@pytest.mark.usefixtures("_mpi4py")
def test_a_plain_python_on_the_cpu_talks_gloo_whatever_is_installed() -> None:
    assert CPUDevice().dist_backend == CPUDevice().ddp_backend == "gloo"


@pytest.mark.usefixtures("_mpi4py")
@pytest.mark.parametrize("variable", ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_RANK"])
def test_under_mpiexec_the_cpu_talks_mpi(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.setenv(variable, "2")

    assert CPUDevice().dist_backend == CPUDevice().ddp_backend == "mpi"


def test_under_mpiexec_without_an_mpi_to_reach_the_cpu_talks_gloo(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PMI_SIZE", "2")
    monkeypatch.setattr(backends, "find_spec", lambda name: None)

    assert CPUDevice().dist_backend == "gloo"


def test_an_mpi_built_into_torch_is_one_to_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PMI_SIZE", "2")
    monkeypatch.setattr(backends, "find_spec", lambda name: None)
    monkeypatch.setattr(dist, "is_mpi_available", lambda: True)

    assert CPUDevice().dist_backend == "mpi"


@pytest.mark.usefixtures("_mpi4py")
def test_under_torchrun_the_cpu_talks_gloo_even_if_mpiexec_started_torchrun(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    under_torchrun(monkeypatch)

    assert CPUDevice().dist_backend == "gloo"


@pytest.mark.usefixtures("_mpi4py")
def test_a_rank_alone_does_not_make_a_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PMIX_RANK", "0")
    monkeypatch.setenv("RANK", "0")

    assert CPUDevice().dist_backend == "mpi"


@pytest.mark.parametrize("nccl", [False, True])
def test_a_cuda_device_talks_nccl_where_torch_has_it(
    monkeypatch: pytest.MonkeyPatch, nccl: bool
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: nccl)

    assert CUDADevice(0).dist_backend == ("nccl" if nccl else "gloo")


@pytest.mark.parametrize("built", [False, True])
def test_an_intel_gpu_talks_its_makers_backend_where_torch_has_it(
    monkeypatch: pytest.MonkeyPatch, built: bool
) -> None:
    monkeypatch.setattr("torch.xpu.device_count", lambda: 1)
    monkeypatch.setattr(dist, "is_backend_available", lambda name: built and name == "xccl")

    assert XPUDevice(0).dist_backend == ("xccl" if built else "gloo")


def test_an_apple_gpu_talks_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.backends.mps.is_available", lambda: True)

    assert MPSDevice().dist_backend == "gloo"


@pytest.mark.parametrize("kind", ["vulkan", "no-such-kind"])
def test_a_kind_for_which_torch_has_no_backend_talks_gloo(kind: str) -> None:
    assert backends.accelerator_backend(kind) == "gloo"


def test_a_torch_without_process_groups_is_told_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_available", lambda: False)
    monkeypatch.setattr(backends, "find_spec", lambda name: None)
    monkeypatch.setenv("PMI_SIZE", "2")

    assert CPUDevice().dist_backend == "gloo"
    assert backends.accelerator_backend("cuda") == "gloo"


def test_the_environment_wins_over_our_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRINE_DIST_BACKEND", " MPI ")

    assert CPUDevice().dist_backend == "mpi"


def test_the_constructor_wins_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRINE_DIST_BACKEND", "mpi")

    assert CPUDevice(dist_backend="Gloo").dist_backend == "gloo"


def test_an_empty_variable_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRINE_DIST_BACKEND", "")

    assert CPUDevice().dist_backend == "gloo"

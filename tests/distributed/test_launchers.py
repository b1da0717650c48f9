"""Which rank a launcher's variables give to a process."""

from __future__ import annotations

import os

import pytest

from trine.distributed.launchers import Launch, read_launch

MASTER = {"MASTER_ADDR": "node7", "MASTER_PORT": "29500"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "PMIX_NAMESPACE": "prterun-node7-11@1",
}
HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
SRUN = {
    "SLURM_PROCID": "3",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_LOCALID": "1",
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "gpu[003-004,9],login1",
}


def found(env: dict[str, str]) -> Launch:
    launch = read_launch({"PATH": "/bin", **env})
    assert launch is not None
    return launch


def test_a_plain_process_has_no_launcher() -> None:
    assert read_launch({"PATH": "/bin"}) is None


def test_torchrun_gives_all() -> None:
    launch = found({"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", **MASTER})

    assert (launch.rank, launch.world_size, launch.local_rank) == (1, 4, 1)
    assert (launch.address, launch.port) == ("node7", 29500)
    assert launch.by_variables


def test_open_mpi_on_several_hosts_leaves_the_meeting_point_open() -> None:
    launch = found(OPEN_MPI)

    assert (launch.rank, launch.world_size, launch.local_rank) == (5, 8, 1)
    assert (launch.address, launch.port, launch.job) == (None, None, None)


def test_ranks_of_open_mpi_on_one_host_share_the_name_of_their_job() -> None:
    launch = found(OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "8"})

    assert launch.job == "prterun-node7-11@1"


@pytest.mark.parametrize(
    ("env", "count"),
    [
        ({"RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", **MASTER}, 2),
        (OPEN_MPI, 4),
        (HYDRA, 2),
        (SRUN, None),
    ],
)
def test_ranks_that_share_a_host_know_how_many_they_are(
    env: dict[str, str], count: int | None
) -> None:
    assert found(env).local_world_size == count


def test_ranks_of_hydra_on_one_host_share_their_parent() -> None:
    launch = found(HYDRA)

    assert (launch.rank, launch.world_size, launch.local_rank) == (1, 2, 1)
    assert launch.job == f"hydra-{os.getppid()}"


def test_an_address_given_beside_mpiexec_is_taken() -> None:
    launch = found(OPEN_MPI | MASTER)

    assert (launch.address, launch.port) == ("node7", 29500)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("gpu[003-004,9],login1", "gpu003"),
        ("gpu[7,9-12]", "gpu7"),
        ("login1,gpu[1-2]", "login1"),
        ("node-a", "node-a"),
        ("rack[1-2]n5", "rack1n5"),
    ],
)
def test_ranks_of_srun_meet_on_its_first_host(nodes: str, first: str) -> None:
    launch = found(SRUN | {"SLURM_STEP_NODELIST": nodes})

    assert (launch.rank, launch.world_size, launch.local_rank) == (3, 4, 1)
    assert launch.address == first


def test_steps_of_srun_meet_at_ports_of_their_own() -> None:
    ports = {found(SRUN | {"SLURM_STEP_ID": str(step)}).port for step in range(20)}

    assert len(ports) == 20
    assert all(port is not None and 1024 < port < 32768 for port in ports)


def test_a_batch_script_of_slurm_beside_srun_is_one_rank() -> None:
    # There SLURM sets these two, but no step has been started.
    assert read_launch({"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_JOB_ID": "77"}) is None


def test_torchrun_inside_of_another_launcher_wins() -> None:
    launch = found(SRUN | {"RANK": "9", "WORLD_SIZE": "16"} | MASTER)

    assert (launch.rank, launch.world_size) == (9, 16)


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"RANK": "0", "WORLD_SIZE": "2"}, "sets RANK, WORLD_SIZE but not MASTER_ADDR"),
        (HYDRA | {"PMI_RANK": "2"}, "the rank 2 of 2"),
        (HYDRA | {"PMI_SIZE": "two"}, "PMI_SIZE='two', which is not a whole number"),
        (
            OPEN_MPI | {"MASTER_ADDR": "a", "MASTER_PORT": "99999"},
            "MASTER_PORT=99999 is not a port",
        ),
    ],
)
def test_variables_that_cannot_be_right_are_named(env: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_launch({"PATH": "/bin", **env})

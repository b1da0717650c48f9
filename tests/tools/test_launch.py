"""Which rank a process is, by the variables of its launcher."""

from __future__ import annotations

import pytest

from trine.tools.recording.launch import launched_rank


@pytest.mark.parametrize(
    "environ",
    [
        {"RANK": "2", "WORLD_SIZE": "4"},
        {"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "4"},
        {"PMI_RANK": "2", "PMI_SIZE": "4"},
        {"SLURM_PROCID": "2", "SLURM_STEP_NUM_TASKS": "4"},
        {"PMI_RANK": "0", "PMI_SIZE": "1", "RANK": "2", "WORLD_SIZE": "4"},
    ],
)
def test_each_launcher_says_it_in_its_own_words(environ: dict[str, str]) -> None:
    assert launched_rank(environ) == (2, 4)


@pytest.mark.parametrize(
    "environ",
    [{}, {"RANK": "1"}, {"RANK": "4", "WORLD_SIZE": "4"}, {"RANK": "-1", "WORLD_SIZE": "x"}],
)
def test_nobody_says_it(environ: dict[str, str]) -> None:
    assert launched_rank(environ) is None

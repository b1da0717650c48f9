"""What all tests share. Imports no torch here: tests/repo runs without it."""

from __future__ import annotations

import pytest


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test marked `gpu` where no CUDA device is found, and say so."""
    if item.get_closest_marker("gpu") is None:
        return
    import torch

    # Asked for devices, not for the build: a CUDA wheel on a machine without a
    # GPU has NCCL and no device to run it on.
    if not torch.cuda.device_count():
        pytest.skip("needs a CUDA device: nox -t gpu on a machine that has one")

"""What the tests of trine-distributed share."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.distributed.recording_device import KIND, RecordingDevice, pose_as_torch_module
from trine.core import register_device
from trine.core.devices import registry
from trine.distributed import testing

BACKEND = os.environ.get("TRINE_TEST_BACKEND", "gloo")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip on other backends what is marked as `only_gloo`, for the reason that the mark gives."""
    for item in items:
        marker = item.get_closest_marker("only_gloo")
        if marker is not None and BACKEND != "gloo":
            item.add_marker(pytest.mark.skip(reason=f"of gloo alone: {marker.args[0]}"))


@pytest.fixture(scope="session")
def backend() -> str:
    """The backend on which bodies run: that of the environment, as the sessions of nox set it."""
    return BACKEND


@pytest.fixture
def run_on_ranks(backend: str) -> Callable[..., list[Any]]:
    """Run a body on several ranks; see `trine.distributed.testing.run_on_ranks`."""
    return partial(testing.run_on_ranks, backend=backend)


@pytest.fixture
def recording_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[RecordingDevice]:
    """A made-up device with streams, in a world of four ranks of which only this one exists."""
    made = RecordingDevice()
    monkeypatch.setattr(registry, "_factories", dict(registry._factories))
    register_device(KIND, lambda index: made)
    pose_as_torch_module(monkeypatch)
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    yield made
    dist.destroy_process_group()

"""Serializable: what a checkpoint can hold, by its methods."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from trine.core import CPUDevice, Serializable


class Stateless(Serializable):
    """Writes neither method."""


class Counting(Serializable):
    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        self.count = state["count"]


def test_an_object_without_state_has_an_empty_one_and_takes_any() -> None:
    assert Stateless().state_dict() == {}

    Stateless().load_state_dict({})


def test_a_state_carries_an_object_over_to_another() -> None:
    counting, again = Counting(), Counting()
    counting.count = 3

    again.load_state_dict(counting.state_dict())

    assert again.count == 3


@pytest.mark.parametrize(
    "thing", [CPUDevice(), nn.Linear(1, 1), torch.optim.SGD([torch.ones(1)]), Stateless()]
)
def test_whatever_has_both_methods_is_serializable(thing: object) -> None:
    assert isinstance(thing, Serializable)


def test_whatever_lacks_one_is_not() -> None:
    assert not isinstance({}, Serializable)

"""What autograd is told while the engine works."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

__all__ = ["without_grad"]

P = ParamSpec("P")
T = TypeVar("T")


def without_grad(function: Callable[P, T]) -> Callable[P, T]:
    """`torch.no_grad()` as a decorator that costs next to nothing where grad mode is off.

    Torch's own makes two objects for each call, and the engine's calls are nested.
    """

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if not torch.is_grad_enabled():
            return function(*args, **kwargs)
        with torch.no_grad():
            return function(*args, **kwargs)

    return call

"""Whose collectives this thread starts, for what backends say about them.

The engine knows which unit it gathers or reduces, a backend knows which operation was not
complete in time; this is how the second learns the first.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

__all__ = ["current_unit", "of_unit"]

_unit: ContextVar[str] = ContextVar("unit", default="")


@contextmanager
def of_unit(name: str) -> Iterator[None]:
    """Say that collectives started in the block belong to a unit.

    Args:
        name: full name of its module.
    """
    token = _unit.set(name)
    try:
        yield
    finally:
        _unit.reset(token)


def current_unit() -> str:
    """The unit that collectives started now belong to; "" for none."""
    return _unit.get()

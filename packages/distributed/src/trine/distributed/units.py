"""Whose collectives this thread starts, for what backends say about them.

The engine knows which unit it gathers or reduces, a backend knows which operation was not
complete in time; this is how the second learns the first.
"""

from __future__ import annotations

from contextvars import ContextVar

__all__ = ["current_unit", "of_unit"]

_unit: ContextVar[str] = ContextVar("unit", default="")


class of_unit:  # no generator: that takes three times as long
    """Say that collectives started in the block belong to a unit.

    Args:
        name: full name of its module.
    """

    __slots__ = ("_name", "_token")

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        self._token = _unit.set(self._name)

    def __exit__(self, *_: object) -> None:
        _unit.reset(self._token)


def current_unit() -> str:
    """The unit that collectives started now belong to; "" for none."""
    return _unit.get()

"""Serializable: what can be saved into a checkpoint and taken out of it again."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

__all__ = ["Serializable"]


@runtime_checkable
class Serializable(Protocol):
    """An object with a state that a checkpoint holds.

    A subclass without state needs to write neither method.
    """

    def state_dict(self) -> dict[str, Any]:
        """The state, as tensors and plain values."""
        return {}

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        """Continue from a state that `state_dict` returned."""
        return

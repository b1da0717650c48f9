"""Options: given by name to whoever knows them, and refused if nobody does."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["consume_all"]


class _Asked(dict[str, Any]):
    """Remembers which names it was asked for, which are those that the asker knows."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        super().__init__(options)
        self.names: set[str] = set()

    def pop(self, key: str, *default: Any) -> Any:
        self.names.add(key)
        return super().pop(key, *default)

    def get(self, key: str, default: Any = None) -> Any:
        self.names.add(key)
        return super().get(key, default)

    def __getitem__(self, key: str) -> Any:
        self.names.add(key)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self.names.add(str(key))
        return super().__contains__(key)


def consume_all(
    owner: object, consume: Callable[[dict[str, Any]], None], options: Mapping[str, Any] | None
) -> None:
    """Let `consume` take what it knows out of a copy of the options, and refuse the rest.

    Args:
        owner: whose options these are, for the error.
        consume: its `consume_options`. What it asks for counts as known.
        options: as the user gave them.

    Raises:
        ValueError: if an option was not asked for.
    """
    asked = _Asked(options or {})
    consume(asked)
    unknown = [name for name in asked if name not in asked.names]
    if unknown:
        known = ", ".join(sorted(asked.names)) or "none"
        raise ValueError(
            f"{type(owner).__name__} has no option {', '.join(map(repr, unknown))}. "
            f"Its options: {known}."
        )

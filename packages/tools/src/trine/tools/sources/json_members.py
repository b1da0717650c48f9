"""A JSON object member by member, and some of its arrays item by item.

A trace of 1 GiB becomes ten times as large if all its events are Python objects at once.
"""

from __future__ import annotations

import json
import re
from collections.abc import Container, Iterator

__all__ = ["members"]

_decode = json.JSONDecoder().raw_decode
_space = re.compile(r"[ \t\r\n]*").match


def members(text: str, arrays: Container[str]) -> Iterator[tuple[str, object]]:
    """The members of the object that a text holds.

    Args:
        text: the object, and nothing else.
        arrays: names of members whose value, an array, is given as an iterator over its
            items. It is to be used up before the next member is asked for.

    Raises:
        ValueError: where the text is not JSON, in the course of it.
    """
    return _Cursor(text).members(arrays)


class _Cursor:
    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0

    def members(self, arrays: Container[str]) -> Iterator[tuple[str, object]]:
        self._expect("{")
        if self._is_next("}"):
            return
        while True:
            name = self._value()
            if not isinstance(name, str):
                raise ValueError(f"a name was expected at character {self._at}")
            self._expect(":")
            if name in arrays:
                yield name, self._items()
            else:
                yield name, self._value()
            if not self._is_next(","):
                break
        self._expect("}")
        if self._peek():
            raise ValueError(f"something follows the end, at character {self._at}")

    def _items(self) -> Iterator[object]:
        self._expect("[")
        if self._is_next("]"):
            return
        while True:
            yield self._value()
            if not self._is_next(","):
                break
        self._expect("]")

    def _value(self) -> object:
        self._peek()
        try:
            value, self._at = _decode(self._text, self._at)
        except RecursionError:
            raise ValueError(f"it is nested too deeply at character {self._at}") from None
        return value

    def _peek(self) -> str:
        found = _space(self._text, self._at)
        assert found is not None
        self._at = found.end()
        return self._text[self._at : self._at + 1]

    def _is_next(self, char: str) -> bool:
        if self._peek() != char:
            return False
        self._at += 1
        return True

    def _expect(self, char: str) -> None:
        if not self._is_next(char):
            if self._at >= len(self._text):
                raise ValueError(f"it ends where {char!r} was expected")
            raise ValueError(f"{char!r} was expected at character {self._at}")

"""Say on a terminal how far a command is that takes long."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from time import monotonic
from types import TracebackType
from typing import Final, Self, TextIO, TypeVar

__all__ = ["Progress"]

T = TypeVar("T")

_PATIENCE_S: Final = 1.0
"""What is done sooner needs no such line."""


class Progress:
    """A line on a terminal's stderr, which is gone when the block ends.

    Args:
        what: is counted, such as "ranks read".
        of: how many there will be.
        file: where; elsewhere than on a terminal nothing is shown.
    """

    def __init__(self, what: str, of: int, file: TextIO | None = None) -> None:
        self._what = what
        self._of = of
        self._file = file or sys.stderr
        self._began_s = monotonic()
        self._width = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._write("")

    def over(self, items: Iterable[T]) -> Iterator[T]:
        """The same items, counted as they pass."""
        for done, item in enumerate(items, start=1):
            if self._file.isatty() and monotonic() - self._began_s >= _PATIENCE_S:
                self._write(f"{done} of {self._of} {self._what}")
            yield item

    def _write(self, text: str) -> None:
        if text or self._width:
            end = "" if text else "\r"
            self._file.write("\r" + text.ljust(self._width) + end)
            self._file.flush()
            self._width = len(text)

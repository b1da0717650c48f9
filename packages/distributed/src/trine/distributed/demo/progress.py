"""How far the training is: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import shutil
from time import monotonic
from typing import TextIO

from trine.core import TrineError

__all__ = ["Progress"]

_LINES = 20
_REDRAW_S = 0.1


class Progress:
    """Shows one training run as it goes.

    Args:
        steps: how many there will be.
        stream: where to write; None shows nothing, for ranks other than 0.
    """

    def __init__(self, steps: int, stream: TextIO | None) -> None:
        self._steps = steps
        self._stream = stream
        self._is_terminal = stream is not None and stream.isatty()
        encoding = (getattr(stream, "encoding", None) or "").lower()
        self._full, self._empty = "█░" if encoding.startswith("utf") else "#."
        self._every = max(1, steps // _LINES)
        self._drawn_at = 0.0

    def show(self, step: int, loss: float, tokens_per_s: float) -> None:
        """Say that `step` steps are done.

        Raises:
            TrineError: if the stream takes no more, such as a file on a full disk.
        """
        if self._stream is None:
            return
        numbers = f"loss {loss:.3f}   {tokens_per_s:,.0f} tokens/s"
        last = step == self._steps
        if not self._is_terminal:
            if step == 1 or last or step % self._every == 0:
                self._write(f"step {step:>5} of {self._steps}   {numbers}\n")
        elif last or monotonic() - self._drawn_at >= _REDRAW_S:
            self._drawn_at = monotonic()
            count = f"{step}/{self._steps}"
            room = shutil.get_terminal_size().columns - len(count) - len(numbers) - 6
            width = max(4, min(40, room))
            done = width * step // self._steps
            bar = self._full * done + self._empty * (width - done)
            self._write(f"\r{bar} {count}   {numbers}\x1b[K")

    def close(self) -> None:
        """End the bar's line."""
        if self._is_terminal:
            self._write("\n")

    def _write(self, text: str) -> None:
        assert self._stream is not None
        try:
            self._stream.write(text)
            self._stream.flush()
        except OSError as error:
            raise TrineError(
                f"The progress cannot be written to standard output: {error.strerror}."
            ) from error

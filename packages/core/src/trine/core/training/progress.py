"""The line that says how far a run is: rewritten in place on a terminal, else now and then."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from time import monotonic
from typing import Any, TextIO

import torch.distributed as dist

__all__ = ["ProgressLine", "is_rank_zero"]


def is_rank_zero() -> bool:
    """Whether this process speaks for all: rank 0, or the only one.

    Where there is no process group the variable `RANK` decides; one that is empty or no
    number says nothing, and this process is taken for the only one.
    """
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank() == 0
    try:
        return int(os.environ.get("RANK", "0")) == 0
    except ValueError:
        return True


class ProgressLine:
    """Writes `title  3/40  loss 0.123  5.1 steps/s` to a stream.

    Values are read only when a line is due, because reading one waits for its device. A
    stream that is not there, or can no longer be written to, ends the line and not the run.

    Args:
        stream: where to write; standard error by default.
        clock: seconds, for the rate and to limit how often a line is written.
    """

    def __init__(
        self, stream: TextIO | None = None, clock: Callable[[], float] = monotonic
    ) -> None:
        # None where a program has no standard error, such as under pythonw.
        self._stream: TextIO | None = sys.stderr if stream is None else stream
        self._clock = clock
        self._on_terminal = self._is_terminal()
        self._interval_s = 0.1 if self._on_terminal else 10.0
        self._width = 0  # of the line that a terminal shows and that is not ended yet
        self._last_s = clock()
        self._steps = 0  # since that time

    def update(
        self,
        title: str,
        done: int,
        total: int | None,
        values: Mapping[str, Any],
        *,
        final: bool = False,
    ) -> None:
        """Say that one more step is done, if a line is due or this is the last step.

        Args:
            title: what the steps belong to, such as `"epoch 1/2"`.
            done: steps done of that.
            total: steps there will be, or None if nobody knows.
            values: what to show beside; those that are no single numbers are left out.
            final: no further step follows; the line is due and is ended.
        """
        if self._stream is None:
            return
        self._steps += 1
        elapsed_s = self._clock() - self._last_s
        if not final and elapsed_s < self._interval_s:
            return
        parts = [title, f"{done}" if total is None else f"{done}/{total}", *_shown(values)]
        if elapsed_s > 0:
            parts.append(f"{self._steps / elapsed_s:.3g} steps/s")
        line = "  ".join(parts)
        if not self._on_terminal:
            self._write(line + "\n")
        else:
            self._write("\r" + line.ljust(self._width) + ("\n" if final else ""))
            self._width = 0 if final else len(line)
        self._last_s += elapsed_s
        self._steps = 0

    def close(self) -> None:
        """End a line that was left open, so that what follows starts on its own."""
        if self._width:
            self._write("\n")
            self._width = 0

    def _is_terminal(self) -> bool:
        try:
            return self._stream is not None and self._stream.isatty()
        except (OSError, ValueError):  # ValueError: it is closed
            return False

    def _write(self, text: str) -> None:
        if self._stream is None:
            return
        try:
            self._stream.write(text)
            self._stream.flush()
        except (OSError, ValueError):  # such as a pipe that nobody reads any more
            self._stream = None


def _shown(values: Mapping[str, Any]) -> list[str]:
    shown = []
    for name, value in values.items():
        try:
            shown.append(f"{name} {float(value):.4g}")
        except (TypeError, ValueError, RuntimeError):  # no number, or a tensor with several
            continue
    return shown

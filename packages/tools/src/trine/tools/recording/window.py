"""Which steps of a run are recorded. Only the decision; nothing here records."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["Phase", "Window"]

Phase = Literal["idle", "warmup", "record"]


@dataclass(frozen=True)
class Window:
    """A schedule of steps: skip some, then again and again wait, warm up and record.

    Attributes:
        skip: steps before the first window, which are slow for reasons of their own.
        wait: steps at the beginning of each window in which nothing is recorded, at the
            cost of a call site that nobody listens to.
        warmup: steps after those in which events are made and thrown away, so that the
            first recorded step costs what the others do.
        record: steps after those that are recorded.
        repeat: how many windows there are; 0 means until the run ends.

    Raises:
        ValueError: if a number is out of range.

    Example:
        >>> from trine.tools import Window
        >>> window = Window(skip=1, wait=2, warmup=1, record=2, repeat=1)
        >>> [window.phase(step) for step in range(8)]
        ['idle', 'idle', 'idle', 'warmup', 'record', 'record', 'idle', 'idle']
    """

    skip: int = 0
    wait: int = 0
    warmup: int = 0
    record: int = 1
    repeat: int = 1

    def __post_init__(self) -> None:
        for name in ("skip", "wait", "warmup", "repeat"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it counts from 0.")
        if self.record < 1:
            raise ValueError(f"record is {self.record}; a window records at least one step.")

    @classmethod
    def parse(cls, text: str) -> Window:
        """The window that a text describes: `20` is one step, `20-29` are ten.

        Raises:
            ValueError: if it describes none.
        """
        first, dash, last = text.partition("-")
        last = last if dash else first
        if not (first.isdecimal() and last.isdecimal() and int(first) <= int(last)):
            raise ValueError(
                f"{text!r} is neither the number of a step nor a first and a last one, counted "
                "from 0: 20 or 20-29."
            )
        return cls(skip=int(first), record=int(last) - int(first) + 1)

    def phase(self, step: int) -> Phase:
        """What is done in a step.

        Args:
            step: how many steps of the run came before it.
        """
        window, place = divmod(step - self.skip, self.wait + self.warmup + self.record)
        if window < 0 or (self.repeat and window >= self.repeat) or place < self.wait:
            return "idle"
        return "warmup" if place < self.wait + self.warmup else "record"

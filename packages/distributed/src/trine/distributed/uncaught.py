"""Whether an exception ends the program, for those who hook into `sys.excepthook`."""

from __future__ import annotations

import sys

__all__ = ["uncaught"]


def uncaught(error: BaseException) -> bool:
    """Whether the interpreter has called the hook for `error`, because nobody caught it.

    Programs call the hook as well, to print an exception that they have caught. The interpreter
    notes the exception first.
    """
    return getattr(sys, "last_value", None) is error

"""Spans in Intel VTune and whatever else collects ITT."""

from __future__ import annotations

import threading
from importlib import import_module
from types import ModuleType
from typing import Any

from torch.profiler import itt as _untyped

from trine.core.tracing import TraceSink
from trine.tools.sinks.ranges import RangeSink, unavailable

__all__ = ["itt_sink"]

itt: Any = _untyped  # torch leaves it without types


def itt_sink() -> TraceSink:
    """A sink that shows spans to ITT.

    torch's own binding is used where torch has one, as most builds for x86 do; else the
    package `ittapi`. Where there is neither, one warning says so and nothing happens.
    """
    if itt.is_available():
        return RangeSink(_TorchItt())
    try:
        return RangeSink(_IttApi(import_module("ittapi")))
    except ImportError:
        return unavailable("ITT", "Install it: pip install ittapi.")


class _TorchItt:
    def push(self, label: str, category: str) -> None:
        itt.range_push(label)

    def pop(self) -> None:
        itt.range_pop()

    def mark(self, label: str, category: str) -> None:
        itt.mark(label)


class _IttApi:
    def __init__(self, ittapi: ModuleType) -> None:
        self._ittapi = ittapi
        self._domain = ittapi.domain("trine")
        self._open = threading.local()

    def push(self, label: str, category: str) -> None:
        task = self._ittapi.task(label, domain=self._domain)
        task.begin()
        stack: list[Any] = self._open.__dict__.setdefault("stack", [])
        stack.append(task)

    def pop(self) -> None:
        self._open.stack.pop().end()

    def mark(self, label: str, category: str) -> None:
        self.push(label, category)
        self.pop()

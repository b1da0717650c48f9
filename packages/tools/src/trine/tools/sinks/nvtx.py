"""Spans in NVIDIA Nsight Systems and whatever else collects NVTX."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import Any

import torch

from trine.core.tracing import TraceSink
from trine.tools.sinks.ranges import RangeSink, unavailable

__all__ = ["nvtx_sink"]

_MAX_KNOWN = 1 << 12  # labels whose attributes are kept
_COLORS = {
    "step": "white",
    "compute": "green",
    "comm": "orange",
    "mem": "purple",
    "io": "blue",
    "user": "gray",
}


def nvtx_sink() -> TraceSink:
    """A sink that shows spans to NVTX, in a domain "trine", by category.

    Without the package `nvtx`, torch's own binding stands in where torch was built for CUDA;
    it knows no domains. Where there is neither, one warning says so and nothing happens.
    """
    try:
        return RangeSink(_Domain(import_module("nvtx")))
    except ImportError:
        if torch.version.cuda is not None:
            return RangeSink(_TorchNvtx())
    return unavailable("NVTX", "Install it: pip install nvtx.")


class _Domain:
    def __init__(self, nvtx: ModuleType) -> None:
        self._domain = nvtx.get_domain("trine")
        self._known: dict[tuple[str, str], Any] = {}

    def push(self, label: str, category: str) -> None:
        self._domain.push_range(self._attributes(label, category))

    def pop(self) -> None:
        self._domain.pop_range()

    def mark(self, label: str, category: str) -> None:
        self._domain.mark(self._attributes(label, category))

    def _attributes(self, label: str, category: str) -> Any:
        found = self._known.get((label, category))
        if found is None:
            found = self._domain.get_event_attributes(
                message=label, category=category, color=_COLORS.get(category, "gray")
            )
            if len(self._known) < _MAX_KNOWN:
                self._known[label, category] = found
        return found


class _TorchNvtx:
    def __init__(self) -> None:
        self._nvtx: Any = torch.cuda.nvtx  # torch leaves it without types

    def push(self, label: str, category: str) -> None:
        self._nvtx.range_push(label)

    def pop(self) -> None:
        self._nvtx.range_pop()

    def mark(self, label: str, category: str) -> None:
        self._nvtx.mark(label)

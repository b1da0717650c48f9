"""What would lower a peak of memory: one sentence, from what the peak is made of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

__all__ = ["KINDS", "advice"]

KINDS: Final = {
    "sharded": "parameter shards",
    "unsharded": "whole parameters",
    "gradients": "gradients",
    "optimizer": "optimizer state",
    "activations": "activations",
    "communication": "communication buffers",
    "replicated": "model buffers",
}
"""Kinds of memory as people call them, in the order in which they are shown."""

_STATE: Final = ("sharded", "gradients", "optimizer")


def advice(by_kind: Mapping[str, float], *, offloads: bool = False) -> str:
    """How to lower the largest part of a peak.

    Args:
        by_kind: bytes of each kind of memory at the peak.
        offloads: whether shards, gradients and optimizer state live in host memory already.
    """
    parts = {kind: by_kind.get(kind, 0.0) for kind in KINDS if kind not in _STATE}
    # These three shrink together.
    parts["state"] = sum(by_kind.get(kind, 0.0) for kind in _STATE)
    largest = max(parts, key=lambda kind: parts[kind])
    if not parts[largest]:
        return "Nothing was counted."
    return {
        "state": "Most of it is shards, gradients and optimizer state: "
        + ("shard over more ranks." if offloads else "shard over more ranks, or offload them."),
        "unsharded": "Most of it is whole parameters: make units smaller, and free them after "
        "forward.",
        "activations": "Most of it is activations: checkpoint them, or take a smaller batch on "
        "each rank.",
        "communication": "Most of it is communication buffers: make units smaller, or gather and "
        "reduce in a smaller dtype.",
        "replicated": "Most of it is the model's buffers, which every rank holds whole.",
    }[largest]

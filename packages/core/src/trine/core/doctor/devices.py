"""Which devices there are, and whether each can multiply two matrices."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from trine.core.doctor.checks import Check
from trine.core.doctor.children import probe, run_together
from trine.core.doctor.software import has_nvidia_driver

__all__ = ["check_devices"]


def check_devices(limit_s: float) -> Iterator[Check]:
    """The CPU, and every accelerator that this torch knows, tried in another process."""
    if torch.accelerator.current_accelerator() is None:
        yield Check("device", "ok", "cpu; this torch knows no accelerator")
        return
    yield Check("device", "ok", "cpu")
    (ended,) = run_together([probe("accelerators", limit_s=limit_s)], limit_s + 1)
    for facts in ended.facts:
        if "unavailable" in facts:
            yield _unavailable(facts["kind"], facts["unavailable"])
        elif "name" in facts:
            yield _device(facts)
    if not ended.succeeded:
        yield Check(
            "device",
            "error",
            f"the devices could not be tried: {ended.reason}",
            "Look at the driver's own tool (nvidia-smi, rocm-smi, xpu-smi) and the system log; "
            "a device that hangs needs a reset by an administrator.",
            {"errors": ended.errors},
        )


def _device(facts: dict[str, object]) -> Check:
    name, memory = facts["name"], facts.get("memory_bytes")
    described = f"{name}, {facts['model']}" if "model" in facts else f"{name}"
    if "error" in facts:
        return Check(
            "device",
            "error",
            f"{described} does not work: {facts['error']}",
            "Free it of other programs, or hide it (CUDA_VISIBLE_DEVICES without its number).",
            facts,
        )
    size = f", {memory / 2**30:.0f} GiB" if isinstance(memory, int) else ""
    return Check("device", "ok", f"{described}{size}", details=facts)


def _unavailable(kind: str, reason: str) -> Check:
    if kind == "cuda" and has_nvidia_driver():
        return Check(
            "device",
            "warning",
            f"torch cannot use this machine's GPU: {reason}",
            "Update the driver, or install a torch built for the CUDA version that nvidia-smi "
            "shows; an empty CUDA_VISIBLE_DEVICES hides every GPU.",
        )
    return Check("device", "absent", f"no {kind} device: {reason}")

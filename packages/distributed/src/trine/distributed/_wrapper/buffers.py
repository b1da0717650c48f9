"""Buffers in another dtype while a module computes; outside they are as they were made."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from trine.distributed._fsdp.torch_internals import versions_of

__all__ = ["buffers_as"]


@contextmanager
def buffers_as(dtype: torch.dtype, modules: Iterable[nn.Module]) -> Iterator[None]:
    """Let floating-point buffers be of `dtype` inside.

    What the modules write into them is kept, in the dtype in which they were made.

    Args:
        dtype: a floating-point one.
        modules: whose own buffers, not those of modules below them.
    """
    cast: list[tuple[nn.Module, str, Tensor, Tensor, int]] = []
    done: dict[int, Tensor] = {}  # one buffer may stand in several places
    for module in modules:
        for name, buffer in module.named_buffers(recurse=False):
            if not buffer.is_floating_point() or buffer.dtype is dtype:
                continue
            if id(buffer) not in done:
                with torch.inference_mode(buffer.is_inference()):  # its writes are counted
                    done[id(buffer)] = buffer.to(dtype)
            inside = done[id(buffer)]
            module._buffers[name] = inside
            cast.append((module, name, buffer, inside, _writes(inside)))
    try:
        yield
    finally:
        for module, name, buffer, inside, version in cast:
            found = module._buffers.get(name)
            if found is None:
                continue  # the module has taken it away
            if found is not inside:
                module._buffers[name] = found.to(buffer.dtype)
                continue
            if _writes(inside) != version:
                with torch.no_grad():
                    buffer.copy_(inside)
            module._buffers[name] = buffer


def _writes(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else versions_of([tensor])

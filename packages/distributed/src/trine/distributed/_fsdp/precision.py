"""Cast what enters and leaves a module. Parameters and gradients are cast in the group."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trine.core.batches import map_tensors

__all__ = ["cast_floating"]


def cast_floating(batch: Any, dtype: torch.dtype) -> Any:
    """The batch with its floating-point tensors in `dtype`, all else as it was.

    The caller's containers are not changed; a batch that needs no cast is returned itself.
    """

    def cast(tensor: Tensor) -> Tensor:
        if tensor.dtype is dtype or not tensor.is_floating_point():
            return tensor
        return tensor.to(dtype)

    return map_tensors(batch, cast)

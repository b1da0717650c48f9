"""`map`: apply a module to each batch of an iterable, on the module's device."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from trine.core.handler.code_block import forward

__all__ = ["map"]


def map(
    func: Callable[..., Any],
    iterable: Iterable[Any],
    out_keys: set[str] | None = None,
    device: Any = "cpu",
) -> Iterable[Any]:
    """Apply a module to each batch of an iterable, when the result is asked for.

    Args:
        func: a module that was moved with `trine.core.to`, a method of one, or a
            `CodeBlock`.
        iterable: batches; they are moved to the module's device one at a time.
        out_keys: the outputs to keep, or None for all.
        device: where the tensors of the results are put.

    Example:
        >>> import torch
        >>> import trine.core
        >>> model = trine.core.to(torch.nn.Flatten(), "cpu")
        >>> for flat in trine.core.map(model, [torch.ones(2, 1, 3)]):
        ...     print(flat.shape)
        torch.Size([2, 3])
    """
    block = forward(func)
    return block.runtime.map(block, iterable, out_keys, device)

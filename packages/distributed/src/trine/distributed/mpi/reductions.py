"""What ranks sent, reduced on this rank in the order of the ranks.

The order does not depend on the MPI library or on timing, so a run can be repeated bit for
bit. Half types are summed in fp32 and rounded once.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributed import ReduceOp

__all__ = ["Op", "check_reducible", "op_of", "reduce_rows"]

Op = ReduceOp.RedOpType

_BITWISE: dict[Op, Callable[..., Tensor]] = {
    ReduceOp.BAND: torch.bitwise_and,
    ReduceOp.BOR: torch.bitwise_or,
    ReduceOp.BXOR: torch.bitwise_xor,
}
_ORDERING = (ReduceOp.MIN, ReduceOp.MAX)
_KNOWN = (ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX, *_BITWISE)
# torch computes with these through a wider type only.
_WIDER = {torch.uint16: torch.int32, torch.uint32: torch.int64, torch.bool: torch.uint8}


def op_of(given: object) -> Op:
    """The kind of a reduction that c10d hands over.

    Raises:
        ValueError: for one that takes more than the kind, such as PREMUL_SUM.
    """
    kind = getattr(given, "op", given)
    found: list[Op] = [op for op in _KNOWN if op == kind]
    if found:
        return found[0]
    raise ValueError(
        f"The backend mpi cannot reduce with {given}; it knows "
        f"{', '.join(op.name for op in _KNOWN)}. Scale the tensor first and sum."
    )


def check_reducible(tensor: Tensor, op: Op) -> None:
    """Refuse a dtype that `op` means nothing for.

    Raises:
        ValueError: naming both.
    """
    dtype = tensor.dtype
    integral = not (dtype.is_floating_point or dtype.is_complex)
    if (op in _BITWISE and not integral) or (
        op in (ReduceOp.MIN, ReduceOp.MAX) and dtype.is_complex
    ):
        raise ValueError(f"{op.name} means nothing for tensors of {dtype}.")
    if dtype.is_floating_point and dtype.itemsize == 1:
        raise ValueError(
            f"Tensors of {dtype} travel, but are not added up: cast to bfloat16 or float32 first."
        )


def reduce_rows(rows: Tensor, op: Op, out: Tensor) -> None:
    """Reduce what each rank sent.

    Args:
        rows: shape (ranks, n).
        op: how.
        out: shape (n,), dtype of `rows`; overwritten.
    """
    wider = _WIDER.get(rows.dtype)
    if wider is not None:
        result = torch.empty(out.shape, dtype=wider)
        reduce_rows(
            rows.to(wider),
            ReduceOp.MAX if rows.dtype is torch.bool and op is ReduceOp.SUM else op,
            result,
        )
        out.copy_(result)
    elif op in _BITWISE:
        out.copy_(rows[0])
        for row in rows[1:]:
            _BITWISE[op](out, row, out=out)
    elif op is ReduceOp.MIN:
        torch.amin(rows, 0, out=out)
    elif op is ReduceOp.MAX:
        torch.amax(rows, 0, out=out)
    else:
        _add_or_multiply(rows, op, out)


def _add_or_multiply(rows: Tensor, op: Op, out: Tensor) -> None:
    """Row by row where that is exact enough: torch may add up columns in another order."""
    half = rows.dtype.is_floating_point and rows.dtype.itemsize == 2
    total = rows[0].to(torch.float32) if half else out.copy_(rows[0])
    for row in rows[1:]:
        if op is ReduceOp.PRODUCT:
            total.mul_(row)
        else:
            total.add_(row)
    if op is ReduceOp.AVG:
        if total.is_floating_point() or total.is_complex():
            total.div_(rows.shape[0])
        else:
            total.div_(rows.shape[0], rounding_mode="trunc")
    if half:
        out.copy_(total)

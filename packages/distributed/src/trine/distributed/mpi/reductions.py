"""What ranks sent, reduced on this rank in the order of the ranks.

The order does not depend on the MPI library or on timing, so a run can be repeated bit for
bit. Half types are summed in fp32 and rounded once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp

__all__ = ["Op", "check_reducible", "op_of", "reduce_rows"]

Op = ReduceOp.RedOpType

_BITWISE = (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR)
_OF_TWO: dict[Op, Callable[..., Tensor]] = {
    ReduceOp.SUM: torch.add,
    ReduceOp.AVG: torch.add,
    ReduceOp.PRODUCT: torch.mul,
    ReduceOp.MIN: torch.minimum,
    ReduceOp.MAX: torch.maximum,
    ReduceOp.BAND: torch.bitwise_and,
    ReduceOp.BOR: torch.bitwise_or,
    ReduceOp.BXOR: torch.bitwise_xor,
}
_KNOWN = {op: op for op in _OF_TWO}  # torch makes a new object each time it is asked
# torch computes with these through a wider type only.
_WIDER = {torch.uint16: torch.int32, torch.uint32: torch.int64, torch.bool: torch.uint8}


def op_of(given: object) -> Op:
    """The kind of a reduction that c10d hands over.

    Raises:
        ValueError: for one that takes more than the kind, such as PREMUL_SUM.
    """
    kind: Any = getattr(given, "op", given)
    found = _KNOWN.get(kind)
    if found is not None:
        return found
    raise ValueError(
        f"The backend mpi cannot reduce with {given}; it knows "
        f"{', '.join(op.name for op in _KNOWN)}. Scale the tensor first and sum."
    )


def check_reducible(tensor: Tensor, op: Op) -> None:
    """Refuse a dtype that `op` means nothing for.

    Raises:
        ValueError: naming both.
    """
    why_not = _why_not(tensor.dtype, op)
    if why_not is not None:
        raise ValueError(why_not)


@cache
def _why_not(dtype: torch.dtype, op: Op) -> str | None:
    integral = not (dtype.is_floating_point or dtype.is_complex)
    ordering = op in (ReduceOp.MIN, ReduceOp.MAX)
    if (op in _BITWISE and not integral) or (ordering and dtype.is_complex):
        return f"{op.name} means nothing for tensors of {dtype}."
    if dtype.is_floating_point and dtype.itemsize == 1:
        return (
            f"Tensors of {dtype} travel, but are not added up: cast to bfloat16 or float32 first."
        )
    return None


def reduce_rows(rows: Sequence[Tensor], op: Op, out: Tensor, spare: Tensor) -> None:
    """Reduce what each rank sent, in the order of the ranks.

    Args:
        rows: 1-D, one for each rank.
        op: how.
        out: shape and dtype of a row, and may be one; overwritten.
        spare: the same, for what is reduced on the way; may be the first row, no other.
    """
    of_two, dtype = _OF_TWO[op], out.dtype
    half = dtype.is_floating_point and dtype.itemsize == 2
    # One operation on two numbers of a half type is computed in fp32 and rounded once as it is.
    wider = torch.float32 if half and (len(rows) > 2 or op is ReduceOp.AVG) else _WIDER.get(dtype)
    if wider is not None:
        if dtype is torch.bool and of_two is torch.add:
            of_two = torch.maximum
        total = rows[0].to(wider)
        for row in rows[1:]:
            of_two(total, row.to(wider), out=total)
        if op is ReduceOp.AVG:
            _divide(total, len(rows))
        out.copy_(total)
        return
    total = rows[0]
    for row in rows[1:-1]:
        total = of_two(total, row, out=spare)
    if len(rows) > 1:
        of_two(total, rows[-1], out=out)
    else:
        out.copy_(total)
    if op is ReduceOp.AVG:
        _divide(out, len(rows))


def _divide(total: Tensor, by: int) -> None:
    exact = total.is_floating_point() or total.is_complex()
    total.div_(by, rounding_mode=None if exact else "trunc")

"""Collectives as torch names them, in the words of the schema."""

from __future__ import annotations

import re
from typing import Final

__all__ = ["NBYTES_OF_DTYPE", "dtype_name", "operation_name", "sent_nbytes"]

_ENDINGS: Final = re.compile(r"(_base|_coalesced|_into_tensor|_tensor|_single|_out)+$")
_OTHER_NAMES: Final = {
    "allgather": "all_gather",
    "allreduce": "all_reduce",
    "reducescatter": "reduce_scatter",
    "alltoall": "all_to_all",
    "alltoallv": "all_to_all",
    "all_to_allv": "all_to_all",
}
_DTYPES: Final = {
    "float": ("float32", 4),
    "double": ("float64", 8),
    "half": ("float16", 2),
    "bfloat16": ("bfloat16", 2),
    "long": ("int64", 8),
    "int": ("int32", 4),
    "short": ("int16", 2),
    "char": ("int8", 1),
    "byte": ("uint8", 1),
    "bool": ("bool", 1),
}
NBYTES_OF_DTYPE: Final = dict(_DTYPES.values())
"""Bytes of an element, by the name of its dtype."""


def operation_name(name: str) -> str:
    """`all_gather` for `_allgather_base`, `all_gather_into_tensor_coalesced` and their kin."""
    plain = _ENDINGS.sub("", name.strip().lower().lstrip("_"))
    return _OTHER_NAMES.get(plain, plain)


def dtype_name(name: str) -> str:
    """`float32` for `Float`; what is not known stays as it is."""
    return _DTYPES.get(name.lower(), (name, 0))[0]


def sent_nbytes(operation: str, brought_nbytes: int, ranks: int) -> int:
    """Bytes that a rank sends at least, 0 if that does not follow.

    Args:
        operation: what the ranks do.
        brought_nbytes: the size of the rank's input.
        ranks: how many take part; 0 if that is not known.
    """
    if ranks < 1:
        return 0
    match operation:
        case "all_gather":
            return brought_nbytes * (ranks - 1)
        case "reduce_scatter" | "all_to_all":
            return brought_nbytes * (ranks - 1) // ranks
        case "all_reduce":
            return 2 * brought_nbytes * (ranks - 1) // ranks
    return 0

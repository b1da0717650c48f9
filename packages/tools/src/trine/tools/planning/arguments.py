"""The words of `trine plan` as what they mean: models, meshes, sizes, units, shapes of batches."""

from __future__ import annotations

import math
import re
from typing import Final

import torch
from torch import Tensor

from trine.core.planning import PlanError

__all__ = ["batch_of", "mesh_of", "nbytes_of", "place_of", "reshard_of", "units_of"]

# A bare number is no size: who writes 80 means GiB.
_SIZES: Final = {
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
_SIZE: Final = re.compile(r"\d{1,18}", re.ASCII).fullmatch
_MAX_RANKS: Final = 10_000_000
_COUNTS: Final = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "b": 10**9}


def place_of(text: str) -> tuple[str, str]:
    """`package.module:factory` as the name of a module and what to take from it.

    Raises:
        PlanError: if it is not understood.
    """
    module, _, name = text.partition(":")
    if module.endswith(".py") or "/" in module:
        raise PlanError(
            f"MODEL is {text!r}. Expected the name of a module as import takes it, without .py: "
            "package.module:factory. The current folder is searched too."
        )
    if not module or not name:
        raise PlanError(
            f"MODEL is {text!r}. Expected package.module:factory, where factory is a function or "
            "class in that module."
        )
    return module, name


def mesh_of(text: str) -> dict[str, int]:
    """`replicate=2,shard=4` as sizes of axes.

    Raises:
        PlanError: if it is not understood.
    """
    found: dict[str, int] = {}
    for part in text.split(","):
        name, _, size = (each.strip() for each in part.partition("="))
        known = name in ("shard", "replicate") and name not in found
        if not known or not _SIZE(size) or int(size) < 1:
            raise PlanError(
                f"--mesh {text!r} is not understood. Expected shard=8, or replicate=2,shard=4."
            )
        found[name] = int(size)
    if math.prod(found.values()) > _MAX_RANKS:
        raise PlanError(
            f"--mesh {text!r} has more ranks than {_MAX_RANKS:,}, the most that is planned for."
        )
    return {"replicate": found.get("replicate", 1), "shard": found.get("shard", 1)}


def nbytes_of(text: str) -> int:
    """`80GiB` as bytes.

    Raises:
        PlanError: if it is not understood.
    """
    found = _number(text, _SIZES)
    if found is None:
        raise PlanError(f"--memory {text!r} is not understood. Expected a size such as 80GiB.")
    return found


def units_of(text: str | None) -> tuple[str, ...] | int | None:
    """`Block,Embedding` as names of classes, `10M` as a number of parameters.

    Raises:
        PlanError: if it is neither.
    """
    if text is None:
        return None
    found = _number(text, _COUNTS)
    if found is not None:
        return found
    names = tuple(name.strip() for name in text.split(","))
    if not all(name.isidentifier() for name in names):
        raise PlanError(
            f"--units {text!r} is not understood. Expected names of classes, such as "
            "Block,Embedding, or the least number of parameters of a unit, such as 10M."
        )
    return names


def reshard_of(text: str) -> bool | int | None:
    """`auto`, `yes`, `no` or a number of ranks, as `fully_shard` takes it.

    Raises:
        PlanError: if it is none of these.
    """
    if _SIZE(text):
        return int(text)
    known = {"auto": None, "yes": True, "no": False}
    if text not in known:
        raise PlanError(
            f"--reshard-after-forward {text!r} is not understood. Expected auto, yes, no, or a "
            "number of ranks."
        )
    return known[text]


def batch_of(text: str) -> Tensor:
    """`8x2048:int64` as a tensor without memory; float32 if no dtype is named.

    Raises:
        PlanError: if it is not understood.
    """
    shape, _, name = text.partition(":")
    dtype = getattr(torch, name or "float32", None)
    sizes = shape.lower().replace(",", "x").split("x")
    if not isinstance(dtype, torch.dtype) or not all(map(_SIZE, sizes)):
        raise PlanError(
            f"--batch {text!r} is not understood. Expected a shape and a dtype, such as "
            "8x2048:int64."
        )
    try:
        return torch.empty([int(size) for size in sizes], dtype=dtype, device="meta")
    except (RuntimeError, TypeError) as error:
        raise PlanError(f"--batch {text!r} is larger than any tensor can be.") from error


def _number(text: str, units: dict[str, int]) -> int | None:
    match = re.fullmatch(r"\s*(\d{1,18}(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text)
    factor = None if match is None else units.get(match[2].lower())
    return None if match is None or factor is None else int(float(match[1]) * factor)

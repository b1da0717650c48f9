"""What a precision is: its name, the dtypes that follow from it, and its context.

Which device can do which precision is the device's to say (`Device.supported_precisions`);
nothing here asks what this machine has, except whether a library for fp8 is installed.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, ContextDecorator, ExitStack, contextmanager
from enum import StrEnum
from importlib import import_module
from importlib.util import find_spec
from types import TracebackType
from typing import Any, Literal, Self, TypedDict

import torch

__all__ = ["FSDPPolicyArgs", "Precision", "PrecisionContext", "fp8_library"]


class FSDPPolicyArgs(TypedDict):
    """The arguments of a `MixedPrecisionPolicy`, of ours or of torch's."""

    param_dtype: torch.dtype | None
    reduce_dtype: torch.dtype | None
    output_dtype: torch.dtype | None


class Precision(StrEnum):
    """How numbers are stored and computed in one training run.

    The `AMP_` members keep parameters in fp32 and compute in the smaller type, which
    autocast chooses for each operation. The plain ones say that the parameters themselves
    are in that type, so that everything follows from them and autocast stays off.
    """

    FP32 = "fp32"
    AMP_FP16 = "amp_fp16"
    AMP_BF16 = "amp_bf16"
    FP16 = "fp16"
    BF16 = "bf16"
    AMP_FP8 = "amp_fp8"

    AMP = "amp_fp16"
    """The name that `AMP_FP16` had when it was the only one."""

    @classmethod
    def _missing_(cls, value: object) -> Precision | None:
        if not isinstance(value, str):
            return None
        return cls.__members__.get(value.strip().upper())

    @classmethod
    def parse(cls, spec: str | Precision) -> Precision:
        """The member of that name, in any case.

        Raises:
            ValueError: if there is none; the message lists those there are.
        """
        try:
            return cls(spec)
        except ValueError:
            known = ", ".join(member.value for member in cls)
            raise ValueError(f"Unknown precision {spec!r}. Choose one of: {known}.") from None

    @property
    def is_amp(self) -> bool:
        """Whether autocast chooses the dtypes, over parameters in fp32."""
        return self.value.startswith("amp")

    @property
    def param_dtype(self) -> torch.dtype:
        """The dtype of the parameters that the optimizer holds."""
        return torch.float32 if self.is_amp else _COMPUTE[self]

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype of matrix products (for AMP_FP8, of what stays outside the fp8 kernels)."""
        return _COMPUTE[self]

    @property
    def reduce_dtype(self) -> torch.dtype:
        """The dtype in which gradients are summed over ranks."""
        return torch.float32 if self.is_amp else _COMPUTE[self]

    def fsdp_policy_args(self) -> FSDPPolicyArgs:
        """The arguments of the `MixedPrecisionPolicy` that goes with this precision.

        `MixedPrecisionPolicy(**precision.fsdp_policy_args())` suits trine.distributed and
        torch alike. With such a policy a precision context is not needed, and does no harm.
        FP32 asks for nothing to be cast.

        `output_dtype` is None, so that outputs stay small from one sharded module to the
        next. Give the root alone `output_dtype=torch.float32` to have the loss in fp32.
        """
        if self is Precision.FP32:
            return {"param_dtype": None, "reduce_dtype": None, "output_dtype": None}
        return {
            "param_dtype": self.compute_dtype,
            "reduce_dtype": self.reduce_dtype,
            "output_dtype": None,
        }


_COMPUTE = {
    Precision.FP32: torch.float32,
    Precision.AMP_FP16: torch.float16,
    Precision.AMP_BF16: torch.bfloat16,
    Precision.FP16: torch.float16,
    Precision.BF16: torch.bfloat16,
    Precision.AMP_FP8: torch.bfloat16,
}


class _OpenBlocks(threading.local):
    """The blocks that a thread is in, innermost last."""

    def __init__(self) -> None:
        self.stacks: list[ExitStack] = []


class PrecisionContext(ContextDecorator):
    """A `with` block (or a decorated function) that computes in one precision.

    May be entered again while it is open, and by several threads; autocast belongs to the
    thread that entered. What was in force before is back afterwards, whether the block
    ended or raised. A plain precision turns autocast off: inside a block of `AMP_BF16`, one
    of `FP32` computes in the dtypes of its inputs, and one of `AMP_FP16` in fp16.

    Torch keeps autocast's casts of parameters for all threads together. Threads that use
    the same parameters at once have to do so in one 16-bit dtype.

    Args:
        device_type: what `torch.autocast` calls the device.
        precision: one that the device can do.
    """

    def __init__(self, device_type: str, precision: Precision) -> None:
        self.device_type = device_type
        self.precision = precision
        self._open = _OpenBlocks()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            for part in self._parts():
                stack.enter_context(part)
            self._open.stacks.append(stack.pop_all())
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._open.stacks.pop().__exit__(exc_type, exc, traceback)

    def __repr__(self) -> str:
        return f"<{self.precision} on {self.device_type}>"

    def _parts(self) -> list[AbstractContextManager[Any]]:
        if self.precision.is_amp:
            kind, dtype = self.device_type, self.precision.compute_dtype
            parts: list[AbstractContextManager[Any]] = [torch.autocast(kind, dtype)]
            if not (torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) is dtype):
                parts.insert(0, _casts_of_its_own())
            if self.precision is Precision.AMP_FP8:
                parts += _fp8_parts()
            return parts
        # On a device without autocast there is none to turn off.
        if torch.amp.is_autocast_available(self.device_type):
            return [torch.autocast(self.device_type, enabled=False)]
        return []


@contextmanager
def _casts_of_its_own() -> Iterator[None]:
    """Let no cast of a parameter into the block, nor out of it.

    Autocast keeps them by parameter until its outermost block ends, whatever their dtype.
    """
    torch.clear_autocast_cache()
    try:
        yield
    finally:
        torch.clear_autocast_cache()


def fp8_library() -> Literal["transformer_engine", "torchao"] | None:
    """The installed library that brings fp8 kernels, Transformer Engine before torchao."""
    if find_spec("transformer_engine") is not None:
        return "transformer_engine"
    return "torchao" if find_spec("torchao") is not None else None


def _fp8_parts() -> list[AbstractContextManager[Any]]:
    """What fp8 needs beside autocast.

    torchao needs nothing: there the module is converted once, before training, and its
    linear layers know what to do. `Device.prepare` asks whether that was done.
    """
    if fp8_library() != "transformer_engine":
        return []
    engine = import_module("transformer_engine.pytorch")
    autocast = getattr(engine, "autocast", None) or engine.fp8_autocast  # the older name
    return [autocast(enabled=True)]

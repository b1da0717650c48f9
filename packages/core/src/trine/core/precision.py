"""What a precision is: its name and the dtypes that follow from it."""

from __future__ import annotations

from enum import StrEnum

import torch

__all__ = ["Precision"]


class Precision(StrEnum):
    """How numbers are stored and computed in one training run.

    The `AMP_` members keep parameters in fp32 and compute in the smaller type;
    the plain ones compute and reduce gradients in it too.
    """

    FP32 = "fp32"
    AMP_FP16 = "amp_fp16"
    AMP_BF16 = "amp_bf16"
    FP16 = "fp16"
    BF16 = "bf16"
    AMP_FP8 = "amp_fp8"

    @classmethod
    def parse(cls, spec: str | Precision) -> Precision:
        """The member of that name, in any case.

        Raises:
            ValueError: if there is none; the message lists those there are.
        """
        try:
            return cls(spec.lower())
        except (ValueError, AttributeError):
            known = ", ".join(member.value for member in cls)
            raise ValueError(f"Unknown precision {spec!r}. Choose one of: {known}.") from None

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype of matrix products (for AMP_FP8, of what stays outside the fp8 kernels)."""
        return _COMPUTE[self]

    @property
    def reduce_dtype(self) -> torch.dtype:
        """The dtype in which gradients are summed over ranks."""
        return torch.float32 if self.value.startswith("amp") else _COMPUTE[self]


_COMPUTE = {
    Precision.FP32: torch.float32,
    Precision.AMP_FP16: torch.float16,
    Precision.AMP_BF16: torch.bfloat16,
    Precision.FP16: torch.float16,
    Precision.BF16: torch.bfloat16,
    Precision.AMP_FP8: torch.bfloat16,
}

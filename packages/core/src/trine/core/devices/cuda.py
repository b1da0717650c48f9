"""One CUDA device. Making it touches neither the current device nor any other setting."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch

from trine.core.devices.accelerator import AcceleratorDevice, AcceleratorEvent, AcceleratorStream
from trine.core.devices.streams import Event, Stream
from trine.core.precision import fp8_library

__all__ = ["CUDADevice", "CUDAStream"]


class CUDAStream(AcceleratorStream):
    """A `torch.cuda.Stream` behind the `Stream` protocol."""

    __slots__ = ()

    def use(self) -> AbstractContextManager[object]:
        """Queue the work of a `with` block here."""
        return torch.cuda.stream(self.raw)


class CUDADevice(AcceleratorDevice):
    """One CUDA device.

    Args:
        device_id: its number. None: the one that the launcher gave this rank, in
            `LOCAL_RANK`, if there are so many; otherwise the process's current device.
        allow_tf32: whether fp32 products may be computed in TF32, from `prepare` on; None
            leaves torch's settings.
        dist_backend: the process group backend, where the choice shall not be ours.

    Raises:
        ValueError: if this machine has no such device.
    """

    kind = "cuda"
    pins_memory = True

    def __init__(
        self,
        device_id: int | None = None,
        *,
        allow_tf32: bool | None = None,
        dist_backend: str | None = None,
    ) -> None:
        super().__init__(self.kind, device_id, dist_backend=dist_backend)
        self.allow_tf32 = allow_tf32

    @staticmethod
    def count(kind: str = "cuda") -> int:
        """How many CUDA devices this machine has."""
        return torch.cuda.device_count()

    def _current_id(self) -> int:
        # Asking would start the driver, and until somebody has, the first one is current.
        started = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]  # torch's
        return torch.cuda.current_device() if started else 0

    def make_current(self) -> None:
        """Let this be where the process computes when nobody names a device; sets TF32."""
        torch.cuda.set_device(self.torch_device)
        if self.allow_tf32 is not None:
            # By torch's older names: whoever set the newer ones could no longer read these.
            torch.backends.cuda.matmul.allow_tf32 = self.allow_tf32
            torch.backends.cudnn.allow_tf32 = self.allow_tf32

    def _half_dtypes(self) -> tuple[torch.dtype, ...]:
        if torch.cuda.is_bf16_supported():
            return (torch.float16, torch.bfloat16)
        return (torch.float16,)

    def _has_fp8(self) -> bool:
        # Ada (8.9) is the first generation with fp8 units.
        able = torch.cuda.get_device_capability(self.torch_device) >= (8, 9)
        return able and fp8_library() is not None

    def stream(self) -> Stream:
        """A new stream on this device."""
        raw = torch.cuda.Stream(self.torch_device)  # type: ignore[no-untyped-call]  # torch's
        return CUDAStream(raw)

    def current_stream(self) -> Stream:
        """The stream on which work is queued now."""
        return CUDAStream(torch.cuda.current_stream(self.torch_device))

    def event(self, *, timing: bool = False) -> Event:
        """A new event."""
        raw = torch.cuda.Event(enable_timing=timing)  # type: ignore[no-untyped-call]  # torch's
        return AcceleratorEvent(raw)

    def synchronize(self) -> None:
        """Block the calling thread until all work on this device is done."""
        torch.cuda.synchronize(self.torch_device)

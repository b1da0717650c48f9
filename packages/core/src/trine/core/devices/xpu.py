"""One Intel GPU."""

from __future__ import annotations

import torch

from trine.core.devices.accelerator import AcceleratorDevice

__all__ = ["XPUDevice"]


class XPUDevice(AcceleratorDevice):
    """One Intel GPU.

    Args:
        device_id: its number. None: the one that the launcher gave this rank, in
            `LOCAL_RANK`, if there are so many; otherwise the process's current device.
        dist_backend: the process group backend, where the choice shall not be ours.

    Raises:
        ValueError: if this machine has no such device.
    """

    kind = "xpu"
    pins_memory = True

    def __init__(self, device_id: int | None = None, *, dist_backend: str | None = None) -> None:
        super().__init__(self.kind, device_id, dist_backend=dist_backend)

    @staticmethod
    def count(kind: str = "xpu") -> int:
        """How many Intel GPUs this machine has."""
        return torch.xpu.device_count()

    def _current_id(self) -> int:
        # Asking would start the driver, and until somebody has, the first one is current.
        started = torch.xpu.is_initialized()  # type: ignore[no-untyped-call]  # torch's
        return torch.xpu.current_device() if started else 0

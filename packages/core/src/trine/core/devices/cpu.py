"""The CPU: work is done when a call returns, so its streams and events do nothing."""

from __future__ import annotations

import torch
from torch import Tensor

from trine.core.devices.device import Device
from trine.core.devices.streams import Event, HostEvent, HostStream, Stream

__all__ = ["CPUDevice"]


class CPUDevice(Device):
    """The CPU of this machine."""

    kind = "cpu"

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))

    @property
    def dist_backend(self) -> str:
        """Always `gloo`."""
        return "gloo"

    def tensor_to_device(self, tensor: Tensor) -> Tensor:
        """The tensor in host memory, complete when this returns."""
        # Blocking: a copy from a GPU that does not block returns before the bytes are there.
        return tensor.to(self.torch_device)

    def stream(self) -> Stream:
        """A stream that is always idle."""
        return HostStream()

    def current_stream(self) -> Stream:
        """A stream that is always idle."""
        return HostStream()

    def event(self, *, timing: bool = False) -> Event:
        """An event that is always done; it measures host time."""
        return HostEvent()

    def synchronize(self) -> None:
        """Nothing to wait for."""

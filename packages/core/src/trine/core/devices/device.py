"""Device: one place a model can run, and how things get there.

Holds what differs between kinds of device, so that nothing else has to ask. It must
not change global state when it is made.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from trine.core.batches import map_tensors
from trine.core.devices.streams import Event, Stream

__all__ = ["Device"]

M = TypeVar("M", bound=nn.Module)


class Device(ABC):
    """One device. Compare with `==`; use as a dictionary key; print for a user.

    Args:
        torch_device: the device, of the kind that the subclass stands for.
    """

    kind: str
    """The name of the kind, as in `torch.device(...).type`."""

    def __init__(self, torch_device: torch.device) -> None:
        self.torch_device = torch_device

    @property
    @abstractmethod
    def dist_backend(self) -> str:
        """The process group backend that suits this device, such as `gloo`."""

    @property
    def ddp_backend(self) -> str:
        """The name Composer gave to `dist_backend`."""
        return self.dist_backend

    def tensor_to_device(self, tensor: Tensor) -> Tensor:
        """The tensor on this device; the same object if it is there already."""
        return tensor.to(self.torch_device, non_blocking=True)

    def module_to_device(self, module: M) -> M:
        """Move a module's parameters and buffers here, in place, and return it."""
        return module.to(self.torch_device)

    def batch_to_device(self, batch: Any) -> Any:
        """The batch with every tensor on this device, its containers' types kept."""
        return map_tensors(batch, self.tensor_to_device)

    @abstractmethod
    def stream(self) -> Stream:
        """A new stream on this device."""

    @abstractmethod
    def current_stream(self) -> Stream:
        """The stream on which work is queued now."""

    @abstractmethod
    def event(self, *, timing: bool = False) -> Event:
        """A new event; `timing` allows `elapsed_ms`."""

    @abstractmethod
    def synchronize(self) -> None:
        """Block the calling thread until all work on this device is done."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Device) and self.torch_device == other.torch_device

    def __hash__(self) -> int:
        return hash(self.torch_device)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.torch_device)!r})"

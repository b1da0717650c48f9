"""The CPU: work is done when a call returns, so its streams and events do nothing."""

from __future__ import annotations

import torch
from torch import Tensor

from trine.core.devices import backends
from trine.core.devices.device import Device
from trine.core.devices.streams import Event, HostEvent, HostStream, Stream

__all__ = ["CPUDevice"]


class CPUDevice(Device):
    """The CPU of this machine.

    Args:
        dist_backend: the process group backend, where the choice shall not be ours.
    """

    kind = "cpu"
    is_async = False
    torch_device = torch.device("cpu")  # the only one there is

    def __init__(self, *, dist_backend: str | None = None) -> None:
        super().__init__(self.torch_device, dist_backend=dist_backend)

    def default_dist_backend(self) -> str:
        """`mpi` where mpiexec launched us and MPI can be reached, otherwise `gloo`."""
        return backends.cpu_backend()

    def tensor_to_device(self, tensor: Tensor) -> Tensor:
        """The tensor in host memory, complete when this returns."""
        # Blocking: a copy from a GPU that does not block returns before the bytes are there.
        return tensor.to(self.torch_device)

    def _rng_state(self) -> Tensor:
        return torch.get_rng_state()

    def _set_rng_state(self, rng: Tensor) -> None:
        torch.set_rng_state(rng)

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

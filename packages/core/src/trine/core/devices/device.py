"""Device: one place a model can run, and how things get there.

Holds what differs between kinds of device, so that nothing else has to ask. It must
not change global state when it is made.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from trine.core.batches import map_tensors
from trine.core.devices import backends
from trine.core.devices.grad_scaler import GradScaler
from trine.core.devices.loader import DeviceLoader
from trine.core.devices.optimizers import move_optimizer_state
from trine.core.devices.streams import Event, Stream
from trine.core.errors import TrineError
from trine.core.precision import Precision, PrecisionContext, fp8_library
from trine.core.serialization import Serializable
from trine.core.state import State

__all__ = ["Device"]

M = TypeVar("M", bound=nn.Module)
P = TypeVar("P", bound=Optimizer)


class Device(Serializable, ABC):
    """One device. Compare with `==`; use as a dictionary key; print for a user.

    A further kind of device writes the four abstract methods, and overrides what its
    hardware does another way.

    Args:
        torch_device: the device, of the kind that the subclass stands for.
        dist_backend: the process group backend, where the choice shall not be ours.
    """

    kind: str
    """The name of the kind, as in `torch.device(...).type`."""

    torch_device: torch.device
    """The device itself, as torch knows it."""

    is_async: bool = True
    """Whether work may still run when the call that started it returns."""

    pins_memory: bool = False
    """Whether copies from page-locked host memory need not be waited for."""

    _dist_backend: str | None = None

    def __init__(self, torch_device: torch.device, *, dist_backend: str | None = None) -> None:
        self.torch_device = torch_device
        self._dist_backend = dist_backend

    # Process groups.

    @property
    def dist_backend(self) -> str:
        """The process group backend for this device, one of `gloo`, `mpi`, `nccl` or the maker's.

        The constructor's argument wins over the environment variable `TRINE_DIST_BACKEND`,
        and that over `default_dist_backend()`.
        """
        given = self._dist_backend or os.environ.get(backends.BACKEND_VARIABLE, "")
        return given.strip().lower() or self.default_dist_backend()

    @property
    def ddp_backend(self) -> str:
        """The name Composer gave to `dist_backend`."""
        return self.dist_backend

    def default_dist_backend(self) -> str:
        """The backend that suits this device, by what is installed and who launched us."""
        return backends.accelerator_backend(self.torch_device.type)

    # Moving things here.

    def tensor_to_device(self, tensor: Tensor) -> Tensor:
        """The tensor on this device; the same object if it is there already."""
        return tensor.to(self.torch_device, non_blocking=True)

    def module_to_device(self, module: M) -> M:
        """Move a module's parameters and buffers here, in place, and return it."""
        return module.to(self.torch_device)

    def batch_to_device(self, batch: Any) -> Any:
        """The batch with every tensor on this device, its containers' types kept.

        An object with a method `to` of its own is asked to move itself, container or not.
        All else is as `trine.core.batches.map_tensors` does it.

        Raises:
            ValueError: if the batch contains itself.
        """
        return map_tensors(batch, self.tensor_to_device, objects=self._object_to_device)

    def _object_to_device(self, thing: Any) -> Any:
        moved = thing.to(self.torch_device)
        return thing if moved is None else moved  # None: it moved in place

    def optimizer_to_device(self, optimizer: P) -> P:
        """Move an optimizer's state here, in place, and return it.

        Rarely needed: optimizers make their state beside the parameters, in the first
        `step()`. It is after a checkpoint has been loaded. The parameters themselves
        stay where they are: `module_to_device` moves those.

        Scalars that the optimizer reads on the host stay where they are (`step` above
        all, and learning rates and betas given as tensors), since reading them from a
        device would wait for it once per parameter and step. So does what else a group has
        in tensors without dimensions, which are at home beside tensors of any device; a
        tensor of one element that has a dimension moves. A group that is `capturable` or
        `fused` reads its scalars on the device, and there they move too.
        """
        move_optimizer_state(optimizer, self.tensor_to_device)
        return optimizer

    def dataloader_to_device(
        self,
        dataloader: Iterable[Any],
        prefetch_fn: Callable[[Any], Any] | None = None,
        *,
        depth: int = 2,
    ) -> DataLoader[Any]:
        """A loader like `dataloader` whose batches are on this device.

        Args:
            dataloader: a DataLoader, or anything that can be iterated again and again.
            prefetch_fn: takes each batch, once it is here, and returns the batch to hand
                out. It runs in a thread, ahead of the training loop, and on a device with
                streams on one of its own. It sees the loop's grad mode, not its autocast:
                enter that inside. Leaving the loop or the program waits for a call that is
                running, for 5 seconds at most.
            depth: how many batches may be made ready ahead, from the second one on.

        Raises:
            ValueError: if `depth` is less than 1.
        """
        return DeviceLoader(dataloader, self, prefetch_fn, depth)

    # Host memory.

    def host_buffer(self, numel: int, dtype: torch.dtype, *, pinned: bool = True) -> Tensor:
        """A 1-D tensor in host memory, of undefined content, to copy here and from here.

        Args:
            numel: its elements.
            dtype: of them.
            pinned: page-locked, where copies to this device are the better for it
                (`pins_memory`).
        """
        pin = pinned and self.pins_memory
        return torch.empty(numel, dtype=dtype, device="cpu", pin_memory=pin)

    def copy(self, source: Tensor, into: Tensor) -> None:
        """Queue a copy between the host and this device on the current stream.

        It need not be done when this returns. Until an event recorded behind it is, leave
        the side that is in host memory alone, the source as well as the target.

        Args:
            source: on one of the two, of any dtype.
            into: on the other, of the same shape; overwritten.
        """
        into.copy_(source, non_blocking=True)

    # Precision.

    def supported_precisions(self) -> tuple[Precision, ...]:
        """The precisions that `precision_context` accepts."""
        half = self._half_dtypes()
        return tuple(
            precision
            for precision in Precision
            if precision is Precision.FP32
            or (precision.compute_dtype in half and precision is not Precision.AMP_FP8)
            or (precision is Precision.AMP_FP8 and self._has_fp8())
        )

    def precision_context(self, precision: Precision | str) -> PrecisionContext:
        """A `with` block in which this device computes in `precision`.

        `AMP_` members switch autocast on. The plain ones mean that parameters and inputs
        are in that dtype already (`module.to(precision.param_dtype)`); they switch
        autocast off, so that nothing is cast behind their back. AMP_FP8 uses Transformer
        Engine or, for a module that torchao converted, torchao.

        Raises:
            ValueError: if the precision is unknown or this device cannot do it; the
                message lists those it can.
        """
        return PrecisionContext(self.torch_device.type, self._check_precision(precision))

    def grad_scaler(
        self,
        precision: Precision | str,
        *,
        process_group: dist.ProcessGroup | None = None,
        init_scale: float = 2.0**16,
    ) -> GradScaler | None:
        """The gradient scaler that `precision` needs, or None where it needs none.

        AMP_FP16 and FP16 need one, since small gradients vanish in fp16. It agrees with
        the other ranks on which steps to skip if an optimizer's parameters are sharded
        (DTensors), or if a process group is given.

        Args:
            precision: the precision of the run, or its name.
            process_group: the ranks that agree; None for all of them, where parameters
                are sharded.
            init_scale: the first factor of the loss.

        Raises:
            ValueError: as `precision_context`.
        """
        precision = self._check_precision(precision)
        if precision not in (Precision.AMP_FP16, Precision.FP16):
            return None
        return GradScaler(
            self.torch_device.type,
            init_scale=init_scale,
            process_group=process_group,
            half_gradients=precision is Precision.FP16,
        )

    def _check_precision(self, spec: Precision | str) -> Precision:
        precision = Precision.parse(spec)
        able = self.supported_precisions()
        if precision not in able:
            hint = ""
            if precision is Precision.AMP_FP8:
                hint = " fp8 takes a GPU that has it, and Transformer Engine or torchao installed."
            raise ValueError(
                f"{self.torch_device} cannot compute in {precision}.{hint} "
                f"It can compute in: {', '.join(able)}."
            )
        return precision

    def _half_dtypes(self) -> tuple[torch.dtype, ...]:
        """The 16-bit dtypes that autocast takes here."""
        kind = self.torch_device.type
        if not torch.amp.is_autocast_available(kind):
            return ()
        try:
            known = torch.get_device_module(kind).get_amp_supported_dtype
        except (AttributeError, RuntimeError):  # a device without a module of its own, or a list
            return (torch.float16, torch.bfloat16)
        return tuple(known())

    def _has_fp8(self) -> bool:
        return False

    # Preparing, and checkpoints.

    def prepare(self, state: State) -> None:
        """Check that the run described by `state` can start here, and initialise the device.

        Called at the beginning of training. The state is only read; `initialize`, which
        does the rest, is not given it.

        Args:
            state: a `State`, or an object with some of its attributes. Where it has no
                precision, the model is taken as it is.

        Raises:
            ValueError: if the device cannot do the precision, or the model is not made
                for it: it has parameters, and none of them is in the precision's
                `param_dtype`.
            TrineError: if the device does not work.
        """
        spec, model = getattr(state, "precision", None), getattr(state, "model", None)
        if spec is not None:
            precision = self._check_precision(spec)
            if model is not None:
                _check_model(model, precision)
        self.initialize()

    def initialize(self) -> None:
        """Make the device ready for this process, and see that it works.

        Raises:
            TrineError: if it does not.
        """
        try:
            torch.ones(2, device=self.torch_device).sum()
            self.synchronize()
        except RuntimeError as error:
            raise TrineError(
                f"{self.torch_device} does not work: {str(error).splitlines()[0]} "
                "Does a sum of two numbers work there in plain torch?"
            ) from error

    def make_current(self) -> None:
        """Let this be where the process computes when nobody names a device."""

    def state_dict(self) -> dict[str, Any]:
        """The state of this device's random numbers, for a checkpoint."""
        return {"kind": self.kind, "rng": self._rng_state()}

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        """Continue with the random numbers of `state_dict()`; an empty state changes nothing.

        Raises:
            ValueError: if the state is that of another kind of device.
        """
        if not state:
            return
        if set(state) != {"kind", "rng"} or state["kind"] != self.kind:
            raise ValueError(
                f"{self!r} expected the state of a device of kind {self.kind!r}, with 'kind' and "
                f"'rng', and got {state.get('kind', 'none')!r} with {sorted(state)}. Random "
                "numbers cannot be carried from one kind of device to another: load {} to "
                "start with fresh ones."
            )
        self._set_rng_state(state["rng"].cpu())  # it may have been loaded onto a GPU

    def _rng_state(self) -> Tensor:
        rng: Tensor = torch.get_device_module(self.torch_device).get_rng_state(self.torch_device)
        return rng

    def _set_rng_state(self, rng: Tensor) -> None:
        torch.get_device_module(self.torch_device).set_rng_state(rng, self.torch_device)

    # Order of work.

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


def _check_model(model: nn.Module, precision: Precision) -> None:
    """Refuse a model that would silently compute in another precision than was asked for."""
    dtypes = {param.dtype for param in model.parameters() if param.is_floating_point()}
    # Some layers in another dtype are a choice; all of them are an oversight.
    if dtypes and precision.param_dtype not in dtypes:
        have = ", ".join(sorted(map(str, dtypes)))
        fitting = [str(one) for one in Precision if not one.is_amp and one.param_dtype in dtypes]
        if not precision.is_amp and torch.float32 in dtypes:
            fitting = [f"amp_{precision}"]
        raise ValueError(
            f"{precision} means that the parameters are in {precision.param_dtype}, but the "
            f"model's are in {have}. Convert it first, model.to({precision.param_dtype})"
            + (f", or ask for {' or '.join(fitting)}." if fitting else ".")
        )
    if precision is Precision.AMP_FP8 and fp8_library() == "torchao":
        classes = {type(module).__module__ for module in model.modules()}
        if not any(name.startswith("torchao.") for name in classes):
            raise ValueError(
                "amp_fp8 through torchao computes in fp8 only where torchao has converted the "
                "model, and it holds no module of torchao's. Call "
                "torchao.float8.convert_to_float8_training(model) first."
            )

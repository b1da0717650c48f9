"""A made-up kind of device: CPU tensors that pose as those of an accelerator with streams.

Its work is done when a call returns, so values are right whatever the order. In what order a
real one may do it is kept by a `StreamModel`: from the streams, events and copies that are
asked for here, the collectives, which have streams of their own as those of nccl do, and the
operations that `watching` sees.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, Self

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.distributed.stream_model import Access, Mark, StreamModel, Timeline
from trine.core.devices import Device, Event, Stream
from trine.distributed._fsdp import collectives
from trine.distributed._fsdp.torch_internals import local_tensor
from trine.distributed._fsdp.transfers import Transfer, Transfers

__all__ = ["KIND", "RecordingDevice", "pose_as_torch_module"]

KIND = "maia"  # a name that torch knows, and nobody has


def pose_as_torch_module(patch: pytest.MonkeyPatch) -> None:
    """Give torch the module that a device's maker would: DTensor asks it for a count."""
    module = SimpleNamespace(
        is_initialized=lambda: True,
        device_count=lambda: 1,
        current_device=lambda: 0,
        set_device=lambda index: None,
    )
    patch.setattr(torch, KIND, module, raising=False)


class RecordingEvent:
    """An event of the model."""

    def __init__(self, device: RecordingDevice) -> None:
        self._device = device
        self.mark = Mark()

    def record(self, stream: Stream | None = None) -> None:
        """Stand for what is queued so far."""
        model = self._device.model
        model.record(_timeline(stream) or model.current, self.mark)

    def wait(self, stream: Stream | None = None) -> None:
        """Let a stream wait."""
        model = self._device.model
        if "wait" not in self._device.broken:
            model.wait(_timeline(stream) or model.current, self.mark)

    def synchronize(self) -> None:
        """Let the host wait."""
        if "synchronize" not in self._device.broken:
            self._device.model.wait(self._device.model.host, self.mark)

    def query(self) -> bool:
        """Unknown, so: not yet."""
        return False

    def elapsed_ms(self, end: Self) -> float:
        """The model has no durations."""
        raise NotImplementedError


class RecordingStream:
    """A stream of the model."""

    def __init__(self, device: RecordingDevice, timeline: Timeline) -> None:
        self._device = device
        self.timeline = timeline

    def wait_stream(self, other: Stream) -> None:
        """Begin after what is queued there."""
        self.wait_event(other.record_event())

    def wait_event(self, event: Event) -> None:
        """Begin after the event."""
        event.wait(self)

    def record_event(self) -> Event:
        """An event that stands for what is queued here."""
        event = RecordingEvent(self._device)
        event.record(self)
        return event

    def hold(self, tensor: Tensor) -> None:
        """Not modelled: whoever needs it gets a race."""

    def synchronize(self) -> None:
        """Let the host wait."""
        self.record_event().synchronize()

    @contextmanager
    def use(self) -> Iterator[None]:
        """Queue what comes here."""
        model, before = self._device.model, self._device.model.current
        model.current = self.timeline
        try:
            yield
        finally:
            model.current = before


def _timeline(stream: Stream | None) -> Timeline | None:
    return stream.timeline if isinstance(stream, RecordingStream) else None


class RecordingDevice(Device):
    """The device. Equal to itself only.

    Attributes:
        model: what happened, and in what order it may have.
        memory: which tensor touches which buffer.
        pinned: the number of elements of each buffer on the host, if it was to be pinned.
        broken: methods of events that do nothing: `wait`, `synchronize`.
    """

    kind = KIND
    pins_memory = True

    def __init__(self, index: int | None = None) -> None:
        super().__init__(torch.device("cpu"), dist_backend="gloo")
        self.model = StreamModel()
        self.memory = _Memory(self.model)
        self.pinned: list[int] = []
        self.broken: set[str] = set()
        self.label: str | None = None
        self._watch = _Watch(self)
        self._numbers = itertools.count(1)
        self._comm_streams: dict[object, Timeline] = {}

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)

    def stream(self) -> Stream:
        """A stream of its own."""
        return RecordingStream(self, Timeline(f"stream {next(self._numbers)}"))

    def current_stream(self) -> Stream:
        """The stream on which work is queued now."""
        return RecordingStream(self, self.model.current)

    def event(self, *, timing: bool = False) -> Event:
        """An event."""
        return RecordingEvent(self)

    def synchronize(self) -> None:
        """Let the host wait for the current stream."""
        self.current_stream().synchronize()

    def host_buffer(self, numel: int, dtype: torch.dtype, *, pinned: bool = True) -> Tensor:
        """Memory that counts as the host's."""
        if pinned:
            self.pinned.append(numel)
        with self._watch.paused():
            buffer = torch.empty(numel, dtype=dtype)
            if dtype.is_floating_point:
                buffer.fill_(float("nan"))
        self.memory.take_for_host(buffer)
        return buffer

    def copy(self, source: Tensor, into: Tensor) -> None:
        """A copy that must have one end on the host."""
        memory = self.memory
        directions = memory.on_host(source), memory.on_host(into)
        assert sum(directions) == 1, "a copy between the host and the device was asked for"
        self.model.work(
            "copy to device" if directions[0] else "copy to host",
            reads=memory.touched(source),
            writes=memory.touched(into),
        )
        with self._watch.paused():
            into.copy_(source)

    def mark(self, label: str) -> None:
        """Note in the journal where the current stream is, and where the host is."""
        self.model.work(label)
        self.model.work(f"{label}, on the host", self.model.host)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """See every operation on tensors, and carry out the engine's collectives."""
        device, guard, resize = self, Transfers.guard, torch.UntypedStorage.resize_

        def labelled(transfers: Transfers, transfer: Transfer, call: Callable[[], Any]) -> Any:
            device.label = f"{transfer.name} {transfers.unit}"
            return guard(transfers, transfer, call)

        def resized(storage: torch.UntypedStorage, size: int) -> Any:
            if storage.nbytes():
                device.memory.emptied(storage)
            return resize(storage, size)

        with pytest.MonkeyPatch.context() as patch, self._watch:
            patch.setattr(Transfers, "guard", labelled)
            patch.setattr(torch.UntypedStorage, "resize_", resized)
            patch.setattr(collectives, "_all_gather_single", self._all_gather)
            patch.setattr(collectives, "_reduce_scatter_single", self._reduce_scatter)
            patch.setattr(dist, "all_reduce", self._all_reduce)
            yield

    # --- collectives: every other rank does, and has, what this one does --------------------

    def _all_gather(self, out: Tensor, shard: Tensor, *, group: Any, async_op: bool) -> _Work:
        return self._collective(
            group, [shard], [out], lambda: out.view(-1, shard.numel()).copy_(shard.clone())
        )

    def _reduce_scatter(
        self, result: Tensor, rows: Tensor, *, op: Any, group: Any, async_op: bool
    ) -> _Work:
        ranks = rows.numel() // result.numel()
        own = rows.view(ranks, -1)[group.rank()]
        return self._collective(group, [rows], [result], lambda: torch.mul(own, ranks, out=result))

    def _all_reduce(self, tensor: Tensor, *, group: Any, async_op: bool) -> _Work:
        return self._collective(group, [tensor], [tensor], lambda: tensor.mul_(group.size()))

    def _collective(
        self,
        group: object,
        sent: Sequence[Tensor],
        received: Sequence[Tensor],
        move: Callable[[], object],
    ) -> _Work:
        own = self._comm_streams.setdefault(group, Timeline(f"comm {len(self._comm_streams)}"))
        started = Mark()
        self.model.record(self.model.current, started)
        self.model.wait(own, started)
        self.model.work(
            self.label or "collective",
            own,
            reads=[access for tensor in sent for access in self.memory.touched(tensor)],
            writes=[access for tensor in received for access in self.memory.touched(tensor)],
        )
        with self._watch.paused():
            move()
        done = Mark()
        self.model.record(own, done)
        return _Work(self.model, done)


class _Work:
    """As a collective of nccl: `wait` lets the current stream wait, not the host."""

    def __init__(self, model: StreamModel, done: Mark) -> None:
        self._model = model
        self._done = done

    def wait(self) -> None:
        self._model.wait(self._model.current, self._done)


class _Memory:
    """Which buffer of the model a tensor touches, and whether that is the host's.

    Tensors may share memory without sharing a storage, so a storage inside the memory of
    another counts as part of that.
    """

    def __init__(self, model: StreamModel) -> None:
        self._model = model
        self._numbers = itertools.count()
        self._buffers: dict[int, tuple[int, weakref.ref[torch.UntypedStorage]]] = {}
        self._hosts: set[int] = set()

    def touched(self, tensor: Tensor) -> list[Access]:
        """The part of a buffer that a tensor covers, if it is not empty."""
        if not tensor.numel() or not tensor.untyped_storage().nbytes():
            return []
        number, base = self._buffer_of(tensor.untyped_storage())
        start = tensor.data_ptr() - base
        last = sum(
            (size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True)
        )
        return [Access(number, start, start + (last + 1) * tensor.itemsize)]

    def take_for_host(self, tensor: Tensor) -> None:
        """Count the tensor's memory as the host's."""
        self._hosts.add(self._buffer_of(tensor.untyped_storage())[0])

    def on_host(self, tensor: Tensor) -> bool:
        """Whether the tensor's memory is the host's."""
        return self._buffer_of(tensor.untyped_storage())[0] in self._hosts

    def emptied(self, storage: torch.UntypedStorage) -> None:
        """Whoever gets the memory next may write to it from the current stream on."""
        number, _ = self._buffer_of(storage)
        self._model.work("free", writes=[Access(number, 0, storage.nbytes())])

    def _buffer_of(self, storage: torch.UntypedStorage) -> tuple[int, int]:
        key, start = storage._cdata, storage.data_ptr()
        if key not in self._buffers:
            for number, reference in list(self._buffers.values()):
                whole = reference()
                if whole is not None and start:
                    base = whole.data_ptr()
                    if base <= start < base + whole.nbytes():
                        self._add(storage, number, whole)
                        return number, base
            self._add(storage, next(self._numbers), storage)
        number, reference = self._buffers[key]
        whole = reference()
        assert whole is not None
        return number, whole.data_ptr()

    def _add(self, storage: torch.UntypedStorage, number: int, whole: torch.UntypedStorage) -> None:
        self._buffers[storage._cdata] = number, weakref.ref(whole)
        weakref.finalize(
            storage, self._ended, storage._cdata, number, whole is storage, self._model.current
        ).atexit = False

    def _ended(self, key: int, number: int, is_whole: bool, made_on: Timeline) -> None:
        del self._buffers[key]
        if is_whole:
            if number not in self._hosts:
                # The allocator gives it to whoever asks next on the stream it was made for.
                self._model.work("drop", made_on, writes=[Access(number, 0, 1 << 62)])
            self._hosts.discard(number)
            self._model.forget(number)


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own
    """Tells the model what each operation reads and writes, and where it is done."""

    def __init__(self, device: RecordingDevice) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own
        self._device = device
        self._is_paused = False

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Operations that stand for something else."""
        before, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = before

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        result = func(*args, **kwargs)
        if not self._is_paused:
            self._note(func, args, kwargs, result)
        return result

    def _note(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        memory, model, schema = self._device.memory, self._device.model, func._schema
        reads: list[Tensor] = []
        writes: list[Tensor] = []
        for position, argument in enumerate(schema.arguments):
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            is_written = argument.alias_info is not None and argument.alias_info.is_write
            (writes if is_written else reads).extend(_locals(value))
        # What shares memory with an argument is no new memory.
        fresh = _locals(result) if all(r.alias_info is None for r in schema.returns) else []
        if not fresh and not writes and _locals(result):
            return  # a view
        if "empty" in schema.name or schema.name == "aten::set_":
            for tensor in fresh:
                memory.touched(tensor)  # its memory is the current stream's from here on
            return
        on_host = [memory.on_host(tensor) for tensor in reads + writes]
        if any(on_host):
            # Scalars are read on the host, and handed over with the call.
            assert all(
                here or not tensor.dim()
                for here, tensor in zip(on_host, reads + writes, strict=True)
            ), f"{func} is given memory of the host and of the device at once"
            for tensor in fresh:
                memory.take_for_host(tensor)
        elif not fresh and not writes:
            self._device.synchronize()  # the host reads a value
        model.work(
            str(func),
            model.host if any(on_host) else None,
            reads=[access for tensor in reads for access in memory.touched(tensor)],
            writes=[access for tensor in writes + fresh for access in memory.touched(tensor)],
        )


def _locals(value: Any) -> list[Tensor]:
    leaves = (leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor))
    return [local_tensor(leaf) if isinstance(leaf, DTensor) else leaf for leaf in leaves]

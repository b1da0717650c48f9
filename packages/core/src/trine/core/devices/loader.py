"""A DataLoader whose batches arrive on a device, made ready ahead of the training loop.

Batches are taken from the wrapped loader in the thread that iterates, in order, so that
random numbers and worker processes are used as if nobody had wrapped it. What is done to
them (the copy, `prefetch_fn`) is done by one thread per iterator. The iterator owns that
thread: with the iterator gone, however that came about, the thread and the batches that
nobody fetched are gone too, as soon as a `prefetch_fn` that is running has returned.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, wait
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from trine.core.batches import map_tensors
from trine.core.devices.streams import Event, Stream
from trine.core.devices.worker_thread import WorkerThread
from trine.core.errors import TrineError
from trine.core.tracing import span

if TYPE_CHECKING:
    from trine.core.devices.device import Device

__all__ = ["DeviceLoader"]

_THREAD_NAME = "trine-prefetch"


class DeviceLoader(DataLoader[Any]):
    """What `Device.dataloader_to_device` returns.

    Attributes and the length are those of the wrapped loader, and setting an attribute sets
    it there. Iterating twice at once gives two independent iterators, unless the wrapped
    loader has persistent workers: those serve one, and a new iterator ends the former.

    What counts in the wrapped loader (a `state_dict` of its own, a sampler's position) counts
    the batches made ready ahead as well.
    """

    _loader: Iterable[Any]
    _device: Device
    _prefetch_fn: Callable[[Any], Any] | None
    _depth: int
    _latest: weakref.ref[_PrefetchIterator] | None

    # torch's constructor is not called: there is a loader already, and what it would set
    # here is found there.
    def __init__(
        self,
        loader: Iterable[Any],
        device: Device,
        prefetch_fn: Callable[[Any], Any] | None,
        depth: int,
    ) -> None:
        if depth < 1:
            raise ValueError(f"depth is how many batches are made ready ahead, got {depth}.")
        self.__dict__.update(
            _loader=loader, _device=device, _prefetch_fn=prefetch_fn, _depth=depth, _latest=None
        )

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # torch names a private class
        if self._prefetch_fn is None and not self._device.is_async:
            return map(self._move, self._loader)
        persistent = getattr(self._loader, "persistent_workers", False)
        if persistent and self._latest is not None and (former := self._latest()) is not None:
            former.close()
        iterator = _PrefetchIterator(
            iter(self._loader), _Preparation(self._device, self._prefetch_fn), self._depth
        )
        if persistent:
            self.__dict__["_latest"] = weakref.ref(iterator)
        return iterator

    def _move(self, batch: Any) -> Any:
        with span("move batch", category="io"):
            return self._device.batch_to_device(batch)

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]  # or its TypeError

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_loader" not in self.__dict__:  # being unpickled
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._loader, name, value)

    def __repr__(self) -> str:
        return f"DeviceLoader({self._loader!r}, {self._device!r})"


class _Preparation:
    """What is done to each batch. It must not know the iterator, whose end ends the thread."""

    def __init__(self, device: Device, prefetch_fn: Callable[[Any], Any] | None) -> None:
        self._device = device
        self._prefetch_fn = prefetch_fn
        self._stream: Stream | None = None

    def mark(self) -> Event | None:
        """What the calling thread's stream has to do before a batch of its making is whole."""
        return self._device.current_stream().record_event() if self._device.is_async else None

    def __call__(
        self, batch: Any, made: Event | None, grad: bool, inference: bool
    ) -> tuple[Any, Event]:
        """The batch, and the event after which it may be used."""
        if self._stream is None:
            self._stream = self._device.stream()
        # A loader may give batches that are on the device already: not written yet, and
        # their memory is the other stream's to give away once nobody refers to them.
        if made is not None:
            self._stream.wait_event(made)
            _hold(batch, self._stream)
        # These belong to the thread, and the one that asked is another.
        with (
            span("prepare batch", category="io"),
            torch.inference_mode(inference),
            torch.set_grad_enabled(grad),
            self._stream.use(),
        ):
            if self._device.pins_memory:
                batch = map_tensors(batch, _pin, objects=_leave)
            batch = self._device.batch_to_device(batch)
            if self._prefetch_fn is not None:
                batch = self._prefetch_fn(batch)
        return batch, self._stream.record_event()

    def hand_over(self, batch: Any, ready: Event) -> None:
        """Let the calling thread's stream use the batch, and its memory last until it has."""
        if self._device.is_async:
            stream = self._device.current_stream()
            stream.wait_event(ready)
            _hold(batch, stream)


class _PrefetchIterator(Iterator[Any]):
    """Batches in order, up to `depth` of them made ready ahead.

    The first comes as soon as it is ready. After it two are fetched for each that is handed
    out, until `depth` are ahead, so that no batch waits for more than two.
    """

    def __init__(self, source: Iterator[Any], prepare: _Preparation, depth: int) -> None:
        self._source: Iterator[Any] | None = source
        self._prepare = prepare
        self._depth = depth
        self._started = False
        self._thread = WorkerThread(_THREAD_NAME)
        # What happened at each batch ahead: it is being prepared, or could not be fetched.
        self._ahead: deque[Future[tuple[Any, Event]] | Exception] = deque()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        if not self._thread.is_here():
            raise TrineError(
                f"This iterator is of another process than {os.getpid()}, which was forked from "
                "it: the thread that prepares its batches is not here. Iterate over the loader "
                "anew in this process."
            )
        # One more than the depth while this call waits; it takes the first away.
        most = min(len(self._ahead) + 2, self._depth + 1) if self._started else 1
        while len(self._ahead) < most and self._fetch():
            pass
        if not self._ahead:
            self.close()
            raise StopIteration
        if isinstance(self._ahead[0], Future):
            with span("wait for batch", category="io"):
                wait([self._ahead[0]])  # taken away only then: the wait may be interrupted
        self._started = True
        first, prepare = self._ahead.popleft(), self._prepare
        try:
            batch, ready = _outcome(first)
        except BaseException:
            # The error's traceback holds this frame. The frame lets go of the iterator, or
            # its thread would live as long as somebody keeps the error.
            del self
            raise
        finally:
            del first
        prepare.hand_over(batch, ready)
        return batch

    def _fetch(self) -> bool:
        """Fetch one batch; False when there is none to come before the loop has moved on."""
        if self._source is None:
            return False
        # What comes after an error is the loader's affair, once the loop has seen the error.
        if self._ahead and isinstance(self._ahead[-1], Exception):
            return False
        try:
            with span("fetch batch", category="io"):
                batch = next(self._source)
        except StopIteration:
            self._source = None
            return False
        except Exception as error:
            self._ahead.append(error)
            return False
        made = self._prepare.mark()
        grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        self._ahead.append(self._thread.submit(self._prepare, batch, made, grad, inference))
        return True

    def close(self) -> None:
        """End the thread and forget what was made ready. Further batches there are none.

        A `prefetch_fn` that is running is waited for, but for a few seconds only.
        """
        self._source = None  # a loader's worker processes end with its iterator
        self._ahead.clear()
        # Python may collect this iterator in any thread, that of a loader included.
        elsewhere = not threading.current_thread().name.startswith(_THREAD_NAME)
        self._thread.close(wait=elsewhere)

    def __del__(self) -> None:
        self.close()


def _outcome(what: Future[tuple[Any, Event]] | Exception) -> tuple[Any, Event]:
    try:
        if isinstance(what, Exception):
            raise what
        return what.result()
    except StopIteration as error:
        # As in a generator: it would end the training loop without a word.
        raise RuntimeError("prefetch_fn raised StopIteration") from error
    finally:
        del what


def _pin(tensor: Tensor) -> Tensor:
    if tensor.device.type != "cpu" or tensor.is_pinned():
        return tensor
    return tensor.pin_memory()


def _leave(thing: Any) -> Any:
    return thing


def _hold(batch: Any, stream: Stream) -> None:
    def hold(tensor: Tensor) -> Tensor:
        stream.hold(tensor)
        return tensor

    def look_inside(thing: Any) -> Any:
        # An object that moved itself has tensors that the walk does not see otherwise.
        with suppress(ValueError):  # it may well refer to itself
            map_tensors(getattr(thing, "__dict__", None), hold)
        return thing

    map_tensors(batch, hold, objects=look_inside)

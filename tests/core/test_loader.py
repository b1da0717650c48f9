"""The wrapped DataLoader: still a DataLoader, and nothing of it stays behind."""

from __future__ import annotations

import gc
import itertools
import multiprocessing
import os
import subprocess
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from trine.core import CPUDevice, get_device, tracing
from trine.core.devices import worker_thread
from trine.core.devices.streams import HostStream

WAIT_S = 20


class Numbers(Dataset[Tensor]):
    """The numbers from 0; one of them may be broken."""

    def __init__(self, length: int = 6, broken: int | None = None) -> None:
        self.length = length
        self.broken = broken

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Tensor:
        if index == self.broken:
            raise LookupError(f"number {index} is broken")
        return torch.tensor(float(index))


class Endless(IterableDataset[Tensor]):
    """Numbers without an end, counting how many were taken."""

    def __init__(self) -> None:
        self.taken = 0

    def __iter__(self) -> Iterator[Tensor]:
        for number in itertools.count():
            self.taken += 1
            yield torch.tensor(float(number))


def plus_hundred(batch: Tensor) -> Tensor:
    return batch + 100


def values(batches: Any) -> list[float]:
    return [batch.item() for batch in batches]


def wrap(
    loader: Any, prefetch_fn: Callable[[Any], Any] | None = plus_hundred, **options: Any
) -> DataLoader[Any]:
    return CPUDevice().dataloader_to_device(loader, prefetch_fn, **options)


def prefetch_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("trine-prefetch")]


@pytest.fixture(autouse=True)
def _nothing_stays_behind() -> Iterator[None]:
    yield
    gc.collect()
    assert prefetch_threads() == []
    assert multiprocessing.active_children() == []


# Still a DataLoader.


def test_the_wrapped_loader_is_a_dataloader_with_the_attributes_of_the_one_inside() -> None:
    loader = DataLoader(Numbers(7), batch_size=2, drop_last=True)

    wrapped = wrap(loader)

    assert isinstance(wrapped, DataLoader)
    assert len(wrapped) == len(loader) == 3
    for name in (
        "dataset",
        "batch_size",
        "sampler",
        "batch_sampler",
        "num_workers",
        "collate_fn",
        "drop_last",
        "timeout",
        "worker_init_fn",
        "generator",
        "prefetch_factor",
        "persistent_workers",
        "pin_memory",
        "multiprocessing_context",
    ):
        assert getattr(wrapped, name) is getattr(loader, name)
    assert "DeviceLoader" in repr(wrapped)


def test_what_a_loader_of_ones_own_has_more_is_there_too() -> None:
    class Own(DataLoader[Any]):
        epoch = 0

        def begin_epoch(self, number: int) -> None:
            self.epoch = number

    loader = Own(Numbers())
    wrapped: Any = wrap(loader)

    wrapped.begin_epoch(3)
    wrapped.note = "set on the wrapper"

    assert (wrapped.epoch, loader.epoch) == (3, 3)
    assert loader.note == "set on the wrapper"  # type: ignore[attr-defined]


def test_an_attribute_that_no_loader_has_is_missed_as_ever() -> None:
    with pytest.raises(AttributeError, match="no_such_thing"):
        wrap(DataLoader(Numbers())).no_such_thing  # type: ignore[attr-defined]  # noqa: B018


def test_an_attribute_that_torch_does_not_let_be_set_is_refused_as_ever() -> None:
    with pytest.raises(ValueError, match="batch_size attribute should not be set"):
        wrap(DataLoader(Numbers())).batch_size = 3


def test_a_loader_without_a_length_has_none() -> None:
    with pytest.raises(TypeError, match="len"):
        len(wrap(DataLoader(Endless())))


def test_anything_that_can_be_iterated_again_is_a_loader() -> None:
    wrapped = wrap([torch.tensor(1.0), torch.tensor(2.0)])

    assert values(wrapped) == values(wrapped) == [101.0, 102.0]
    assert len(wrapped) == 2


def test_a_wrapped_loader_can_be_copied() -> None:
    import pickle

    wrapped = wrap(DataLoader(Numbers(3)))

    twin = pickle.loads(pickle.dumps(wrapped))

    assert values(twin) == values(wrapped) == [100.0, 101.0, 102.0]


@pytest.mark.parametrize("depth", [0, -1])
def test_a_depth_without_room_for_a_batch_is_refused(depth: int) -> None:
    with pytest.raises(ValueError, match=f"got {depth}"):
        wrap(DataLoader(Numbers()), depth=depth)


# Order, and what is done to batches.


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("depth", [1, 2, 20])
def test_batches_come_in_order_each_prepared_once(workers: int, depth: int) -> None:
    wrapped = wrap(DataLoader(Numbers(8), num_workers=workers), depth=depth)

    assert values(wrapped) == [100.0 + number for number in range(8)]


def test_without_a_prefetch_fn_the_cpu_starts_no_thread_and_takes_nothing_ahead() -> None:
    dataset = Endless()
    batches = iter(wrap(DataLoader(dataset), None))

    assert values(itertools.islice(batches, 3)) == [0.0, 1.0, 2.0]
    assert dataset.taken == 3
    assert prefetch_threads() == []


def test_prefetch_fn_runs_in_a_thread_on_batches_that_are_on_the_device() -> None:
    class Marking(CPUDevice):
        def tensor_to_device(self, tensor: Tensor) -> Tensor:
            return tensor + 1000

    seen: list[tuple[float, bool]] = []

    def look(batch: Tensor) -> Tensor:
        seen.append((batch.item(), threading.current_thread() is threading.main_thread()))
        return batch

    handed = values(Marking().dataloader_to_device(DataLoader(Numbers(2)), look))

    assert seen == [(1000.0, False), (1001.0, False)]
    assert handed == [1000.0, 1001.0]


def test_prefetch_fn_sees_the_grad_mode_of_the_loop() -> None:
    seen: list[tuple[bool, bool]] = []

    def look(batch: Tensor) -> Tensor:
        seen.append((torch.is_grad_enabled(), torch.is_inference_mode_enabled()))
        return batch

    list(wrap(DataLoader(Numbers(1)), look))
    with torch.no_grad():
        list(wrap(DataLoader(Numbers(1)), look))
    with torch.inference_mode():
        list(wrap(DataLoader(Numbers(1)), look))

    assert seen == [(True, False), (False, False), (False, True)]


def test_the_next_batch_is_prepared_while_the_loop_works_on_this_one() -> None:
    third_is_begun = threading.Event()

    def prepare(batch: Tensor) -> Tensor:
        if batch.item() == 2:
            third_is_begun.set()
        return batch

    batches = iter(wrap(DataLoader(Numbers(3)), prepare))
    next(batches)
    next(batches)

    assert third_is_begun.wait(WAIT_S)


@pytest.mark.parametrize("depth", [1, 3])
def test_no_more_than_the_depth_is_taken_ahead_of_the_loop(depth: int) -> None:
    dataset = Endless()
    batches = iter(wrap(DataLoader(dataset), depth=depth))

    for handed in range(1, 7):
        next(batches)

        # None before the first is handed out; then one more each time.
        assert dataset.taken - handed == min(handed - 1, depth)


def test_random_numbers_of_the_dataset_are_drawn_in_the_loops_own_thread() -> None:
    # The generator is shared by all threads: drawn elsewhere, they would mix with the loop's.
    class Noise(Dataset[Tensor]):
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> Tensor:
            assert threading.current_thread() is threading.main_thread()
            return torch.rand(())

    def epoch(loader: Any) -> list[float]:
        torch.manual_seed(3)
        return values(loader)

    loader = DataLoader(Noise(), shuffle=True)

    assert epoch(wrap(loader, lambda batch: batch)) == epoch(loader)


# Errors.


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("prefetch_fn", [plus_hundred, None])
def test_an_error_in_the_dataset_arrives_at_its_batch_and_the_next_one_after_it(
    workers: int, prefetch_fn: Any
) -> None:
    loader = DataLoader(Numbers(5, broken=2), num_workers=workers)
    batches = iter(wrap(loader, prefetch_fn))
    offset = 0.0 if prefetch_fn is None else 100.0

    assert values(itertools.islice(batches, 2)) == [offset, offset + 1]
    with pytest.raises(LookupError, match="number 2 is broken") as caught:
        next(batches)
    assert "__getitem__" in "".join(traceback.format_exception(caught.value))
    assert values(batches) == [offset + 3, offset + 4]


def test_an_error_in_prefetch_fn_arrives_at_its_batch_with_its_own_traceback() -> None:
    def fail_at_two(batch: Tensor) -> Tensor:
        if batch.item() == 2:
            raise LookupError("batch 2 cannot be prepared")
        return batch

    batches = iter(wrap(DataLoader(Numbers(4)), fail_at_two))

    assert values(itertools.islice(batches, 2)) == [0.0, 1.0]
    with pytest.raises(LookupError, match="batch 2") as caught:
        next(batches)
    assert traceback.extract_tb(caught.value.__traceback__)[-1].name == "fail_at_two"
    assert values(batches) == [3.0]


def test_a_stop_iteration_in_prefetch_fn_does_not_pass_for_the_end() -> None:
    def stop(batch: Tensor) -> Tensor:
        raise StopIteration

    with pytest.raises(RuntimeError, match="prefetch_fn raised StopIteration"):
        list(wrap(DataLoader(Numbers(2)), stop))


def test_an_error_that_is_kept_keeps_no_thread_and_no_batch_alive() -> None:
    made: list[weakref.ref[Tensor]] = []

    def prepare(batch: Tensor) -> Tensor:
        made.append(weakref.ref(batch))
        if len(made) == 2:
            raise LookupError
        return batch.clone()

    kept: LookupError | None = None
    try:
        for _ in wrap(DataLoader(Numbers(9)), prepare):
            pass
    except LookupError as error:
        kept = error

    assert kept is not None
    assert prefetch_threads() == []
    # Its traceback shows the batch that failed, and no other.
    assert [number for number, batch in enumerate(made) if batch() is not None] == [1]


def test_an_interrupt_while_waiting_loses_no_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    from trine.core.devices import loader

    batches = iter(wrap(DataLoader(Numbers(3))))
    first = next(batches).item()

    def interrupt(_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(loader, "wait", interrupt)
        with pytest.raises(KeyboardInterrupt):
            next(batches)

    assert [first, *values(batches)] == [100.0, 101.0, 102.0]


# Nothing stays behind.


def test_a_loop_that_breaks_leaves_no_thread_and_no_batch() -> None:
    made: list[weakref.ref[Tensor]] = []

    def prepare(batch: Tensor) -> Tensor:
        prepared = batch.clone()
        made.append(weakref.ref(prepared))
        return prepared

    for batch in wrap(DataLoader(Endless()), prepare):
        if batch.item() == 3:
            break
    del batch

    assert prefetch_threads() == []
    assert [reference for reference in made if reference() is not None] == []


def test_a_loop_that_breaks_while_a_batch_is_being_prepared_waits_for_it() -> None:
    begun, go_on = threading.Event(), threading.Event()

    def prepare(batch: Tensor) -> Tensor:
        if batch.item() == 2:
            begun.set()
            assert go_on.wait(WAIT_S)
        return batch

    batches = iter(wrap(DataLoader(Endless()), prepare))
    next(batches)
    next(batches)
    assert begun.wait(WAIT_S)
    threading.Timer(0.05, go_on.set).start()
    del batches

    assert go_on.is_set()
    assert prefetch_threads() == []


def test_a_loop_that_breaks_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def hang(batch: Tensor) -> Tensor:
        if batch.item() == 2:
            begun.set()
            assert go_on.wait(WAIT_S)
        return batch

    monkeypatch.setattr(worker_thread, "PATIENCE_S", 0.01)
    batches = iter(wrap(DataLoader(Endless()), hang))
    next(batches)
    next(batches)
    assert begun.wait(WAIT_S)
    (thread,) = prefetch_threads()
    del batches
    was_left_alone = thread.is_alive()
    go_on.set()
    thread.join(WAIT_S)

    assert was_left_alone
    assert not thread.is_alive()  # it ends when the call has returned


def test_a_prefetch_fn_that_hangs_does_not_keep_the_program_from_its_end() -> None:
    program = """
import threading
from trine.core import CPUDevice
from trine.core.devices import worker_thread

worker_thread.PATIENCE_S = 0.1
begun = threading.Event()

def hang(batch):
    if batch:
        begun.set()
        threading.Event().wait()
    return batch

batches = iter(CPUDevice().dataloader_to_device(range(9), hang))
next(batches)
threading.Thread(target=lambda: next(batches), daemon=True).start()
begun.wait()
raise SystemExit(5)
"""

    ended = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program], capture_output=True, timeout=100
    )

    assert (ended.returncode, ended.stderr) == (5, b"")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="nothing forks here")
@pytest.mark.filterwarnings("ignore:This process.*multi-threaded:DeprecationWarning")
def test_a_forked_process_is_told_that_the_iterator_is_not_its_own() -> None:
    batches = iter(wrap(DataLoader(Numbers())))
    first = next(batches).item()
    reader, writer = os.pipe()

    child = os.fork()
    if child == 0:  # pragma: no cover  # measured in the parent only
        try:
            next(batches)
        except BaseException as error:
            os.write(writer, repr(error).encode())
        del batches
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        said = pipe.read()  # until the child has ended
    os.waitpid(child, 0)

    assert said.startswith("TrineError('This iterator is of another process than")
    assert [first, *values(batches)] == [100.0, 101.0, 102.0, 103.0, 104.0, 105.0]


def test_the_thread_is_gone_when_the_last_batch_has_been_handed_out() -> None:
    batches = iter(wrap(DataLoader(Numbers(2))))

    assert values(batches) == [100.0, 101.0]
    assert prefetch_threads() == []
    with pytest.raises(StopIteration):
        next(batches)


def test_a_closed_iterator_has_no_more_batches() -> None:
    batches: Any = iter(wrap(DataLoader(Endless())))
    next(batches)

    batches.close()
    batches.close()

    assert prefetch_threads() == []
    assert list(batches) == []


def test_an_iterator_collected_in_a_loaders_thread_does_not_wait_for_itself() -> None:
    other = [iter(wrap(DataLoader(Endless())))]
    next(other[0])
    (thread,) = prefetch_threads()

    def drop_it(batch: Tensor) -> Tensor:
        other.clear()
        return batch

    assert values(wrap(DataLoader(Numbers(2)), drop_it)) == [0.0, 1.0]
    thread.join(WAIT_S)
    assert not thread.is_alive()


def test_every_epoch_starts_anew() -> None:
    wrapped = wrap(DataLoader(Numbers(3)))

    assert [values(wrapped) for _ in range(3)] == [[100.0, 101.0, 102.0]] * 3


def test_two_iterators_at_once_do_not_take_each_others_batches() -> None:
    wrapped = wrap(DataLoader(Numbers(3)))

    pairs = [(a.item(), b.item()) for a, b in zip(wrapped, wrapped, strict=True)]

    assert pairs == [(100.0, 100.0), (101.0, 101.0), (102.0, 102.0)]


def test_a_loop_inside_a_loop_over_the_same_loader_is_whole() -> None:
    wrapped = wrap(DataLoader(Numbers(3)))

    inner = [values(wrapped) for _ in wrapped]

    assert inner == [[100.0, 101.0, 102.0]] * 3


def worker_of(batch: list[Tensor]) -> int:
    info = get_worker_info()
    assert info is not None
    return info.id


def test_workers_end_with_a_loop_that_breaks() -> None:
    wrapped = wrap(DataLoader(Endless(), num_workers=2))

    for _ in wrapped:
        assert len(multiprocessing.active_children()) == 2
        break

    assert multiprocessing.active_children() == []


def test_persistent_workers_serve_one_iterator_and_the_former_one_ends() -> None:
    loader = DataLoader(Numbers(4), num_workers=1, persistent_workers=True)
    wrapped = wrap(loader)
    former = iter(wrapped)
    next(former)
    workers = multiprocessing.active_children()

    assert values(wrapped) == [100.0, 101.0, 102.0, 103.0]
    assert values(wrapped) == [100.0, 101.0, 102.0, 103.0]
    assert list(former) == []
    assert multiprocessing.active_children() == workers


# Devices with streams, by doubles.


class LoggedStream(HostStream):
    """A stream that remembers what was asked of it."""

    def __init__(self, name: str, log: list[Any]) -> None:
        self.name = name
        self.log = log

    def use(self) -> Any:
        self.log.append(f"work on {self.name}")
        return super().use()

    def record_event(self) -> Any:
        self.log.append(f"{self.name} marks")
        return super().record_event()

    def wait_event(self, event: Any) -> None:
        self.log.append(f"{self.name} waits")

    def hold(self, tensor: Tensor) -> None:
        if not tensor.is_meta:
            self.log.append((f"{self.name} holds", tensor.item()))


class Accelerator(CPUDevice):
    """A CPU that says it works ahead, as accelerators do."""

    is_async = True

    def __init__(self) -> None:
        super().__init__()
        self.log: list[Any] = []

    def tensor_to_device(self, tensor: Tensor) -> Tensor:
        return tensor

    def stream(self) -> Any:
        return LoggedStream("side", self.log)

    def current_stream(self) -> Any:
        return LoggedStream("main", self.log)


class Hidden:
    """An object that moves itself, holds a tensor, and refers to itself."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.around = [self]

    def to(self, device: Any) -> Hidden:
        return self


def test_on_an_accelerator_batches_move_on_a_side_stream_that_the_loop_waits_for() -> None:
    device = Accelerator()

    (batch,) = device.dataloader_to_device([{"x": torch.tensor(1.0)}])

    assert batch["x"].item() == 1.0
    assert device.log[-4:] == ["work on side", "side marks", "main waits", ("main holds", 1.0)]


def test_the_side_stream_waits_for_the_stream_a_batch_was_made_on_and_holds_its_memory() -> None:
    device = Accelerator()

    handed = values(device.dataloader_to_device([torch.tensor(1.0)], plus_hundred))

    assert handed == [101.0]
    assert device.log[:4] == ["main marks", "side waits", ("side holds", 1.0), "work on side"]
    assert device.log[-1] == ("main holds", 101.0)


def test_each_batch_waits_for_what_was_queued_when_it_was_taken() -> None:
    device = Accelerator()

    class OnTheDevice:
        def __iter__(self) -> Iterator[Tensor]:
            for number in range(3):
                device.log.append(f"made {number}")
                yield torch.tensor(float(number))

    list(device.dataloader_to_device(OnTheDevice()))

    on_main = [line for line in device.log if line == "main marks" or str(line)[:4] == "made"]
    assert on_main == ["made 0", "main marks", "made 1", "main marks", "made 2", "main marks"]


def test_tensors_inside_objects_that_move_themselves_are_held_too() -> None:
    device = Accelerator()
    loop = Hidden(torch.tensor(2.0))
    loop.around.append([loop.around])  # type: ignore[arg-type]  # a list in itself

    list(device.dataloader_to_device([[Hidden(torch.tensor(1.0)), loop]]))

    assert device.log[-2:] == [("main holds", 1.0), ("main holds", 2.0)]


def test_on_a_device_that_pins_host_memory_is_pinned_first_and_only_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pinned: list[int] = []

    def pin(tensor: Tensor) -> Tensor:
        pinned.append(id(tensor))
        return tensor

    monkeypatch.setattr(Tensor, "pin_memory", pin)
    monkeypatch.setattr(Tensor, "is_pinned", lambda tensor: tensor.item() == 2.0)
    monkeypatch.setattr(Accelerator, "pins_memory", True)
    pageable, is_pinned = torch.tensor(1.0), torch.tensor(2.0)
    elsewhere, object_ = torch.ones((), device="meta"), Hidden(torch.tensor(3.0))

    list(Accelerator().dataloader_to_device([[pageable, is_pinned, elsewhere, object_]]))

    assert pinned == [id(pageable)]


# Speed.


def test_preparing_and_stepping_overlap() -> None:
    def prepare(batch: Tensor) -> Tensor:
        time.sleep(0.02)
        return batch

    def epoch(loader: Any) -> float:
        started = time.perf_counter()
        for _ in loader:
            time.sleep(0.02)
        return time.perf_counter() - started

    loader = DataLoader(Numbers(15))
    serial = min(epoch(map(prepare, loader)) for _ in range(2))
    ahead = min(epoch(wrap(loader, prepare)) for _ in range(3))

    # Half, and the first batch; bench_loader.py measures against 0.6 on a quiet machine.
    assert ahead < 0.8 * serial


@pytest.mark.gpu
def test_batches_reach_the_gpu_prepared_and_whole() -> None:
    device = get_device("cuda")
    rows = [torch.full((1 << 20,), float(number)) for number in range(20)]

    sums = [
        batch.sum().item()
        for batch in device.dataloader_to_device(rows, lambda batch: batch.double() * 2)
    ]

    assert sums == [2.0 * number * (1 << 20) for number in range(20)]


@pytest.mark.gpu
def test_batches_made_on_the_gpu_just_now_are_written_before_they_are_prepared() -> None:
    device = get_device("cuda")
    busy = torch.zeros(4096, 4096, device=device.torch_device)

    def rows() -> Iterator[Tensor]:
        for number in range(10):
            for _ in range(10):  # the row below is queued behind these
                busy.addmm_(busy, busy)
            yield torch.full((1 << 20,), float(number), device=device.torch_device)

    sums = [
        batch.sum().item()
        for batch in device.dataloader_to_device(rows(), lambda batch: batch.double() * 2)
    ]

    assert sums == [2.0 * number * (1 << 20) for number in range(10)]


class SpanNames:
    """A sink that keeps the names of spans, and which thread reported them."""

    def __init__(self) -> None:
        self.here: list[str] = []
        self.elsewhere: list[str] = []

    def record(self, event: tracing.TraceEvent) -> None:
        here = event.thread == threading.get_ident() == threading.main_thread().ident
        (self.here if here else self.elsewhere).append(event.name)


def test_a_prefetching_loader_reports_what_it_waits_for_and_what_its_thread_does() -> None:
    loader = get_device("cpu").dataloader_to_device(
        DataLoader(Numbers(2), batch_size=1), prefetch_fn=plus_hundred
    )
    names = SpanNames()
    tracing.add_sink(names)
    try:
        batches = list(loader)
    finally:
        tracing.remove_sink(names)

    assert len(batches) == 2
    assert names.here.count("wait for batch") == 2
    assert names.here.count("fetch batch") == 3  # the last finds nothing
    assert names.elsewhere == ["prepare batch"] * 2


def test_a_loader_without_prefetching_reports_the_moves() -> None:
    loader = get_device("cpu").dataloader_to_device(DataLoader(Numbers(2), batch_size=1))
    names = SpanNames()
    tracing.add_sink(names)
    try:
        list(loader)
    finally:
        tracing.remove_sink(names)

    assert names.here == ["move batch"] * 2

"""The engine on a device with streams: in which order a GPU may do what it queues.

Programs train on the made-up device of `recording_device`, in a world of torch's fake process
group, and a race is any use of a buffer that nothing orders after an earlier one. That the
detector finds what it should is shown by engines that are broken on purpose.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle, pairwise
from math import prod
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from tests.distributed.recording_device import KIND, RecordingDevice
from tests.distributed.stream_model import Access, Mark, StreamModel, Timeline
from trine.distributed._fsdp.buffers import BufferPool
from trine.distributed._fsdp.collectives import PendingReduce
from trine.distributed._fsdp.offload import HostMemory
from trine.distributed._fsdp.transfers import Transfer, Transfers
from trine.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

BLOCKS = 4
SHAPES = {"shard": (4,), "replicate": (4, 1), "replicate x shard": (2, 2)}
POLICIES = {"on the device": OffloadPolicy(), "on the host": CPUOffloadPolicy()}
DTYPES = {
    "fp32": MixedPrecisionPolicy(),
    "bf16": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
}


# --- the detector -------------------------------------------------------------------------


def test_work_on_two_streams_is_a_race_where_one_of_them_writes() -> None:
    model, other = StreamModel(), Timeline("other")

    model.work("write", writes=[Access("buffer")])
    model.work("read", other, reads=[Access("buffer")])
    model.work("read another part", other, reads=[Access("buffer", 1, 2)])

    (race,) = model.races
    assert race.startswith("'read' on other reads what 'write' on main writes")


def test_work_behind_an_event_is_no_race_and_work_queued_after_the_record_is() -> None:
    model, other, mark = StreamModel(), Timeline("other"), Mark()

    model.work("covered", writes=[Access("first")])
    model.record(model.main, mark)
    model.work("not covered", writes=[Access("second")])
    model.wait(other, mark)
    model.work("read the first", other, reads=[Access("first")])
    assert model.races == []
    model.work("read the second", other, reads=[Access("second")])

    assert len(model.races) == 1


def test_the_host_races_with_a_stream_until_it_has_synchronized() -> None:
    model, mark = StreamModel(), Mark()

    model.work("copy", reads=[Access("on the host")])
    model.record(model.main, mark)
    model.wait(model.host, mark)
    model.work("step", model.host, writes=[Access("on the host")])
    model.work("copy again", reads=[Access("on the host")])
    assert model.races == []
    model.work("step too early", model.host, writes=[Access("on the host")])

    assert len(model.races) == 1


def test_what_one_waiter_knows_it_passes_on() -> None:
    model, second, third = StreamModel(), Timeline("second"), Timeline("third")

    model.work("write", writes=[Access("buffer")])
    for earlier, later in ((model.main, second), (second, third)):
        mark = Mark()
        model.record(earlier, mark)
        model.wait(later, mark)
    model.work("read", third, reads=[Access("buffer")])

    assert model.races == []


# --- the engine ---------------------------------------------------------------------------


class Here(torch.autograd.Function):
    """Notes in the journal when forward comes by, and when backward does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mark: Callable[[str], None], name: str) -> Tensor:
        ctx.mark, ctx.name = mark, name
        mark(f"forward of {name}")
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        ctx.mark(f"backward of {ctx.name}")
        return grad, None, None


class Block(nn.Module):
    def __init__(self, name: str, mark: Callable[[str], None]) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 6), nn.Linear(6, 6)
        self.name, self.mark = name, mark

    def forward(self, x: Tensor) -> Tensor:
        # Between the two, both passes have the parameters already and still need some.
        x = Here.apply(self.up(x), self.mark, self.name)  # type: ignore[no-untyped-call]  # torch's
        out: Tensor = self.down(x)
        return out


class Program:
    """A model on the made-up device, and steps of training that are watched."""

    def __init__(
        self,
        device: RecordingDevice,
        shape: tuple[int, ...] = (4,),
        **options: Any,
    ) -> None:
        torch.manual_seed(0)
        self.device = device
        self.model = nn.Sequential(*(Block(str(i), device.mark) for i in range(BLOCKS)))
        options["mesh"] = init_device_mesh(KIND, shape)
        for block in self.model:
            fully_shard(block, **options)
        fully_shard(self.model, **options)
        # Without scalars on the device, reading which would order everything before.
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)

    @property
    def root(self) -> FSDPModule:
        assert isinstance(self.model, FSDPModule)
        return self.model

    @property
    def units(self) -> list[FSDPModule]:
        return [block for block in self.model if isinstance(block, FSDPModule)]

    def train(self, steps: int = 2, micro_batches: int = 2) -> None:
        with self.device.watching():
            for _ in range(steps):
                for _ in range(micro_batches):
                    self.model(torch.ones(3, 6)).sum().backward()
                self.optimizer.step()
                self.optimizer.zero_grad()


@pytest.fixture
def device(recording_device: RecordingDevice) -> RecordingDevice:
    return recording_device


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("shape", SHAPES)
def test_no_two_uses_of_a_buffer_are_unordered(
    device: RecordingDevice, shape: str, policy: str, dtype: str
) -> None:
    program = Program(
        device, SHAPES[shape], offload_policy=POLICIES[policy], mp_policy=DTYPES[dtype]
    )

    program.train()

    assert device.model.races == []


def two_ahead(program: Program) -> None:
    units = program.units
    for i, unit in enumerate(units):
        unit.set_modules_to_forward_prefetch(units[i + 1 : i + 3])
        unit.set_modules_to_backward_prefetch(units[max(i - 2, 0) : i][::-1])


def whole_between_the_passes(program: Program) -> None:
    for unit in program.units:
        unit.set_reshard_after_forward(False)
        unit.set_reshard_after_backward(False)


def reduced_in_a_group_apart(program: Program) -> None:
    program.root.set_separate_reduce_scatter_group()


def stepping_in_backward(program: Program) -> None:
    def step(param: Tensor) -> None:
        with torch.no_grad():
            param.add_(param.grad, alpha=-0.1)  # type: ignore[arg-type]  # it has one
        param.grad = None

    for param in program.model.parameters():
        param.register_post_accumulate_grad_hook(step)  # type: ignore[no-untyped-call]


def accumulating_without_communication(program: Program) -> None:
    def every_other(*_: object) -> None:
        program.root.set_requires_gradient_sync(next(turns))

    turns = cycle([False, True])
    program.model.register_forward_pre_hook(every_other)


WAYS = {
    way.__name__: way
    for way in (
        two_ahead,
        whole_between_the_passes,
        reduced_in_a_group_apart,
        stepping_in_backward,
        accumulating_without_communication,
    )
}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("way", WAYS)
def test_none_are_whatever_a_user_sets(device: RecordingDevice, way: str, policy: str) -> None:
    program = Program(device, SHAPES["replicate x shard"], offload_policy=POLICIES[policy])
    WAYS[way](program)

    program.train()

    assert device.model.races == []


@pytest.mark.parametrize("policy", POLICIES)
def test_the_next_gather_is_queued_before_a_unit_computes_and_runs_beside_it(
    device: RecordingDevice, policy: str
) -> None:
    program = Program(device, offload_policy=POLICIES[policy])
    program.train(micro_batches=1)  # in the first step the order is not known yet

    find = device.model.find
    for unit in range(BLOCKS - 1):
        # The last but one gather of each is that for forward; the last unit stays whole.
        gather, computing = find(f"all_gather {unit + 1}", -2), find(f"forward of {unit}")
        assert device.model.queued_before(gather, computing), unit
        assert gather.beside(computing), unit
    for unit in range(BLOCKS - 1, 0, -1):
        gather, computing = find(f"all_gather {unit - 1}"), find(f"backward of {unit}")
        assert device.model.queued_before(gather, computing), unit
        assert gather.beside(computing), unit


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("shape", ["shard", "replicate x shard"])
def test_a_reduction_runs_beside_the_backward_of_the_next_units(
    device: RecordingDevice, shape: str, policy: str
) -> None:
    program = Program(device, SHAPES[shape], offload_policy=POLICIES[policy])
    program.train(micro_batches=1)

    # What becomes of a unit's gradients, each step beside the backward of one unit more.
    stages = ["reduce_scatter"] + ["all_reduce"] * (shape != "shard")
    for unit in range(BLOCKS):
        works = [device.model.find(f"{stage} {unit}") for stage in stages]
        if policy == "on the host":
            # The last unit's gradients were copied first.
            works.append(device.model.find("copy to host", -1 - unit))
        for later, work in enumerate(works, start=1):
            if unit - later >= 0:
                computing = device.model.find(f"backward of {unit - later}")
                assert device.model.queued_before(work, computing), work.label
                assert work.beside(computing), work.label


@pytest.mark.parametrize("policy", POLICIES)
def test_the_host_does_not_wait_for_the_unit_that_computes(
    device: RecordingDevice, policy: str
) -> None:
    program = Program(device, offload_policy=POLICIES[policy])
    program.train(micro_batches=1)

    order = [f"forward of {unit}" for unit in range(BLOCKS)]
    order += [f"backward of {unit}" for unit in reversed(range(BLOCKS))]
    for earlier, later in pairwise(order):
        assert device.model.find(earlier).beside(device.model.find(f"{later}, on the host")), later


def loss_of(program: Program) -> Tensor:
    out: Tensor = program.model(torch.ones(3, 6))
    return out.square().sum()


def backward(loss: Tensor, **options: Any) -> None:
    loss.backward(**options)  # type: ignore[no-untyped-call]  # torch's own


def evaluation_first(program: Program) -> None:
    with torch.no_grad():
        loss_of(program)
    backward(loss_of(program))


def two_forwards_before_one_backward(program: Program) -> None:
    backward(loss_of(program) + loss_of(program))


def two_backwards_after_one_forward(program: Program) -> None:
    loss = loss_of(program)
    backward(loss, retain_graph=True)
    backward(loss)


def checkpointed(program: Program) -> None:
    x = torch.ones(3, 6, requires_grad=True)
    for block in program.model:
        x = checkpoint(block, x, use_reentrant=False)
    backward(x.square().sum())


def reductions_left_open(program: Program) -> None:
    program.root.set_is_last_backward(False)
    backward(loss_of(program))
    program.root.set_is_last_backward(True)
    backward(loss_of(program))


def gathered_by_hand(program: Program) -> None:
    handle = program.root.unshard(async_op=True)
    loss = loss_of(program)
    if handle is not None:
        handle.wait()
    backward(loss)
    program.root.reshard()


def parts_used_alone(program: Program) -> None:
    for block in program.model:
        backward(block(torch.ones(3, 6)).sum())
    backward(loss_of(program))


def copies_added_up_later(program: Program) -> None:
    program.root.set_requires_all_reduce(False)
    backward(loss_of(program))
    program.root.set_requires_all_reduce(True)
    backward(loss_of(program))


LIVES = {
    life.__name__: life
    for life in (
        evaluation_first,
        two_forwards_before_one_backward,
        two_backwards_after_one_forward,
        checkpointed,
        reductions_left_open,
        gathered_by_hand,
        parts_used_alone,
        copies_added_up_later,
    )
}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("life", LIVES)
def test_none_are_however_a_program_goes(device: RecordingDevice, life: str, policy: str) -> None:
    program = Program(device, SHAPES["replicate x shard"], offload_policy=POLICIES[policy])

    with device.watching():
        for _ in range(2):
            LIVES[life](program)
            program.optimizer.step()
            program.optimizer.zero_grad()

    assert device.model.races == []


@pytest.mark.parametrize("policy", POLICIES)
def test_none_are_where_backward_gathers_among_fewer_ranks(
    device: RecordingDevice, policy: str
) -> None:
    program = Program(device, reshard_after_forward=2, offload_policy=POLICIES[policy])

    program.train()

    assert device.model.races == []


@pytest.mark.parametrize("policy", POLICIES)
def test_an_iteration_that_breaks_off_leaves_no_buffer_in_use(
    device: RecordingDevice, policy: str
) -> None:
    program = Program(device, SHAPES["replicate x shard"], offload_policy=POLICIES[policy])
    block = program.model[1]
    assert isinstance(block, Block)
    note = block.mark

    def fail(label: str) -> None:
        if label.startswith("backward"):
            raise RuntimeError("broke off")
        note(label)

    block.mark = fail
    with device.watching(), pytest.raises(RuntimeError, match="broke off"):
        program.model(torch.ones(3, 6)).sum().backward()
    block.mark = note
    program.optimizer.zero_grad()
    program.train()

    assert device.model.races == []


def test_a_parameter_may_be_written_to_as_soon_as_it_is_shown(device: RecordingDevice) -> None:
    program = Program(device, offload_policy=CPUOffloadPolicy())

    with device.watching(), torch.no_grad():
        program.model(torch.ones(3, 6))
        for param in program.model.parameters():
            param.mul_(2)

    assert device.model.races == []


# --- engines that are broken on purpose: what they do wrong must be seen -------------------


def pool_that_gives_back_at_once(patch: pytest.MonkeyPatch, device: RecordingDevice) -> None:
    acquire = BufferPool.acquire
    given_back: dict[tuple[int, torch.dtype], Tensor] = {}

    def acquired(
        pool: BufferPool, shape: tuple[int, ...], dtype: torch.dtype, where: torch.device
    ) -> Tensor:
        size = prod(shape), dtype
        if size not in given_back:
            given_back[size] = acquire(pool, shape, dtype, where)
        return given_back[size].view(shape)

    patch.setattr(BufferPool, "acquire", acquired)
    patch.setattr(BufferPool, "release", lambda *_: None)


def copy_out_before_the_wait(patch: pytest.MonkeyPatch, device: RecordingDevice) -> None:
    wait = Transfers.wait

    def waited(transfers: Transfers, transfer: Transfer, pending: Any) -> None:
        if transfer.name != "all_gather":
            wait(transfers, transfer, pending)

    patch.setattr(Transfers, "wait", waited)


def gradients_before_the_reduction_ends(patch: pytest.MonkeyPatch, device: RecordingDevice) -> None:
    patch.setattr(PendingReduce, "wait", lambda _: None)


def gather_without_the_event_of_the_copy(
    patch: pytest.MonkeyPatch, device: RecordingDevice
) -> None:
    def fetch(host: HostMemory, shard: Tensor, into: Tensor, then: Callable[[], Any]) -> Any:
        _, copied = fetched(host, shard, into, lambda: None)
        return then(), copied

    fetched = HostMemory.fetch
    patch.setattr(HostMemory, "fetch", fetch)
    patch.setattr(HostMemory, "await_fetched", lambda *_: None)


def copy_out_without_the_event_of_the_copy(
    patch: pytest.MonkeyPatch, device: RecordingDevice
) -> None:
    patch.setattr(HostMemory, "await_fetched", lambda *_: None)


def host_that_waits_for_no_event(patch: pytest.MonkeyPatch, device: RecordingDevice) -> None:
    device.broken.add("synchronize")


def copies_that_wait_for_no_stream(patch: pytest.MonkeyPatch, device: RecordingDevice) -> None:
    device.broken.add("wait")


Plant = Callable[[pytest.MonkeyPatch, RecordingDevice], None]
FAULTS: list[tuple[Plant, str, str, str]] = [
    (copy_out_before_the_wait, "shard", "on the device", "all_gather"),
    (gradients_before_the_reduction_ends, "shard", "on the device", "reduce_scatter"),
    (gather_without_the_event_of_the_copy, "shard", "on the host", "copy to device"),
    (copy_out_without_the_event_of_the_copy, "replicate", "on the host", "copy to device"),
    (host_that_waits_for_no_event, "shard", "on the host", "copy to host"),
    (copies_that_wait_for_no_stream, "shard", "on the host", "copy to host"),
]


@pytest.mark.parametrize(
    ("plant", "shape", "policy", "culprit"), FAULTS, ids=[plant.__name__ for plant, *_ in FAULTS]
)
def test_a_broken_engine_is_found_out(
    device: RecordingDevice,
    monkeypatch: pytest.MonkeyPatch,
    plant: Plant,
    shape: str,
    policy: str,
    culprit: str,
) -> None:
    program = Program(device, SHAPES[shape], offload_policy=POLICIES[policy])
    plant(monkeypatch, device)

    program.train()

    assert any(culprit in race for race in device.model.races), device.model.races


def test_a_gather_buffer_that_is_given_back_at_once_is_found_out(
    device: RecordingDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = Program(device)
    two_ahead(program)  # one at a time is copied out before the next gather takes its buffer
    pool_that_gives_back_at_once(monkeypatch, device)

    program.train()

    assert any("reads what 'all_gather" in race for race in device.model.races)


def test_a_buffer_of_gradients_that_is_given_back_at_once_is_found_out(
    device: RecordingDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = Program(device)
    # One at a time is summed up before the next reduction takes its buffer.
    program.root.set_reduce_scatter_max_input_buffers(2)
    pool_that_gives_back_at_once(monkeypatch, device)

    program.train()

    assert any("reduce_scatter" in race for race in device.model.races), device.model.races


def test_shards_that_are_written_to_before_they_are_copied_are_found_out(
    device: RecordingDevice,
) -> None:
    program = Program(device, offload_policy=CPUOffloadPolicy())
    device.broken.add("synchronize")

    with device.watching(), torch.no_grad():
        program.model(torch.ones(3, 6))
        for param in program.model.parameters():
            param.mul_(2)

    assert any("copy to device" in race for race in device.model.races)

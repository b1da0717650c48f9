"""What a model goes through besides plain steps: made on meta, compiled, swapped, failed.

As in test_fully_shard.py, whose helpers are used here, each value is checked against a whole
model that goes through the same.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from tests.distributed.test_fully_shard import (
    FP32,
    Block,
    Breaks,
    CheckpointedInside,
    Net,
    assert_same_gradients,
    assert_same_values,
    backward,
    batches,
    compare_steps,
    loss_of,
    mean_backward,
    net_and_reference,
    own,
    sharded,
    whole,
)
from trine.distributed.fsdp import MixedPrecisionPolicy, fully_shard

RunOnRanks = Callable[..., list[Any]]


# --- made without memory ---------------------------------------------------------------


def take_values(reference: nn.Module, model: nn.Module) -> None:
    """Give the whole model what the sharded one holds."""
    values = {name: whole(param.detach()) for name, param in model.named_parameters()}
    reference.load_state_dict(values)


def initialize_after_meta() -> None:
    with torch.device("meta"):
        model = Net()
    sharded(model).to_empty(device="cpu")
    torch.manual_seed(0)
    for module in model.modules():
        if isinstance(module, (nn.Linear, nn.Embedding)):
            module.reset_parameters()
    nn.init.ones_(model.scale)
    _, reference = net_and_reference()

    take_values(reference, model)

    # Each row is drawn once: no rank has the same numbers as another.
    assert model.head.weight.std() > 0.1
    assert len(set(reference.head.weight.flatten().tolist())) == reference.head.weight.numel()
    compare_steps(model, reference, 3, lr=0.1)
    assert_same_values(model, reference)


def test_a_model_made_on_meta_is_initialized_in_its_sharded_form(run_on_ranks: RunOnRanks) -> None:
    run_on_ranks(initialize_after_meta, 2)


def load_after_meta(assign: bool) -> None:
    net, reference = net_and_reference()
    saved = sharded(net).state_dict()
    with torch.device("meta"):
        model = Net()
    sharded(model)
    if not assign:
        model.to_empty(device="cpu")

    model.load_state_dict(saved, assign=assign)

    compare_steps(model, reference, 3, lr=0.1)
    assert_same_values(model, reference)


@pytest.mark.parametrize("assign", [False, True])
def test_a_model_made_on_meta_is_loaded_from_a_sharded_one(
    run_on_ranks: RunOnRanks, assign: bool
) -> None:
    run_on_ranks(load_after_meta, 2, assign)


# --- several backwards -----------------------------------------------------------------


class TwoHeads(Net):
    def __init__(self) -> None:
        super().__init__()
        self.second = nn.Linear(7, 11)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x * self.scale), self.second(x)


def losses_of(model: nn.Module, tokens: Tensor) -> list[Tensor]:
    targets = tokens.roll(1).flatten()
    return [nn.functional.cross_entropy(out.flatten(0, 1), targets) for out in model(tokens)]


def backward_of_each_output(reshard_after_forward: bool | None) -> None:
    torch.manual_seed(0)
    reference = TwoHeads()
    model = sharded(copy.deepcopy(reference), reshard_after_forward=reshard_after_forward)
    for step in range(2):
        model.zero_grad()
        reference.zero_grad()
        first, second = losses_of(model, own(batches(step)))
        first.backward(retain_graph=True)  # type: ignore[no-untyped-call]  # torch's own
        between = [whole(param.grad) for param in model.parameters()]
        backward(second)
        firsts, seconds = zip(*(losses_of(reference, x) for x in batches(step)), strict=True)
        torch.stack(firsts).mean().backward(retain_graph=True)  # type: ignore[no-untyped-call]

        for ours, (name, theirs) in zip(between, reference.named_parameters(), strict=True):
            assert (ours is None) == (theirs.grad is None), name
            if ours is not None:
                torch.testing.assert_close(ours, theirs.grad, rtol=FP32, atol=FP32)
        backward(torch.stack(seconds).mean())
        assert_same_gradients(model, reference, 2 * FP32)


@pytest.mark.parametrize("reshard_after_forward", [None, True, False])
def test_each_output_may_have_a_backward_of_its_own(
    run_on_ranks: RunOnRanks, reshard_after_forward: bool | None
) -> None:
    run_on_ranks(backward_of_each_output, 2, reshard_after_forward)


# --- compiled --------------------------------------------------------------------------


def compile_blocks(net: Net) -> nn.Module:
    for index, block in enumerate(net.blocks):
        net.blocks[index] = torch.compile(block, backend="aot_eager")  # type: ignore[assignment]
    return sharded(net)


def compile_checkpointed_blocks(net: Net) -> nn.Module:
    for index, block in enumerate(net.blocks):
        net.blocks[index] = CheckpointedInside(block, reentrant=False)
    return compile_blocks(net)


def compile_blocks_in_place(net: Net) -> nn.Module:
    for index, block in enumerate(net.blocks):
        net.blocks[index] = CheckpointedInside(block, reentrant=False)
        net.blocks[index].compile(backend="aot_eager")
    return sharded(net)


def compile_sharded_blocks_in_place(net: Net) -> nn.Module:
    model = sharded(net)
    for block in model.blocks:
        block.compile(backend="aot_eager")
    return model


def compile_the_sharded_model(net: Net) -> nn.Module:
    return torch.compile(sharded(net), backend="aot_eager")  # type: ignore[return-value]


def train_compiled(compile_and_shard: Callable[[Net], nn.Module]) -> None:
    net, reference = net_and_reference()
    model = compile_and_shard(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    reference_optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        reference_optimizer.zero_grad()
        backward(loss_of(model, own(batches(step))))
        mean_backward(reference, batches(step))
        # Compiling and checkpointing put names of their own into those of parameters.
        for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(whole(ours.grad), theirs.grad, rtol=FP32, atol=FP32)
        optimizer.step()
        reference_optimizer.step()


@pytest.mark.parametrize(
    "compile_and_shard",
    [
        compile_blocks,
        compile_checkpointed_blocks,
        compile_blocks_in_place,
        compile_sharded_blocks_in_place,
        compile_the_sharded_model,
    ],
)
def test_models_may_be_checkpointed_compiled_and_sharded(
    run_on_ranks: RunOnRanks, compile_and_shard: Callable[[Net], nn.Module]
) -> None:
    run_on_ranks(train_compiled, 2, compile_and_shard)


# --- exchanged between steps -----------------------------------------------------------


def like(param: DTensor, value: Tensor) -> DTensor:
    """`value`, whole on every rank, as a DTensor sharded like `param`."""
    size = -(-len(value) // dist.get_world_size())
    rows = value[dist.get_rank() * size :][:size]
    return DTensor.from_local(
        rows.clone(),
        param.device_mesh,
        param.placements,
        run_check=False,
        shape=param.shape,
        stride=param.stride(),
    )


def exchange_by_assign(net: Net, value: Tensor) -> None:
    state = net.state_dict()
    state["head.weight"] = like(state["head.weight"], value)
    net.load_state_dict(state, assign=True)


def exchange_by_attribute(net: Net, value: Tensor) -> None:
    net.head.weight = nn.Parameter(like(net.head.weight, value))  # type: ignore[arg-type]


def exchange_by_swap(net: Net, value: Tensor) -> None:
    other = nn.Parameter(like(net.head.weight, value))  # type: ignore[arg-type]
    swap: Any = torch.utils.swap_tensors  # not typed
    swap(net.head.weight, other)


def exchange_in_place(net: Net, value: Tensor) -> None:
    with torch.no_grad():
        net.head.weight.copy_(like(net.head.weight, value))  # type: ignore[arg-type]


def exchange(how: Callable[[Net, Tensor], None]) -> None:
    net, reference = net_and_reference()
    model = sharded(net)
    compare_steps(model, reference, 2, lr=0.1)
    value = torch.randn(11, 7, generator=torch.Generator().manual_seed(3))

    how(model, value)
    with torch.no_grad():
        reference.head.weight.copy_(value)

    assert_same_values(model, reference)
    compare_steps(model, reference, 2, lr=0.1)
    assert_same_values(model, reference)


@pytest.mark.parametrize(
    "how",
    [
        exchange_by_assign,
        exchange_by_attribute,
        exchange_by_swap,
        exchange_in_place,
    ],
)
def test_a_parameter_may_be_exchanged_between_steps(
    run_on_ranks: RunOnRanks, how: Callable[[Net, Tensor], None]
) -> None:
    run_on_ranks(exchange, 2, how)


class Adapted(nn.Module):
    """A linear layer with a low-rank addition."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        generator = torch.Generator().manual_seed(5)
        self.down = nn.Parameter(torch.randn(2, base.in_features, generator=generator))
        self.up = nn.Parameter(torch.randn(base.out_features, 2, generator=generator))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x) + x @ self.down.t() @ self.up.t()
        return out


def adapt(block: Block, shard: bool) -> None:
    block.up.requires_grad_(False)
    block.up = Adapted(block.up)  # type: ignore[assignment]
    if shard:
        # Its base stays in the block's unit; the adapters become one of their own.
        fully_shard(block.up, ignored_params=set(block.up.base.parameters()))  # type: ignore[union-attr]


def merge(block: Block) -> None:
    adapted: Any = block.up
    with torch.no_grad():
        adapted.base.weight += adapted.up @ adapted.down
    block.up = adapted.base


def adapt_and_merge() -> None:
    net, reference = net_and_reference()
    model = sharded(net)
    compare_steps(model, reference, 2, lr=0.1)

    adapt(model.blocks[1], shard=True)  # type: ignore[arg-type]  # a Block
    adapt(reference.blocks[1], shard=False)  # type: ignore[arg-type]

    compare_steps(model, reference, 3, lr=0.1)
    assert_same_values(model, reference, 1e-5)  # the adapters make values of order 10

    merge(model.blocks[1])  # type: ignore[arg-type]
    merge(reference.blocks[1])  # type: ignore[arg-type]
    model.requires_grad_(True)
    reference.requires_grad_(True)
    compare_steps(model, reference, 2, lr=0.1)
    assert_same_values(model, reference, 1e-5)


def test_an_adapter_may_be_put_around_a_layer_and_merged_between_steps(
    run_on_ranks: RunOnRanks,
) -> None:
    run_on_ranks(adapt_and_merge, 2)


def cast_back_and_forth() -> None:
    net, reference = net_and_reference()
    model = sharded(net)
    for dtype in (torch.bfloat16, torch.float64, torch.float32):
        # Before the cast there is a step, so buffers in the old dtype exist.
        compare_steps(model, reference, 1, lr=0.1)
        model.to(dtype)
        reference.to(dtype)
        if dtype is torch.bfloat16:
            model.to(torch.float32)
            reference.to(torch.float32)
    compare_steps(model, reference, 1, lr=0.1)
    assert all(param.dtype is torch.float32 for param in model.parameters())
    assert_same_values(model, reference)


def test_a_model_may_be_cast_between_steps(run_on_ranks: RunOnRanks) -> None:
    run_on_ranks(cast_back_and_forth, 2)


# --- evaluated between steps -----------------------------------------------------------


def evaluate(context: Callable[[], Any]) -> None:
    net, reference = net_and_reference()
    model = sharded(net)
    for step in range(3):
        compare_steps(model, reference, 1, lr=0.1)
        model.eval()
        with context():
            out, expected = model(own(batches(step))), reference(own(batches(step)))
        model.train()
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    assert_same_values(model, reference)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_a_model_may_be_evaluated_between_steps(
    run_on_ranks: RunOnRanks, context: Callable[[], Any]
) -> None:
    run_on_ranks(evaluate, 2, context)


# --- exceptions ------------------------------------------------------------------------


def raise_in_the_second_micro_batch(where: str, sync: bool) -> None:
    net, reference = net_and_reference()
    breaks = Breaks()
    breaks.load_state_dict(net.blocks[1].state_dict())
    net.blocks[1] = breaks
    model: Any = sharded(net)

    def micro_batch(step: int, number: int, of: int) -> None:
        model.set_requires_gradient_sync(sync or number == of - 1)
        backward(loss_of(model, own(batches(10 * step + number))))

    for number in range(2):
        micro_batch(0, number, 2)
    model.zero_grad()
    micro_batch(1, 0, 3)
    breaks.where = where
    with pytest.raises(MemoryError, match=f"no room in {where}"):
        micro_batch(1, 1, 3)
    breaks.where = "nowhere"

    model.zero_grad()
    for number in range(3):
        micro_batch(2, number, 3)

    for number in range(3):
        mean_backward(reference, batches(20 + number))
    assert_same_gradients(model, reference, 3 * FP32)


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("sync", [True, False])
def test_after_an_exception_in_a_later_micro_batch_a_retry_has_the_right_gradients(
    run_on_ranks: RunOnRanks, where: str, sync: bool
) -> None:
    run_on_ranks(raise_in_the_second_micro_batch, 2, where, sync)


class Trips(Net):
    """Raises once, at a place that is not inside a block's own forward or backward."""

    where = "nowhere"
    recomputes = False

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for number, block in enumerate(self.blocks):
            self.trip(f"between blocks {number}")
            x = checkpoint(partial(self.run, number, block), x, use_reentrant=False)
        self.trip("after the blocks")
        logits: Tensor = self.head(x * self.scale)
        return logits

    def run(self, number: int, block: nn.Module, x: Tensor) -> Tensor:
        if self.recomputes:
            self.trip(f"recomputing {number}")
        out: Tensor = block(x)
        return out

    def trip(self, where: str) -> None:
        if self.where == where:
            self.where = "nowhere"
            raise KeyboardInterrupt if where == "between blocks 1" else MemoryError


def trip_and_retry(where: str) -> None:
    torch.manual_seed(0)
    net = Trips()
    _, reference = net_and_reference()
    model: Any = sharded(net)
    if where == "hook of a gradient":
        model.blocks[1].up.weight.register_hook(lambda grad: net.trip(where))
    if where == "hook after a gradient":
        model.blocks[1].up.weight.register_post_accumulate_grad_hook(lambda p: net.trip(where))

    def micro_batch(step: int) -> None:
        net.recomputes = False
        loss = loss_of(model, own(batches(step)))
        net.recomputes = True
        backward(loss)

    for round_ in range(2):
        net.where = where
        with pytest.raises((MemoryError, KeyboardInterrupt)):
            micro_batch(5)

        model.zero_grad()
        reference.zero_grad()
        for step in (round_, round_ + 1):
            micro_batch(step)
            mean_backward(reference, batches(step))
        assert_same_gradients(model, reference, 2 * FP32)


@pytest.mark.parametrize(
    "where",
    [
        "between blocks 1",
        "after the blocks",
        "recomputing 1",
        "hook of a gradient",
        "hook after a gradient",
    ],
)
def test_wherever_a_step_raises_a_retry_has_the_right_gradients(
    run_on_ranks: RunOnRanks, where: str
) -> None:
    run_on_ranks(trip_and_retry, 2, where)


# --- containers ------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: Tensor
    note: str


@dataclasses.dataclass
class Open:
    x: Tensor
    more: list[Tensor]


class Pair(NamedTuple):
    x: Tensor
    indices: Tensor


class Attributes(dict[str, Any]):
    """Items as attributes."""

    def __getattr__(self, name: str) -> Any:
        return self[name]


@dataclasses.dataclass
class Output(OrderedDict[str, Any]):
    """Fields that are items too, those that are None left out, as outputs of transformers."""

    x: Tensor | None = None
    hidden: tuple[Tensor, ...] | None = None
    loss: Tensor | None = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is not None:
                super().__setitem__(field.name, value)


CONTAINERS: dict[str, Callable[[Tensor], Any]] = {
    "frozen dataclass": lambda x: Frozen(x, "kept"),
    "dataclass": lambda x: Open(x, [x, x * 2]),
    "namedtuple": lambda x: Pair(x, torch.arange(3)),
    "dict subclass": lambda x: Attributes(x=x, name="kept"),
    "output of transformers": lambda x: Output(x, hidden=(x, x)),
}


class Contained(Block):
    """Takes a container and returns one of the same type."""

    kind = ""
    seen: list[torch.dtype]

    def forward(self, batch: Any) -> Any:
        self.__dict__["seen"] = [batch.x.dtype]
        return CONTAINERS[self.kind](super().forward(batch.x))


def pass_containers(kind: str) -> None:
    torch.manual_seed(0)
    reference = nn.Sequential(Contained(), Contained()).double()
    model = copy.deepcopy(reference).float()
    policy = MixedPrecisionPolicy(param_dtype=torch.float64, output_dtype=torch.float32)
    for block in (*model, *reference):
        block.kind = kind
    for block in model:
        fully_shard(block, mp_policy=policy)
    fully_shard(model)
    xs = [torch.full((2, 7), 0.1 * (rank + 1)) for rank in range(dist.get_world_size())]
    given = CONTAINERS[kind](own(xs))

    for _ in range(2):
        model.zero_grad()
        reference.zero_grad()
        out = model(given)
        backward(out.x.square().sum())
        losses = [reference(CONTAINERS[kind](x.double())).x.square().sum() for x in xs]
        backward(torch.stack(losses).mean())

        assert type(out) is type(given)
        assert out.x.dtype is torch.float32
        assert model[0].seen == model[1].seen == [torch.float64]
        assert given.x.dtype is torch.float32  # the caller's own is not changed
        if isinstance(out, Output):
            assert out["x"] is out.x
            assert "loss" not in out
        for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            # Between the blocks values are rounded to fp32; gradients are of order 10.
            assert theirs.grad is not None
            torch.testing.assert_close(whole(ours.grad), theirs.grad.float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", CONTAINERS)
def test_any_container_is_cast_and_returned_as_its_own_type(
    run_on_ranks: RunOnRanks, kind: str
) -> None:
    run_on_ranks(pass_containers, 2, kind)


# --- torch.func ------------------------------------------------------------------------


def small_pair() -> tuple[nn.Sequential, nn.Sequential]:
    torch.manual_seed(0)
    reference = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
    model = copy.deepcopy(reference)
    fully_shard(model[0])
    return fully_shard(model), reference


def by_vmap(model: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = torch.func.vmap(model)(x)
    return out.square().sum()


def by_grad(model: nn.Module, x: Tensor) -> Tensor:
    slope: Tensor = torch.func.grad(lambda y: model(y).square().sum())(x)
    return slope.square().sum()


def by_jacrev(model: nn.Module, x: Tensor) -> Tensor:
    jacobian: Tensor = torch.func.jacrev(model)(x)
    return jacobian.square().sum()


def transform(function: Callable[[nn.Module, Tensor], Tensor], trains: bool) -> None:
    model, reference = small_pair()
    xs = [torch.full((3, 4), 0.1 * (rank + 1)) for rank in range(dist.get_world_size())]
    for _ in range(2):
        model.zero_grad()
        reference.zero_grad()
        value = function(model, own(xs))
        expected = torch.stack([function(reference, x) for x in xs])
        torch.testing.assert_close(value, expected[dist.get_rank()], rtol=FP32, atol=FP32)
        if trains:
            backward(value)
            backward(expected.mean())
            assert_same_gradients(model, reference, 1e-5)


@pytest.mark.parametrize("function", [by_vmap, by_grad, by_jacrev])
@pytest.mark.parametrize("trains", [False, True])
def test_transforms_of_torch_func_give_the_values_and_gradients_of_the_whole_model(
    run_on_ranks: RunOnRanks, function: Callable[[nn.Module, Tensor], Tensor], trains: bool
) -> None:
    run_on_ranks(transform, 2, function, trains)

"""A wrapped model that is compiled, in each of the ways that programs do it, trains as before."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from trine.distributed.fsdp import (
    CPUOffload,
    FullyShardedDataParallel,
    MixedPrecision,
    ShardingStrategy,
)
from trine.distributed.fsdp.wrap import ModuleWrapPolicy

RunOnRanks = Callable[..., list[Any]]

# fp32: means over ranks instead of over one batch, for three steps; bf16: of order 1, rounded.
FP32, BF16 = 1e-5, 2**-6


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(5, 7)
        self.down = nn.Linear(7, 5)
        self.register_buffer("shift", torch.full((5,), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(torch.tanh(self.up(x))) + self.shift.to(x.dtype)
        return out


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), Block(), Block(), nn.Linear(5, 1))


def wrapped(model: nn.Module, options: dict[str, Any]) -> nn.Module:
    policy = ModuleWrapPolicy({Block})
    return FullyShardedDataParallel(
        model, auto_wrap_policy=policy, device_id=torch.device("cpu"), **options
    )


def in_place(model: nn.Sequential, options: dict[str, Any]) -> nn.Module:
    model = wrapped(model, options)  # type: ignore[assignment]
    model.compile(backend="aot_eager")
    return model


def around(model: nn.Sequential, options: dict[str, Any]) -> nn.Module:
    return torch.compile(wrapped(model, options), backend="aot_eager")  # type: ignore[return-value]


def blocks_of_wrapped(model: nn.Sequential, options: dict[str, Any]) -> nn.Module:
    made = wrapped(model, options)
    for module in made.modules():
        if isinstance(module, Block):
            module.compile(backend="aot_eager")
    return made


def wrappers_of_blocks(model: nn.Sequential, options: dict[str, Any]) -> nn.Module:
    made = wrapped(model, options)
    for module in FullyShardedDataParallel.fsdp_modules(made):
        module.compile(backend="aot_eager")
    return made


def before_it_is_wrapped(model: nn.Sequential, options: dict[str, Any]) -> nn.Module:
    options = {"device_id": torch.device("cpu"), **options}
    for position in (1, 2):
        compiled = torch.compile(model[position], backend="aot_eager")
        model[position] = FullyShardedDataParallel(compiled, **options)  # type: ignore[arg-type]
    return FullyShardedDataParallel(model, **options)


def checkpointed(model: nn.Sequential, options: dict[str, Any]) -> nn.Module:
    for position in (1, 2):
        model[position] = checkpoint_wrapper(model[position])
    return in_place(model, options)


def batches(step: int) -> list[Tensor]:
    ranks = dist.get_world_size()
    seeds = range(step * ranks, (step + 1) * ranks)
    return [torch.randn(4, 3, generator=torch.Generator().manual_seed(seed)) for seed in seeds]


def backward(loss: Tensor) -> None:
    loss.backward()  # type: ignore[no-untyped-call]  # torch's own


def train(compiled: Callable[..., nn.Module], options: dict[str, Any], tolerance: float) -> None:
    model, reference = net(), net()
    model = compiled(model, options)  # type: ignore[assignment]
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, reference)]
    for step in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        xs = batches(step)
        backward(model(xs[dist.get_rank()]).float().square().mean())
        backward(torch.stack([reference(x).square().mean() for x in xs]).mean())
        for optimizer in optimizers:
            optimizer.step()
    with torch.no_grad():
        x = batches(9)[0]
        close: Any = torch.testing.assert_close
        close(model(x).float(), reference(x), rtol=tolerance, atol=tolerance)
    with FullyShardedDataParallel.summon_full_params(model):
        for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


WAYS = [
    in_place,
    around,
    blocks_of_wrapped,
    wrappers_of_blocks,
    before_it_is_wrapped,
    checkpointed,
]
HALF: dict[str, Any] = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}


@pytest.mark.timeout(300)  # compiling
@pytest.mark.parametrize("way", WAYS)
def test_compiled_models_train_like_unsharded_ones(
    run_on_ranks: RunOnRanks, way: Callable[..., nn.Module]
) -> None:
    run_on_ranks(train_with_all_options, 2, way, timeout_s=250)


def train_with_all_options(way: Callable[..., nn.Module]) -> None:
    train(way, {}, FP32)
    train(way, {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP}, FP32)
    train(way, {"cpu_offload": CPUOffload(offload_params=True)}, FP32)
    train(way, {"mixed_precision": MixedPrecision(**HALF)}, BF16)
    train(way, {"mixed_precision": MixedPrecision(**HALF, buffer_dtype=torch.bfloat16)}, BF16)


def save_between() -> None:
    model, reference = net(), net()
    keys = list(reference.state_dict())
    model = in_place(model, {})  # type: ignore[assignment]
    assert list(model.state_dict()) == keys  # before it was ever called
    values = copy.deepcopy(model.state_dict())
    backward(model(batches(0)[dist.get_rank()]).square().mean())
    model.load_state_dict(values)
    for key, value in reference.state_dict().items():
        torch.testing.assert_close(values[key], value, rtol=0, atol=0)


def test_compiled_models_are_saved_like_others(run_on_ranks: RunOnRanks) -> None:
    run_on_ranks(save_between, 2)

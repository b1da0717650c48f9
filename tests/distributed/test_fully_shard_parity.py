"""Ours and torch's FSDP2 in one job: equal losses and gradients over ten AdamW steps."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import fsdp as torch_fsdp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from trine.distributed import fsdp

RunOnRanks = Callable[..., list[Any]]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(6), nn.Linear(6, 10), nn.Linear(10, 6)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(nn.functional.gelu(self.up(self.norm(x))))
        return out


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(13, 6), Block(), Block(), nn.Linear(6, 13))


def train_both(api_options: dict[str, Any], policy: dict[str, Any], tolerance: float) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    models = []
    for api in (fsdp, torch_fsdp):
        model = copy.deepcopy(build())
        options = {
            "mesh": mesh,
            "mp_policy": api.MixedPrecisionPolicy(**policy),
            **api_options,
        }
        for block in (model[1], model[2]):
            api.fully_shard(block, **options)
        models.append(api.fully_shard(model, **options))
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in models]
    for step in range(10):
        seed = 10 * step + dist.get_rank()
        tokens = torch.randint(13, (3, 5), generator=torch.Generator().manual_seed(seed))
        losses = []
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            out = model(tokens).float()
            loss = nn.functional.cross_entropy(out.flatten(0, 1), tokens.roll(1).flatten())
            loss.backward()  # type: ignore[no-untyped-call]  # torch's own
            losses.append(loss.item())
        assert losses[0] == pytest.approx(losses[1], abs=tolerance)
        for (name, ours), theirs in zip(
            models[0].named_parameters(), models[1].parameters(), strict=True
        ):
            assert isinstance(ours.grad, DTensor)
            assert isinstance(theirs.grad, DTensor)
            assert ours.grad.placements == theirs.grad.placements
            assert ours.dtype is theirs.dtype
            torch.testing.assert_close(
                ours.grad.to_local(),
                theirs.grad.to_local(),
                rtol=tolerance,
                atol=tolerance,
                msg=f"step {step}, gradient of {name}: {ours.grad} and {theirs.grad}",
            )
        for optimizer in optimizers:
            optimizer.step()


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("reshard_after_forward", [True, False, None])
def test_fp32_training_equals_torch(
    run_on_ranks: RunOnRanks, world_size: int, reshard_after_forward: bool | None
) -> None:
    run_on_ranks(train_both, world_size, {"reshard_after_forward": reshard_after_forward}, {}, 1e-6)


@pytest.mark.parametrize(
    "policy",
    [
        {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32},
        {"param_dtype": torch.bfloat16},
        {"reduce_dtype": torch.float64},
    ],
)
def test_mixed_precision_training_stays_close_to_torch(
    run_on_ranks: RunOnRanks, policy: dict[str, Any]
) -> None:
    # Both round to bf16 (2**-8) at the same places, except that we sum in fp32 where torch
    # sums in bf16; AdamW turns the difference of small gradients into one of whole steps.
    tolerance = 5e-2 if "param_dtype" in policy else 1e-6
    run_on_ranks(train_both, 2, {}, policy, tolerance)

"""What is saved over one backend is loaded over another; see also test_mpi for equal losses."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor

from trine.distributed.checkpoint import load_checkpoint, save_checkpoint
from trine.distributed.fsdp import fully_shard
from trine.distributed.testing import run_on_ranks

pytestmark = pytest.mark.skipif(
    os.environ.get("TRINE_TEST_BACKEND") != "mpi", reason="needs mpi4py and an MPI library"
)


def unsharded(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 17), nn.Tanh(), nn.Linear(17, 5))


def sharded(seed: int) -> tuple[nn.Sequential, torch.optim.AdamW]:
    model = unsharded(seed)
    fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    """The same batches on every rank, so that the number of ranks does not matter."""
    losses = []
    for step in range(steps):
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(step))
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def whole(model: nn.Module) -> list[Tensor]:
    tensors = model.state_dict().values()
    return [each.full_tensor() for each in tensors if isinstance(each, DTensor)]


def save(path: str) -> tuple[list[Tensor], list[float]]:
    model, optimizer = sharded(seed=0)
    train(model, optimizer, 3)
    save_checkpoint(path, model, optimizer, extra={"backend": dist.get_backend()})
    saved = [each.clone() for each in whole(model)]
    return saved, train(model, optimizer, 3)


def load(path: str) -> tuple[list[Tensor], list[float], str]:
    model, optimizer = sharded(seed=1)
    extra = load_checkpoint(path, model, optimizer)
    loaded = [each.clone() for each in whole(model)]
    return loaded, train(model, optimizer, 3), extra["backend"]


@pytest.mark.parametrize(("saving", "loading"), [("mpi", "gloo"), ("gloo", "mpi")])
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_checkpoint_of_one_backend_is_continued_on_another(
    tmp_path: Path, saving: str, loading: str, ranks: int
) -> None:
    path = str(tmp_path / "c")
    saved, then = run_on_ranks(save, 2, path, backend=saving)[0]

    for loaded, losses, name in run_on_ranks(load, ranks, path, backend=loading):
        assert name == {"mpi": "mpi4py", "gloo": "gloo"}[saving]
        assert all(map(torch.equal, loaded, saved))
        # The mean of equal gradients over 3 ranks is rounded, over 2 it is not.
        torch.testing.assert_close(losses, then, rtol=0 if ranks == 2 else 1e-4, atol=0)


def save_with_torch(path: str) -> None:
    model, optimizer = sharded(seed=0)
    train(model, optimizer, 3)
    values, moments = get_state_dict(model, optimizer)
    state_dict_saver.save({"model": values, "optimizer": moments}, checkpoint_id=path)


def load_with_torch(path: str) -> list[float]:
    model, optimizer = sharded(seed=1)
    values, moments = get_state_dict(model, optimizer)
    state: dict[str, Any] = {"model": values, "optimizer": moments}
    state_dict_loader.load(state, checkpoint_id=path)
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    return train(model, optimizer, 3)


@pytest.mark.parametrize(("saving", "loading"), [("mpi", "gloo"), ("gloo", "mpi")])
@pytest.mark.parametrize("ranks", [1, 4])
def test_a_checkpoint_of_torch_crosses_backends_too(
    tmp_path: Path, saving: str, loading: str, ranks: int
) -> None:
    path = str(tmp_path / "c")
    run_on_ranks(save_with_torch, 2, path, backend=saving)

    found = run_on_ranks(load_with_torch, ranks, path, backend=loading)

    model = unsharded(seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    train(model, optimizer, 3)
    expected = train(model, optimizer, 3)
    for losses in found:
        torch.testing.assert_close(losses, expected)

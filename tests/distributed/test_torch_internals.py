"""The engine without the private names of torch that it uses: slower, and as right."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from trine.distributed._fsdp import grads, param, torch_internals
from trine.distributed.fsdp import fully_shard

RunOnRanks = Callable[..., list[Any]]


def hide(name: str) -> None:
    if name == "_local_tensor":
        for module in (param, grads):
            module.local_tensor = lambda tensor: tensor.to_local().detach()  # type: ignore[attr-defined]
        param.set_local_tensor = lambda tensor, local: False  # type: ignore[attr-defined]
    elif name == "_chunk_cat":
        del torch._chunk_cat
    elif name == "get_group_store":
        del dist.ProcessGroup.get_group_store
    else:
        delattr(torch._C, name)


def train_without(name: str) -> None:
    hide(name)
    torch.manual_seed(0)
    reference = nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 1))
    model = copy.deepcopy(reference)
    fully_shard(model[0])
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    reference_optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-2)
    for step in range(4):
        xs = [
            torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * step + rank))
            for rank in range(dist.get_world_size())
        ]
        optimizer.zero_grad()
        reference_optimizer.zero_grad()
        model(xs[dist.get_rank()]).square().mean().backward()
        torch.stack([reference(x).square().mean() for x in xs]).mean().backward()  # type: ignore[no-untyped-call]
        for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            assert isinstance(ours.grad, DTensor)
            torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad, rtol=1e-5, atol=1e-6)
        optimizer.step()
        reference_optimizer.step()


@pytest.mark.parametrize(
    "name",
    [
        "_local_tensor",
        "_chunk_cat",
        "_storage_Use_Count",
        "_current_graph_task_id",
        "get_group_store",
    ],
)
def test_training_is_right_without(run_on_ranks: RunOnRanks, name: str) -> None:
    run_on_ranks(train_without, 2, name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rows", [0, 1, 4, 5, 6, 7])
def test_chunk_cat_lays_equal_chunks_of_each_tensor_side_by_side(
    dtype: torch.dtype, rows: int
) -> None:
    tensors = [torch.arange(float(rows * 2)).view(rows, 2) + 1, torch.arange(7.0) + 100]
    chunk = -(-rows // 3)
    out = torch.zeros(3, chunk * 2 + 3, dtype=dtype)  # the fallback where dtypes differ

    torch_internals.chunk_cat(tensors, 3, out)

    for rank, (first, second) in enumerate(
        zip(
            [tensors[0][rank * chunk : (rank + 1) * chunk] for rank in range(3)],
            [tensors[1][rank * 3 : (rank + 1) * 3] for rank in range(3)],
            strict=True,
        )
    ):
        assert out[rank, : first.numel()].tolist() == first.flatten().tolist()
        assert out[rank, chunk * 2 : chunk * 2 + second.numel()].tolist() == second.tolist()


def test_chunk_cat_passes_over_tensors_without_columns() -> None:
    out = torch.zeros(2, 2)

    torch_internals.chunk_cat([torch.zeros(5, 0), torch.tensor([1.0, 2, 3])], 2, out)

    assert out.flatten()[:3].tolist() == [1, 2, 3]


def test_only_one_module_of_the_engine_touches_private_names_of_torch() -> None:
    folder = Path(torch_internals.__file__).parent
    private = re.compile(r"\btorch(\.\w+)*\._|\._local_tensor|\._parameters|_execution_engine")
    for file in folder.glob("*.py"):
        if file.name != "torch_internals.py":
            code = [line.split("#")[0] for line in file.read_text().splitlines()]
            found = [line for line in code if private.search(line)]
            assert not found, f"{file.name}: {found}"

"""Our FullyShardedDataParallel, torch's, and one process, on the same data, over a grid.

Torch's is the reference where it works on a CPU, one process where it does not and where precision
is full: the mean over ranks of what each computes is the gradient of the mean loss. Every run
trains cells in which each pair of settings meets, `pytest -m grid` those in which each triple does.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import fsdp as torch_fsdp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import wrap as torch_wrap

from tests.distributed.grid import covering
from tests.distributed.training import Block
from trine.distributed import fsdp
from trine.distributed.fsdp import wrap

RunOnRanks = Callable[..., list[Any]]
Cell = Mapping[str, str]

STEPS = 3
MICRO_BATCHES = 2
MAX_NORM = 0.3  # below the norm of these gradients, so that clipping does something
HALF, SINGLE = torch.bfloat16, torch.float32

PRECISIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "bf16": {"param_dtype": HALF},
    "bf16, sums in fp32": {"param_dtype": HALF, "reduce_dtype": SINGLE},
    "bf16 with buffers": {"param_dtype": HALF, "buffer_dtype": HALF, "reduce_dtype": SINGLE},
    "bf16, every input": {"param_dtype": HALF, "cast_forward_inputs": True},
}

AXES = {
    "strategy": tuple(strategy.name for strategy in fsdp.ShardingStrategy),
    "precision": tuple(PRECISIONS),
    "offload": ("no", "yes"),
    "policy": ("none", "classes", "size", "function", "by hand"),
    "backward_prefetch": ("BACKWARD_PRE", "BACKWARD_POST", "none"),
    "forward_prefetch": ("no", "yes"),
    "use_orig_params": ("no", "yes"),
    "accumulation": ("none", "synchronized", "no_sync"),
    "clipping": ("no", "yes"),
}


class Model(nn.Module):
    """Rows of 10, 7, 6 and 1: uneven, and fewer than ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(3, 6)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.register_buffer("shift", torch.full((6,), 0.1))
        self.scale = nn.Parameter(torch.ones(1))
        self.head = nn.Linear(6, 7)

    def forward(self, x: Tensor) -> Tensor:
        h = self.mix(x)
        h = h + self.shift.to(h.dtype)
        for block in self.blocks:
            h = block(h)
        logits: Tensor = self.head(h * self.scale)
        return logits


def policy_of(cell: Cell, api: Any) -> Any:
    return {
        "none": None,
        "classes": api.ModuleWrapPolicy({Block}),
        "size": functools.partial(api.size_based_auto_wrap_policy, min_num_params=60),
        "function": api.CustomPolicy(lambda module: isinstance(module, nn.Linear | Block)),
        "by hand": None,
    }[cell["policy"]]


@cache
def hybrid_mesh() -> Any:
    copies = 2 if dist.get_world_size() % 2 == 0 else 1
    shape = (copies, dist.get_world_size() // copies)
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))


def wrapped(cell: Cell, api: Any, policies: Any) -> Any:
    torch.manual_seed(0)
    model = Model()
    strategy = api.ShardingStrategy[cell["strategy"]]
    precision = PRECISIONS[cell["precision"]]
    options: dict[str, Any] = {
        "sharding_strategy": strategy,
        "device_mesh": hybrid_mesh() if "HYBRID" in cell["strategy"] else None,
        "mixed_precision": api.MixedPrecision(**precision) if precision else None,
        "cpu_offload": api.CPUOffload(offload_params=True) if cell["offload"] == "yes" else None,
        "backward_prefetch": None
        if cell["backward_prefetch"] == "none"
        else api.BackwardPrefetch[cell["backward_prefetch"]],
        "forward_prefetch": cell["forward_prefetch"] == "yes",
        "use_orig_params": cell["use_orig_params"] == "yes",
        "device_id": torch.device("cpu"),
    }
    if cell["policy"] == "by hand":
        for position, block in enumerate(model.blocks):
            model.blocks[position] = api.FullyShardedDataParallel(block, **options)
    return api.FullyShardedDataParallel(
        model, auto_wrap_policy=policy_of(cell, policies), **options
    )


def batch(step: int, micro: int, rank: int) -> tuple[Tensor, Tensor]:
    seed = (step * MICRO_BATCHES + micro) * dist.get_world_size() + rank
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(4, 3, generator=generator),
        torch.randint(7, (4,), generator=generator),
    )


def loss_of(model: nn.Module, step: int, micro: int, rank: int) -> Tensor:
    x, wanted = batch(step, micro, rank)
    return nn.functional.cross_entropy(model(x).float(), wanted)


def micro_batches(cell: Cell) -> int:
    return 1 if cell["accumulation"] == "none" else MICRO_BATCHES


def train(cell: Cell, model: Any) -> list[float]:
    """Losses of all micro-batches, in order; the model is trained afterwards."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=0.1)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        for micro in range(micro_batches(cell)):
            last = micro == micro_batches(cell) - 1
            keeps = cell["accumulation"] == "no_sync" and not last
            with model.no_sync() if keeps else nullcontext():
                loss = loss_of(model, step, micro, dist.get_rank())
                loss.backward()  # type: ignore[no-untyped-call]  # torch's own
            losses.append(loss.item())
        if cell["clipping"] == "yes":
            losses.append(model.clip_grad_norm_(MAX_NORM).item())
        optimizer.step()
    return losses


def train_one_process(cell: Cell) -> tuple[list[float], dict[str, Tensor]]:
    """The same in this process alone, on the batches of all ranks; losses are this rank's."""
    torch.manual_seed(0)
    model, ranks = Model(), range(dist.get_world_size())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=0.1)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        for micro in range(micro_batches(cell)):
            each = [loss_of(model, step, micro, rank) for rank in ranks]
            torch.stack(each).mean().backward()  # type: ignore[no-untyped-call]  # torch's own
            losses.append(each[dist.get_rank()].item())
        if cell["clipping"] == "yes":
            norm = nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
            losses.append(norm.item())
        optimizer.step()
    return losses, {name: value.detach() for name, value in model.state_dict().items()}


def torch_can(cell: Cell) -> bool:
    """Whether torch's wrapper trains this cell on a CPU, and rightly."""
    if cell["offload"] == "yes":  # it copies gradients to a device that is not there
        return False
    if "HYBRID" not in cell["strategy"]:
        return True
    # Over copies it adds up again what an earlier micro-batch of this step has added up, and
    # copies that are not cut (2 ranks, both copies) each keep their own gradients.
    return cell["accumulation"] != "synchronized" and dist.get_world_size() != 2


def check_cells(cells: list[Cell]) -> None:
    for cell in cells:
        try:
            check_cell(cell)
        except Exception as error:
            error.add_note(f"In the cell {cell}.")
            raise


def check_cell(cell: Cell) -> None:
    ours = wrapped(cell, fsdp, wrap)
    losses = train(cell, ours)
    values = ours.state_dict()
    # Half types are rounded, and torch adds them up in that type, we in fp32; values are of
    # order 1. In fp32 sums are in another order, before three steps that are smooth in them.
    tolerance = 2**-6 if PRECISIONS[cell["precision"]] else 1e-5
    if not PRECISIONS[cell["precision"]] or not torch_can(cell):
        expected, reference = train_one_process(cell)
        assert losses == pytest.approx(expected, rel=tolerance, abs=tolerance)
        assert_same(values, reference, tolerance)
    if torch_can(cell):
        theirs = wrapped(cell, torch_fsdp, torch_wrap)
        expected = train(cell, theirs)
        assert losses == pytest.approx(expected, rel=tolerance, abs=tolerance)
        assert_same(values, theirs.state_dict(), tolerance)


def assert_same(ours: dict[str, Tensor], reference: dict[str, Tensor], tolerance: float) -> None:
    assert list(ours) == list(reference)
    for name, value in ours.items():
        expected = reference[name]
        torch.testing.assert_close(
            value, expected, rtol=tolerance, atol=tolerance, msg=f"{name}: {value}, not {expected}"
        )


@cache
def chosen(strength: int) -> list[dict[str, str]]:
    return covering(AXES, strength)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("strength", [2, pytest.param(3, marks=pytest.mark.grid)])
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore::FutureWarning")  # torch's own, of its wrapper
def test_training_equals_that_of_torch_and_of_one_process(
    run_on_ranks: RunOnRanks, world_size: int, strength: int
) -> None:
    # Every size trains a part of the cells, and each part is another one.
    cells = chosen(strength)[world_size - 1 :: 4]

    run_on_ranks(check_cells, world_size, cells, timeout_s=500)

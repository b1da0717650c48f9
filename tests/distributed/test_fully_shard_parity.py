"""Ours and torch's FSDP2 in the same ranks, on the same data, over a grid of settings.

Where both add up the same numbers in the same way they must agree to the last bit; see
`tolerance_of` for where they cannot. Every run trains the cells in which each pair of settings
meets; `pytest -m grid` (`nox -s tests_grid`) those in which each triple does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from math import prod
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import fsdp as torch_fsdp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from tests.distributed.grid import covering
from tests.distributed.training import Block
from trine.distributed import fsdp

RunOnRanks = Callable[..., list[Any]]
Cell = Mapping[str, str]

STEPS = 3
MAX_NORM = 0.3  # below the norm of these gradients, so that clipping does something


@dataclass(frozen=True)
class Mesh:
    """The ranks as our call gets them, and the mesh that says the same to torch.

    Attributes:
        axes: of our mesh, by name; on torch's too, unless it has others.
        dims: for `dp_mesh_dims`, which torch takes for parameters that are DTensors only.
        theirs: ranks of torch's mesh, where it differs.
    """

    axes: dict[str, int]
    dims: dict[str, Any] = field(default_factory=dict)
    theirs: list[Any] | None = None

    @property
    def size(self) -> int:
        return prod(self.axes.values())

    @property
    def copies(self) -> int:
        return self._size(self.dims.get("replicate", "replicate" if not self.dims else ()))

    @property
    def shards(self) -> int:
        return self._size(self.dims.get("shard", "shard" if not self.dims else ()))

    def _size(self, names: str | tuple[str, ...]) -> int:
        return prod(self.axes.get(n, 1) for n in ((names,) if isinstance(names, str) else names))


MESHES = {
    "1": Mesh({"shard": 1}),
    "1 x 1": Mesh({"replicate": 1, "shard": 1}),
    "2": Mesh({"shard": 2}),
    "1 x 2": Mesh({"replicate": 1, "shard": 2}),
    "2 x 1": Mesh({"replicate": 2, "shard": 1}),
    "2 copies": Mesh({"copies": 2}, {"replicate": "copies"}, [[0], [1]]),
    "3": Mesh({"shard": 3}),
    "3 x 1": Mesh({"replicate": 3, "shard": 1}),
    "4": Mesh({"shard": 4}),
    "2 x 2": Mesh({"replicate": 2, "shard": 2}),
    "4 x 1": Mesh({"replicate": 4, "shard": 1}),
    "shard first": Mesh({"s": 2, "r": 2}, {"shard": "s", "replicate": "r"}, [[0, 2], [1, 3]]),
    "two as one": Mesh({"a": 2, "b": 2}, {"shard": ("a", "b")}, [0, 1, 2, 3]),
}


@dataclass(frozen=True)
class Precision:
    """Dtypes of a cell.

    Attributes:
        stored: of the parameters.
        policy: for `MixedPrecisionPolicy`.
    """

    stored: torch.dtype
    policy: dict[str, Any] = field(default_factory=dict)

    @property
    def reduced(self) -> torch.dtype:
        default = self.policy.get("param_dtype", self.stored)
        dtype: torch.dtype = self.policy.get("reduce_dtype", default)
        return dtype


HALF, SINGLE = torch.bfloat16, torch.float32
PRECISIONS = {
    "fp32": Precision(SINGLE),
    "fp32, sums in fp64": Precision(SINGLE, {"reduce_dtype": torch.float64}),
    "bf16 parameters": Precision(HALF),
    "bf16 parameters, sums in fp32": Precision(HALF, {"reduce_dtype": SINGLE}),
    "bf16": Precision(SINGLE, {"param_dtype": HALF}),
    "bf16, sums and outputs in fp32": Precision(
        SINGLE, {"param_dtype": HALF, "reduce_dtype": SINGLE, "output_dtype": SINGLE}
    ),
    "bf16, inputs as they are": Precision(
        SINGLE, {"param_dtype": HALF, "reduce_dtype": SINGLE, "cast_forward_inputs": False}
    ),
}

# With a large eps a step is a smooth function of the gradients. The usual one makes a step of
# +lr or -lr of a gradient near 0, whichever way it was rounded.
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2, eps=0.1, foreach=False),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, eps=0.1, foreach=True),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=1e-2, eps=0.1, fused=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2, eps=0.1),
}

AXES = {
    "mesh": tuple(MESHES),
    "precision": tuple(PRECISIONS),
    "reshard_after_forward": ("True", "False", "None", "2 of 4"),
    "accumulation": ("none", "synchronized", "kept on the rank"),
    "optimizer": tuple(OPTIMIZERS),
    "clipping": ("none", "by torch", "by ours"),
}


class Model(nn.Module):
    """Rows of 13, 10, 6 and 1: uneven, and fewer than ranks. One parameter is frozen."""

    def __init__(self, casts: bool) -> None:
        super().__init__()
        self.casts = casts  # itself, because the engine is told not to
        self.embedding, self.mix = nn.Embedding(13, 6), nn.Linear(3, 6)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.scale = nn.Parameter(torch.ones(1))
        self.head = nn.Linear(6, 13)
        self.head.bias.requires_grad_(False)

    def forward(self, tokens: Tensor, x: Tensor) -> Tensor:
        if self.casts:
            x = x.to(self.mix.weight.dtype)
        h = self.embedding(tokens) + self.mix(x)
        for block in self.blocks:
            h = block(h)
        logits: Tensor = self.head(h * self.scale)
        return logits


@cache
def meshes_of(name: str) -> tuple[DeviceMesh, DeviceMesh]:
    """Our mesh and torch's. Made once: each makes process groups."""
    mesh = MESHES[name]
    ours = init_device_mesh("cpu", tuple(mesh.axes.values()), mesh_dim_names=tuple(mesh.axes))
    if mesh.theirs is None:
        return ours, ours
    names = ("replicate", "shard") if isinstance(mesh.theirs[0], list) else ("shard",)
    return ours, DeviceMesh("cpu", mesh.theirs, mesh_dim_names=names)


def tolerance_of(cell: Cell) -> float:
    """How far the engines may be apart; 0 where the arithmetic leaves no choice."""
    mesh, precision = MESHES[cell["mesh"]], PRECISIONS[cell["precision"]]
    # Torch adds up half types in that type, we in fp32: over two ranks one rounding less, unless
    # the parameters' own dtype makes it, or the dtype in which the sums go to other copies.
    rounds_less = precision.reduced is HALF and precision.stored is not HALF and mesh.copies == 1
    # Sums of more than two numbers depend on their order.
    in_another_order = max(mesh.shards, mesh.copies) > 2
    exact = not (rounds_less and mesh.shards > 1) and not in_another_order
    if exact and cell["clipping"] != "by ours":  # ours adds up the norm in another order
        return 0.0
    # Values are of order 1, and so is what optimizers make of a difference in STEPS steps.
    return 2**-6 if HALF in (precision.reduced, precision.stored) else 1e-6


def train_both(cells: list[Cell]) -> None:
    for cell in cells:
        try:
            train_cell(cell)
        except Exception as error:
            error.add_note(f"In the cell {cell}.")
            raise


def train_cell(cell: Cell) -> None:
    tolerance = tolerance_of(cell)
    ours, theirs = shard(cell, fsdp), shard(cell, torch_fsdp)
    optimizers = [OPTIMIZERS[cell["optimizer"]](model.parameters()) for model in (ours, theirs)]
    for step in range(STEPS):
        for optimizer in optimizers:
            optimizer.zero_grad()
        losses = [backward(model, cell, step) for model in (ours, theirs)]
        assert losses[0] == pytest.approx(losses[1], rel=tolerance, abs=tolerance), f"step {step}"
        assert_same(ours, theirs, tolerance, f"step {step}", gradients=True)
        norms = [clip(model, cell, api) for model, api in ((ours, fsdp), (theirs, torch_fsdp))]
        assert norms[0] == pytest.approx(norms[1], rel=max(tolerance, 1e-6)), f"step {step}"
        for optimizer in optimizers:
            optimizer.step()
        assert_same(ours, theirs, tolerance, f"step {step}", gradients=False)


def reshard_of(cell: Cell) -> bool | int | None:
    """The argument; where there are no 4 ranks to shard over, 2 of them are all, or none."""
    values = {"True": True, "False": False, "None": None}
    if cell["reshard_after_forward"] in values:
        return values[cell["reshard_after_forward"]]
    return 2 if cell["mesh"] == "4" else True


def shard(cell: Cell, api: Any) -> Model:
    precision = PRECISIONS[cell["precision"]]
    torch.manual_seed(0)
    model = Model(casts=not precision.policy.get("cast_forward_inputs", True)).to(precision.stored)
    our_mesh, their_mesh = meshes_of(cell["mesh"])
    policy = api.MixedPrecisionPolicy(**precision.policy)
    options: dict[str, Any] = {
        "mesh": our_mesh if api is fsdp else their_mesh,
        "reshard_after_forward": reshard_of(cell),
    }
    dims = MESHES[cell["mesh"]].dims
    if dims and api is fsdp:
        options["dp_mesh_dims"] = fsdp.DataParallelMeshDims(**dims)
    for block in model.blocks:
        api.fully_shard(block, mp_policy=replace(policy, output_dtype=None), **options)
    sharded: Model = api.fully_shard(model, mp_policy=policy, **options)
    return sharded


def backward(model: Any, cell: Cell, step: int) -> list[float]:
    """Losses of the micro-batches of this rank and step, once their gradients are there."""
    micro_batches = 1 if cell["accumulation"] == "none" else 2
    losses = []
    for micro in range(micro_batches):
        if cell["accumulation"] == "kept on the rank":
            model.set_requires_gradient_sync(micro == micro_batches - 1)
        seed = (step * micro_batches + micro) * dist.get_world_size() + dist.get_rank()
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.randint(13, (3, 5), generator=generator)
        x = torch.randn(3, 5, 3, generator=generator).to(PRECISIONS[cell["precision"]].stored)
        logits = model(tokens, x).float()
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens.roll(1).flatten())
        loss.backward()  # type: ignore[no-untyped-call]  # torch's own
        losses.append(loss.item())
    return losses


def clip(model: nn.Module, cell: Cell, api: Any) -> float:
    if cell["clipping"] == "none":
        return 0.0
    if cell["clipping"] == "by ours" and api is fsdp:
        return fsdp.clip_grad_norm_(model.parameters(), MAX_NORM).item()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
    return (norm.full_tensor() if isinstance(norm, DTensor) else norm).item()


def assert_same(
    ours: nn.Module, theirs: nn.Module, tolerance: float, when: str, *, gradients: bool
) -> None:
    what = "gradient" if gradients else "value"
    for (name, mine), (_, reference) in zip(
        ours.named_parameters(), theirs.named_parameters(), strict=True
    ):
        pair = [local(each.grad if gradients else each.detach()) for each in (mine, reference)]
        assert (pair[0] is None) == (pair[1] is None), f"{when}, gradient of {name}"
        torch.testing.assert_close(
            pair[0],
            pair[1],
            rtol=tolerance,
            atol=tolerance,
            msg=f"{when}, {what} of {name}: {pair[0]}, torch has {pair[1]}",
        )


def local(tensor: Tensor | None) -> Tensor | None:
    """This rank's part. Axes may have other names in torch's mesh, so DTensors are not equal."""
    assert tensor is None or isinstance(tensor, DTensor)
    return None if tensor is None else tensor.to_local()


@cache
def chosen(strength: int) -> list[dict[str, str]]:
    return covering(AXES, strength)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("strength", [2, pytest.param(3, marks=pytest.mark.grid)])
@pytest.mark.timeout(600)
def test_training_equals_that_of_torch_whatever_is_set(
    run_on_ranks: RunOnRanks, world_size: int, strength: int
) -> None:
    cells = [cell for cell in chosen(strength) if MESHES[cell["mesh"]].size == world_size]

    run_on_ranks(train_both, world_size, cells, timeout_s=500)

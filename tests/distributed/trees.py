"""Random models to shard: drawn by hypothesis, sent to the ranks, built there alike.

A tree says everything about a model but its values. All its modules map width to width, so any
of them can stand anywhere. Values are doubles: what the engine gets wrong is larger than what
rounding does.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from trine.distributed.fsdp import fully_shard

__all__ = ["Branch", "Leaf", "Tree", "build", "shard", "trees"]

WIDTH = 4


@dataclass(frozen=True)
class Leaf:
    """A module with parameters of its own.

    Attributes:
        kind: which; see `_LEAVES`.
        rows: of its parameters where the kind leaves that open: 1 is fewer than ranks.
        frozen: whether its parameters need no gradients.
        sharded: whether `fully_shard` is called on it.
    """

    kind: str
    rows: int
    frozen: bool
    sharded: bool


@dataclass(frozen=True)
class Branch:
    """A module that runs its children one after the other.

    Attributes:
        children: at least one.
        again: whether the first of them runs a second time.
        skipped_in: the step in which the last of them is left out, on all ranks; -1 for none.
        checkpointed: "no", "reentrant" or "plain": how children are recomputed.
        residual: whether its input is added.
        sharded: whether `fully_shard` is called on it.
    """

    children: tuple[Leaf | Branch, ...]
    again: bool
    skipped_in: int
    checkpointed: str
    residual: bool
    sharded: bool


@dataclass(frozen=True)
class Tree:
    """A model and how it is trained.

    Attributes:
        root: always sharded.
        reshard_after_forward: of all units.
        synchronized: whether each of a step's micro-batches reduces its gradients.
        micro_batches: of each step.
    """

    root: Branch
    reshard_after_forward: bool | None
    synchronized: bool
    micro_batches: int

    def size(self) -> int:
        """How much there is to understand in it."""
        return len(repr(self))


leaves = st.builds(
    Leaf,
    kind=st.sampled_from(
        ["linear", "narrow", "scalar", "norm", "tied", "transposed", "empty", "choosy", "unused"]
    ),
    rows=st.integers(1, 5),
    frozen=st.sampled_from([False, False, False, True]),
    sharded=st.booleans(),
)


def branches(children: st.SearchStrategy[Any], max_children: int = 3) -> st.SearchStrategy[Branch]:
    """Branches over such children."""
    return st.builds(
        Branch,
        children=st.lists(children, min_size=1, max_size=max_children).map(tuple),
        again=st.booleans(),
        skipped_in=st.integers(-1, 1),
        checkpointed=st.sampled_from(["no", "no", "reentrant", "plain"]),
        residual=st.booleans(),
        sharded=st.booleans(),
    )


trees = st.builds(
    Tree,
    root=branches(st.recursive(leaves, branches, max_leaves=6)),
    reshard_after_forward=st.sampled_from([None, True, False]),
    synchronized=st.booleans(),
    micro_batches=st.integers(1, 2),
)


class Narrow(nn.Module):
    """Rows as the leaf says: often fewer than ranks."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, rows), nn.Linear(rows, WIDTH, bias=False)

    def forward(self, x: Tensor, rank: int, step: int) -> Tensor:
        out: Tensor = self.down(torch.tanh(self.up(x)))
        return out


class Linear(nn.Module):
    def __init__(self, rows: int) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, rank: int, step: int) -> Tensor:
        out: Tensor = self.linear(x)
        return out


class Scalar(nn.Module):
    """A parameter without dims, and one of one element."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.rand(())), nn.Parameter(torch.rand(1))

    def forward(self, x: Tensor, rank: int, step: int) -> Tensor:
        return x * self.scale + self.shift


class Norm(nn.Module):
    """With a buffer, which is not sharded."""

    counted: Tensor

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.register_buffer("counted", torch.zeros(()))

    def forward(self, x: Tensor, rank: int, step: int) -> Tensor:
        self.counted += 1
        out: Tensor = self.norm(x)
        return out


class Tied(nn.Module):
    """One weight in two places."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor, rank: int, step: int) -> Tensor:
        out: Tensor = self.second(torch.tanh(self.first(x)))
        return out


class Transposed(nn.Module):
    """A weight that is not contiguous."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, rows).t())

    def forward(self, x: Tensor, rank: int, step: int) -> Tensor:
        return x @ self.weight.t() @ self.weight


class Empty(nn.Module):
    """A parameter without elements beside one that has some."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.nothing = nn.Parameter(torch.zeros(0, 3))
        self.shift = nn.Parameter(torch.randn(rows, WIDTH))

    def forward(self, x: Tensor, rank: int, step: int) -> Tensor:
        return x + self.shift.sum(0) + self.nothing.sum()


class Choosy(nn.Module):
    """Which parameter it uses depends on the rank, and on the step."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.even, self.odd = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, rank: int, step: int) -> Tensor:
        out: Tensor = (self.odd if (rank + step) % 2 else self.even)(x)
        return out


class Unused(nn.Module):
    """One of its parameters gets no gradient, ever."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.used, self.never = nn.Parameter(torch.randn(WIDTH)), nn.Linear(rows, rows)

    def forward(self, x: Tensor, rank: int, step: int) -> Tensor:
        return x * self.used


_LEAVES: dict[str, type[nn.Module]] = {
    "linear": Linear,
    "narrow": Narrow,
    "scalar": Scalar,
    "norm": Norm,
    "tied": Tied,
    "transposed": Transposed,
    "empty": Empty,
    "choosy": Choosy,
    "unused": Unused,
}


class Runs(nn.Module):
    """What a `Branch` builds."""

    def __init__(self, branch: Branch) -> None:
        super().__init__()
        self.branch = branch
        self.children_ = nn.ModuleList(_module(child) for child in branch.children)

    def forward(self, x: Tensor, rank: int, step: int) -> Tensor:
        branch, h = self.branch, x
        order = list(self.children_)
        if branch.skipped_in == step and len(order) > 1:
            order.pop()
        if branch.again:
            order.append(order[0])
        for child in order:
            if branch.checkpointed == "no":
                h = child(h, rank, step)
            else:
                h = checkpoint(
                    child, h, rank, step, use_reentrant=branch.checkpointed == "reentrant"
                )
        return x + h if branch.residual else h


def build(tree: Tree) -> nn.Module:
    """The model, unsharded, with the same values on every rank."""
    torch.manual_seed(zlib.crc32(repr(tree).encode()))
    return _module(tree.root).double()


def _module(node: Leaf | Branch) -> nn.Module:
    if isinstance(node, Branch):
        return Runs(node)
    module = _LEAVES[node.kind](node.rows)
    return module.requires_grad_(not node.frozen)


def shard(tree: Tree, model: nn.Module) -> nn.Module:
    """Call `fully_shard` where the tree says, from the leaves up."""

    def visit(node: Leaf | Branch, module: nn.Module) -> None:
        if isinstance(node, Branch):
            assert isinstance(module, Runs)
            for child, below in zip(node.children, module.children_, strict=True):
                visit(child, below)
        if node.sharded or node is tree.root:
            fully_shard(module, reshard_after_forward=tree.reshard_after_forward)

    visit(tree.root, model)
    return model

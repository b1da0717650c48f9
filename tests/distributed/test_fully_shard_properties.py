"""Whatever the model looks like: sharded, it has the losses and gradients of the whole one."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, given, settings
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tests.distributed.trees import WIDTH, Branch, Leaf, Tree, build, shard, trees

RunOnRanks = Callable[..., list[Any]]

STEPS = 3  # the second finds what the first left; in the third everything is used again
# Doubles: sums of some hundred terms in another order, 1e-16 each, which a deep model with large
# gradients multiplies; 1e-10 has been seen. What the engine gets wrong is larger by far.
ROUNDING = 1e-9


def draw(count: int) -> list[Tree]:
    """Trees drawn here, so that all ranks get the same; the same in every run.

    The smallest come first: the first that fails is then easy to look at.
    """
    drawn: list[Tree] = []

    @settings(
        max_examples=count,
        phases=[Phase.generate],
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(trees)
    def note(tree: Tree) -> None:
        drawn.append(tree)

    note()
    return sorted(drawn, key=Tree.size)


def train_all(drawn: list[Tree]) -> None:
    for tree in drawn:
        try:
            train(tree)
        except Exception as error:
            error.add_note(f"With the model {tree}.")
            raise


def train(tree: Tree) -> None:
    reference = build(tree)
    model: Any = shard(tree, copy.deepcopy(reference))
    optimizers = [
        torch.optim.SGD(trained, lr=0.1)
        for each in (model, reference)
        if (trained := [param for param in each.parameters() if param.requires_grad])
    ]
    for step in range(STEPS):
        model.zero_grad()
        reference.zero_grad()
        for micro in range(tree.micro_batches):
            last = micro == tree.micro_batches - 1
            model.set_requires_gradient_sync(last or tree.synchronized)
            compare(model, reference, step, micro)
        assert_same_gradients(model, reference, step)
        for optimizer in optimizers:
            optimizer.step()
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer * dist.get_world_size(), reference.get_buffer(name)), name


def compare(model: nn.Module, reference: nn.Module, step: int, micro: int) -> None:
    """One micro-batch of this rank in `model`, and of all ranks in `reference`."""
    ranks = dist.get_world_size()
    inputs = [input_of(step, micro, rank) for rank in range(ranks)]
    expected = torch.stack([loss_of(reference, x, r, step) for r, x in enumerate(inputs)])
    backward(expected.mean())
    rank = dist.get_rank()
    x = input_of(step, micro, rank)

    loss = loss_of(model, x, rank, step)
    backward(loss)

    torch.testing.assert_close(loss, expected[rank], rtol=ROUNDING, atol=ROUNDING)
    theirs = inputs[rank].grad
    assert theirs is not None
    theirs = theirs * ranks  # of this rank's own loss, not of the mean
    torch.testing.assert_close(x.grad, theirs, rtol=ROUNDING, atol=ROUNDING)


def input_of(step: int, micro: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + 10 * micro + rank)
    x = torch.randn(3, WIDTH, dtype=torch.float64, generator=generator)
    return x.requires_grad_()


def loss_of(model: nn.Module, x: Tensor, rank: int, step: int) -> Tensor:
    out: Tensor = model(x, rank, step)
    return out.tanh().square().mean()


def backward(loss: Tensor) -> None:
    loss.backward()  # type: ignore[no-untyped-call]  # torch's own


def assert_same_gradients(model: nn.Module, reference: nn.Module, step: int) -> None:
    expected = dict(reference.named_parameters())
    for name, param in model.named_parameters():
        assert isinstance(param, DTensor), f"step {step}, {name} is whole"
        theirs = expected[name].grad
        assert (param.grad is None) == (theirs is None), f"step {step}, {name}.grad"
        if param.grad is not None:
            assert isinstance(param.grad, DTensor)
            torch.testing.assert_close(
                param.grad.full_tensor(),
                theirs,
                rtol=ROUNDING,
                atol=ROUNDING,
                msg=f"step {step}, gradient of {name}: {param.grad}, expected {theirs}",
            )


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_any_tree_of_modules_trains_like_the_whole_model(
    run_on_ranks: RunOnRanks, world_size: int
) -> None:
    run_on_ranks(train_all, world_size, draw(60), timeout_s=100)


def test_the_trees_that_are_drawn_have_what_models_have() -> None:
    drawn = draw(60)

    seen: Counter[str] = Counter()
    for tree in drawn:
        seen.update(features(tree.root))
        seen[f"reshard {tree.reshard_after_forward}"] += 1
        seen["kept"] += not tree.synchronized and tree.micro_batches > 1

    assert all(seen[kind] >= 3 for kind in EXPECTED), seen


EXPECTED = [
    *("linear", "narrow", "scalar", "norm", "tied", "transposed", "empty", "choosy", "unused"),
    *("frozen", "sharded leaf", "sharded branch", "again", "skipped", "reentrant", "plain"),
    *("reshard None", "reshard True", "reshard False", "kept"),
]


def features(node: Leaf | Branch) -> set[str]:
    if isinstance(node, Leaf):
        marks = {"frozen": node.frozen, "sharded leaf": node.sharded}
        return {node.kind, *(name for name, is_so in marks.items() if is_so)}
    marks = {
        "again": node.again,
        "skipped": node.skipped_in >= 0 and len(node.children) > 1,
        "sharded branch": node.sharded,
        node.checkpointed: True,
    }
    below = set().union(*map(features, node.children))
    return below | {name for name, is_so in marks.items() if is_so}

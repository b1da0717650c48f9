"""The demo's GPT and its unsharded twin, on one process."""

from __future__ import annotations

import copy
import math

import pytest
import torch

from trine.distributed.demo.check import Reference, compare
from trine.distributed.demo.model import GPT, GPTConfig, generate, next_byte_loss

TINY = GPTConfig(width=16, depth=2, heads=2, context=8)


def trained_a_little() -> GPT:
    """A model whose blocks do something; they start by adding nothing."""
    torch.manual_seed(0)
    model = GPT(TINY)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


def test_the_model_has_about_two_million_parameters() -> None:
    assert sum(p.numel() for p in GPT(GPTConfig()).parameters()) == pytest.approx(2e6, rel=0.1)


def test_an_untrained_model_finds_all_bytes_equally_likely() -> None:
    torch.manual_seed(0)
    windows = torch.randint(256, (16, 129))

    loss = next_byte_loss(GPT(GPTConfig())(windows[:, :-1]), windows)

    assert loss.item() == pytest.approx(math.log(256), abs=0.05)


def test_no_byte_sees_those_that_follow_it() -> None:
    model = trained_a_little()
    tokens = torch.randint(256, (1, 8))
    changed = tokens.clone()
    changed[0, 5] = (changed[0, 5] + 1) % 256

    before, after = model(tokens), model(changed)

    torch.testing.assert_close(after[:, :5], before[:, :5])
    assert not torch.allclose(after[:, 5:], before[:, 5:])


def test_a_sample_has_the_length_asked_for_and_follows_its_seed() -> None:
    model = trained_a_little()

    first, again, other = (generate(model, b"ab", 20, TINY.context, seed) for seed in (1, 1, 2))

    assert len(first) == 20  # more than the model can see at once
    assert first == again
    assert first != other


def test_the_twin_trains_on_the_batches_of_all_ranks_as_on_one() -> None:
    model = trained_a_little()
    twin = copy.deepcopy(model)
    optimizer, twin_optimizer = (torch.optim.SGD(m.parameters(), lr=0.0) for m in (model, twin))
    batches = list(torch.randint(256, (3, 4, 9)))
    whole = torch.cat(batches)

    loss = next_byte_loss(model(whole[:, :-1]), whole)
    loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    optimizer.param_groups[0]["lr"] = 0.1
    optimizer.step()
    twin_loss = Reference(twin, twin_optimizer, torch.float32).step(batches, learning_rate=0.1)

    assert twin_loss == pytest.approx(loss.item(), rel=1e-6)
    for expected, parameter in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(parameter, expected)


def test_losses_within_the_tolerance_agree() -> None:
    agrees, sentence = compare([5.0, 4.0], [5.0, 4.001], tolerance=0.01)

    assert agrees
    assert sentence.startswith("all 2 losses equal")
    assert "1.0e-03" in sentence


@pytest.mark.parametrize("wrong", [4.1, math.nan])
def test_the_first_loss_that_differs_is_named(wrong: float) -> None:
    agrees, sentence = compare([5.0, wrong, 3.0], [5.0, 4.0, 3.0], tolerance=0.01)

    assert not agrees
    assert sentence.startswith(f"the loss of step 1 is {wrong:.6f}, but 4.000000 without sharding")

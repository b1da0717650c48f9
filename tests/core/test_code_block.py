"""Code blocks: what they hold, and what executing them does to parameters."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from trine.core import to, tracing
from trine.core.handler import CodeBlock, forward, update_parameters
from trine.core.runtime import runtime_of
from trine.core.tracing import TraceEvent, add_sink, remove_sink

Losses = namedtuple("Losses", ["first", "second"])


@dataclass
class Result:
    loss: Tensor
    note: str


class Scale(nn.Module):
    """Multiplies by its one parameter, so that gradients can be written down."""

    def __init__(self, weight: float = 2.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(weight))

    def forward(self, x: Tensor) -> Any:
        return {"loss": self.weight * x}


class TwoStage(nn.Module):
    """`loss = head * h + tied * h` and `h = body * tied * x`."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Parameter(torch.tensor(2.0))
        self.head = nn.Parameter(torch.tensor(3.0))
        self.tied = nn.Parameter(torch.tensor(5.0))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h = self.body * self.tied * x
        return {"h": h, "loss": self.head * h + self.tied * h}

    def grads(self) -> dict[str, float | None]:
        return {
            name: None if each.grad is None else each.grad.item()
            for name, each in self.named_parameters()
        }


class Answer(Scale):
    """Returns what a function makes of its loss."""

    def __init__(self, answer: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.answer = answer

    def forward(self, x: Tensor) -> Any:
        return self.answer(self.weight * x)


def sgd(module: nn.Module, lr: float = 1.0) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=lr)


ONE = {"x": torch.tensor(1.0)}


# Making blocks.


def test_a_forward_block_does_nothing_but_call() -> None:
    model = to(Scale(), "cpu")

    block = forward(model)
    result = block(ONE)

    assert block == CodeBlock(model, [], False, None, None, {}, runtime_of(model))  # type: ignore[arg-type]  # not None here
    assert result["loss"].item() == 2
    assert model.weight.grad is None


def test_an_update_block_holds_what_it_was_given() -> None:
    model = to(Scale(), "cpu")
    optimizer = sgd(model)

    block = update_parameters(model, [optimizer], "loss", {"x"})

    assert block.func is model
    assert block.optimizers == [optimizer]
    assert (block.backprop, block.backprop_from, block.backprop_to) == (True, "loss", {"x"})


def test_a_block_of_a_block_shares_function_state_and_runtime() -> None:
    model = to(Scale(), "cpu")
    inner = forward(model)
    inner.state["seen"] = 1

    outer = update_parameters(inner, [])

    assert outer.func is model
    assert outer.state is inner.state
    assert outer.runtime is inner.runtime
    assert not inner.backprop


def test_an_update_of_an_update_is_refused() -> None:
    block = update_parameters(to(Scale(), "cpu"), [])

    with pytest.raises(ValueError, match="updates parameters already"):
        update_parameters(block, [])


@pytest.mark.parametrize(
    ("func", "message"),
    [
        (nn.ReLU(), "This ReLU has no runtime. Move it first"),
        (nn.ReLU().forward, "This ReLU has no runtime"),
        (print, "neither a module nor a method of one"),
    ],
)
def test_what_has_no_runtime_is_refused(func: Callable[..., Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        forward(func)


# State.


def test_state_of_a_block_goes_through_the_state_dicts_of_what_has_one() -> None:
    block, twin = forward(to(Scale(), "cpu")), forward(to(Scale(), "cpu"))
    block.state = {"inner": Scale(7.0), "step": 3}
    twin.state = {"inner": Scale(), "kept": 1}

    twin.load_state_dict(block.state_dict())

    assert twin.state["inner"].weight.item() == 7
    assert twin.state["inner"] is not block.state["inner"]
    assert (twin.state["step"], twin.state["kept"]) == (3, 1)


# Batches and outputs.


@pytest.mark.parametrize(
    "batch",
    [{"x": torch.tensor(3.0)}, [torch.tensor(3.0)], (torch.tensor(3.0),), torch.tensor(3.0)],
)
def test_a_batch_is_passed_as_its_type_suggests(batch: Any) -> None:
    assert forward(to(Scale(), "cpu"))(batch)["loss"].item() == 6


def test_a_namedtuple_is_passed_whole() -> None:
    class Second(nn.Module):
        def forward(self, pair: Losses) -> Any:
            return pair.second

    block = forward(to(Second(), "cpu"))

    assert block(Losses("a", "b")) == "b"


@pytest.mark.parametrize(
    ("answer", "gradient"),
    [
        (lambda loss: loss, 1.0),
        (lambda loss: {"loss": loss}, 1.0),
        (lambda loss: (loss, "text", 3), 1.0),
        (lambda loss: Losses(loss, loss * 2), 3.0),
        (lambda loss: Result(loss, "text"), 1.0),
        (lambda loss: {"a": loss, "the same": loss}, 1.0),
        (lambda loss: {"a": loss, "vector": torch.stack([loss, loss]), "n": loss.detach()}, 1.0),
        (lambda loss: {"a": loss, "whole": loss.detach().long()}, 1.0),
    ],
)
def test_every_output_that_looks_like_a_loss_is_differentiated_once(
    answer: Callable[[Tensor], Any], gradient: float
) -> None:
    model = to(Answer(answer), "cpu")

    update_parameters(model, [])(ONE)

    assert model.weight.grad is not None
    assert model.weight.grad.item() == gradient


def test_losses_may_share_their_graph() -> None:
    def answer(loss: Tensor) -> Any:
        root = (loss + 14).sqrt()  # 4: its gradient is 1/8, and saved for backward
        return {"a": root, "b": 3 * root}

    model = to(Answer(answer), "cpu")

    update_parameters(model, [])(ONE)

    assert model.weight.grad is not None
    assert model.weight.grad.item() == pytest.approx(4 / 8)


# Updating.


def test_an_update_clears_gradients_differentiates_and_steps() -> None:
    model = to(Scale(), "cpu")
    model.weight.grad = torch.tensor(100.0)

    outputs = update_parameters(model, [sgd(model, lr=0.5)])({"x": torch.tensor(3.0)})

    assert outputs["loss"].item() == 6
    assert model.weight.item() == 2 - 0.5 * 3


def test_several_optimizers_all_step() -> None:
    model = to(TwoStage(), "cpu")
    optimizers = [
        torch.optim.SGD([model.body], lr=1.0),
        torch.optim.SGD([model.head], lr=0.1),
    ]

    update_parameters(model, optimizers)(ONE)

    # h = 10; d loss/d head = 10; d loss/d body = (3 + 5) * 5
    # h is a scalar too, and adds its own gradient to body: 5.
    assert model.head.item() == pytest.approx(3 - 0.1 * 10)
    assert model.body.item() == pytest.approx(2 - (40 + 5))


def test_an_update_without_optimizers_accumulates() -> None:
    model = to(Scale(), "cpu")
    block = update_parameters(model, [])

    block({"x": torch.tensor(3.0)})
    block({"x": torch.tensor(4.0)})

    assert model.weight.grad is not None
    assert model.weight.grad.item() == 7


def test_backprop_from_chooses_one_output() -> None:
    model = to(Answer(lambda loss: {"a": loss, "b": 10 * loss}), "cpu")

    update_parameters(model, [], backprop_from="b")(ONE)

    assert model.weight.grad is not None
    assert model.weight.grad.item() == 10


def test_backprop_from_may_name_an_output_by_position() -> None:
    model = to(Answer(lambda loss: (loss, 10 * loss)), "cpu")

    update_parameters(model, [], backprop_from="1")(ONE)

    assert model.weight.grad is not None
    assert model.weight.grad.item() == 10


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"backprop_from": "lost"}, "backprop_from names 'lost'.* among: loss"),
        ({"backprop_to": {"lost"}}, "backprop_to names 'lost'.* among: x, loss"),
    ],
)
def test_a_name_that_nothing_has_is_refused(arguments: dict[str, Any], message: str) -> None:
    model = to(Scale(), "cpu")

    with pytest.raises(ValueError, match=message):
        update_parameters(model, [sgd(model)], **arguments)(ONE)


def test_an_update_with_nothing_to_differentiate_says_so() -> None:
    model = to(Answer(lambda loss: {"a": loss.detach(), "b": 3}), "cpu")

    with pytest.warns(UserWarning, match=r"No gradient was computed.*\(a, b\)"):
        update_parameters(model, [sgd(model)])(ONE)

    assert model.weight.item() == 2


# backprop_to: values at which differentiation stops.
# With x = 1: h = 2 * 5 = 10, loss = 3h + 5h, d loss/dh = 8.


def test_differentiation_stops_at_an_output() -> None:
    model = to(TwoStage(), "cpu")

    outputs = update_parameters(model, [], "loss", {"h"})(ONE)

    # tied is used on both sides of h, and gets its share from this side only: h.
    assert model.grads() == {"body": None, "head": 10.0, "tied": 10.0}
    assert outputs["h"].grad.item() == 8


def test_without_a_stop_the_same_model_trains_as_a_whole() -> None:
    model = to(TwoStage(), "cpu")

    update_parameters(model, [], "loss")(ONE)

    assert model.grads() == {"body": 40.0, "head": 10.0, "tied": 10.0 + 8 * 2}


def test_differentiation_stops_at_an_input_whose_graph_goes_on() -> None:
    before = torch.tensor(4.0, requires_grad=True)
    x = before * 3
    model = to(Scale(), "cpu")

    update_parameters(model, [], "loss", {"x"})({"x": x})

    assert model.weight.grad is not None
    assert model.weight.grad.item() == 12
    assert before.grad is None
    assert x.grad is not None
    assert x.grad.item() == 2


def test_the_rest_can_be_differentiated_from_where_it_stopped() -> None:
    model, whole = to(TwoStage(), "cpu"), TwoStage()
    whole(ONE["x"])["loss"].backward()

    h = update_parameters(model, [], "loss", {"h"})(ONE)["h"]
    h.backward(h.grad)

    assert model.grads() == whole.grads()


def test_a_stop_gets_the_sum_of_what_several_losses_send_it() -> None:
    model = to(Answer(lambda h: {"h": h * torch.ones(2), "unused": h * torch.ones(2)}), "cpu")

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, x: Tensor) -> Any:
            made = self.inner(x)
            return {**made, "a": made["h"].sum(), "b": (3 * made["h"]).sum()}

    outputs = update_parameters(to(Twice(), "cpu"), [], None, {"h", "unused"})(ONE)

    assert outputs["h"].grad.tolist() == [4, 4]
    assert outputs["unused"].grad is None
    assert model.weight.grad is None


def test_a_leaf_input_may_be_a_stop() -> None:
    x = torch.tensor(3.0, requires_grad=True)
    model = to(Scale(), "cpu")

    update_parameters(model, [], "loss", {"x"})({"x": x})

    assert x.grad is not None
    assert (x.grad.item(), model.weight.grad.item()) == (2, 3)  # type: ignore[union-attr]  # has one


def test_stopping_at_the_loss_itself_computes_nothing() -> None:
    model = to(Scale(), "cpu")

    update_parameters(model, [], "loss", {"loss"})(ONE)

    assert model.weight.grad is None


# A gradient scaler.


def test_scaled_losses_train_several_optimizers_to_the_same_values() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    model = to(TwoStage(), "cpu", options={"grad_scaler": scaler})
    optimizers = [torch.optim.SGD([each], lr=0.01) for each in model.parameters()]
    plain = TwoStage()
    plain(ONE["x"])["loss"].backward()
    sgd(plain, lr=0.01).step()

    update_parameters(model, optimizers, "loss")(ONE)

    torch.testing.assert_close(dict(model.named_parameters()), dict(plain.named_parameters()))


def test_a_stop_keeps_the_scale_so_that_the_scaler_can_step_what_is_behind_it() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    model = to(TwoStage(), "cpu", options={"grad_scaler": scaler})
    behind = torch.optim.SGD([model.body], lr=1.0)

    outputs = update_parameters(model, [], "loss", {"h"})(ONE)
    stop = outputs["h"]
    assert stop.grad.item() / scaler.get_scale() == 8
    stop.backward(stop.grad)
    scaler.step(behind)

    assert model.body.item() == 2 - 40


def test_a_scaler_skips_the_step_of_an_infinite_gradient() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    model = to(Scale(), "cpu", options={"grad_scaler": scaler})

    update_parameters(model, [sgd(model)])({"x": torch.tensor(torch.inf)})

    assert model.weight.item() == 2
    assert scaler.get_scale() == 512


# What a timeline sees.


def test_an_update_reports_its_three_parts() -> None:
    class ListSink:
        def __init__(self) -> None:
            self.events: list[TraceEvent] = []

        def record(self, event: TraceEvent) -> None:
            self.events.append(event)

    model = to(Scale(), "cpu")
    sink = ListSink()
    add_sink(sink)
    try:
        update_parameters(model, [sgd(model)])(ONE)
    finally:
        remove_sink(sink)

    assert [(event.name, event.category) for event in sink.events] == [
        ("forward", "compute"),
        ("backward", "compute"),
        ("optimizer", "compute"),
    ]
    assert not tracing.enabled

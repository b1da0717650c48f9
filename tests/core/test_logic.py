"""Logics: how a step calls, differentiates, scales, accumulates and steps."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from trine.core import handler, to
from trine.core.handler import BaseLogic, ClosureLogic, CodeBlockLogic, Logic

Pair = namedtuple("Pair", ["x", "y"])


class Scale(nn.Module):
    """Multiplies by its one parameter, so that gradients can be written down."""

    def __init__(self, weight: float = 2.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(weight))

    def forward(self, x: Any) -> dict[str, Tensor]:
        return {"loss": self.weight * (x.x if isinstance(x, Pair) else x)}


class Two(Scale):
    """Has two losses, of gradients x and 10 x."""

    def forward(self, x: Any) -> dict[str, Tensor]:
        return {"a": self.weight * x, "b": 10 * self.weight * x}


class Endless:
    """A loader without a length."""

    def __iter__(self) -> Iterator[Tensor]:
        while True:
            yield torch.tensor(1.0)


def batch(value: float) -> dict[str, Tensor]:
    return {"x": torch.tensor(value)}


def sgd(model: nn.Module, lr: float = 1.0) -> dict[str, torch.optim.Optimizer]:
    return {"main": torch.optim.SGD(model.parameters(), lr=lr)}


def step(logic: BaseLogic, model: nn.Module, optimizers: Any, index: int, given: Any) -> Any:
    outputs = logic.train_step({"main": model}, optimizers, index, given)
    logic.train_step_optimizers({"main": model}, optimizers, index)
    return outputs


# BaseLogic.


def test_the_callbacks_of_a_base_logic_do_nothing() -> None:
    logic, models = BaseLogic(), {"main": Scale()}

    logic.train_epoch_begin(models, 0, [])
    logic.train_validation_begin(models)
    logic.train_validation_end(models)
    logic.train_epoch_end(models, 1)
    logic.load_state_dict(logic.state_dict())

    assert step(logic, models["main"], {}, 0, batch(1)) is None
    assert logic.eval_step(models, 0, batch(1)) is None


@pytest.mark.parametrize("kind", [Logic, ClosureLogic, CodeBlockLogic])
def test_options_are_taken_out_of_a_copy_of_what_was_given(kind: type[BaseLogic]) -> None:
    options = {"backward_outputs": "loss"}

    logic = kind(options=options)

    assert options == {"backward_outputs": "loss"}
    options["someone_elses"] = "kept"
    logic.consume_options(options)
    assert options == {"someone_elses": "kept"}


@pytest.mark.parametrize(
    ("kind", "known"),
    [
        (BaseLogic, "none"),
        (CodeBlockLogic, "backward_outputs"),
        (
            Logic,
            "autocast, backward_function, backward_outputs, grad_scaler, "
            "gradient_accumulation_steps",
        ),
    ],
)
def test_an_option_that_a_logic_does_not_know_is_refused_with_those_it_does(
    kind: type[BaseLogic], known: str
) -> None:
    with pytest.raises(ValueError, match="no option") as caught:
        kind(options={"autocasts": True})

    assert str(caught.value) == (
        f"{kind.__name__} has no option 'autocasts'. Its options: {known}."
    )


def test_a_logic_of_ones_own_adds_options_by_asking_for_them() -> None:
    class Mine(Logic):
        def consume_options(self, options: dict[str, Any]) -> None:
            super().consume_options(options)
            self.factor = options["factor"] if "factor" in options else options.get("scale", 1)

    assert Mine(options={"factor": 2}).factor == 2
    assert Mine(options={"scale": 3}).factor == 3
    with pytest.raises(ValueError, match=r"Mine has no option 'facto'\. .* factor, "):
        Mine(options={"facto": 2})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"autocast": "yes"}, "'autocast' takes True, False or a dict .* got 'yes'"),
        ({"gradient_accumulation_steps": "2"}, "steps='2': expected a whole number"),
        ({"gradient_accumulation_steps": 1.5}, "steps=1.5: expected a whole number"),
    ],
)
def test_an_option_of_another_type_is_refused(options: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        Logic(options=options)


# Modes.


@pytest.mark.parametrize("kind", [Logic, CodeBlockLogic])
def test_the_model_trains_in_epochs_and_evaluates_in_validations(kind: Any) -> None:
    logic, model = kind("net"), nn.Sequential(nn.Dropout())
    models = {"net": model}

    def mode_after(callback: Any, *arguments: Any) -> bool:
        callback(models, *arguments)
        return model[0].training

    assert mode_after(logic.train_epoch_begin, 0, [])
    assert not mode_after(logic.train_validation_begin)
    assert mode_after(logic.train_validation_end)
    assert not mode_after(logic.train_epoch_end, 1)


@pytest.mark.parametrize("kind", [Logic, CodeBlockLogic])
def test_a_distributed_sampler_is_told_the_epoch(kind: Any) -> None:
    data = torch.arange(4)
    sampler: Any = torch.utils.data.DistributedSampler(data, num_replicas=2, rank=0)  # type: ignore[arg-type]  # a tensor will do
    loader: Any = torch.utils.data.DataLoader(data, sampler=sampler)  # type: ignore[arg-type]  # here too

    kind().train_epoch_begin({"main": Scale()}, 3, loader)

    assert sampler.epoch == 3


# Steps.


@pytest.mark.parametrize(
    "given",
    [batch(3), [torch.tensor(3.0)], (torch.tensor(3.0),), torch.tensor(3.0), Pair(3.0, "unused")],
)
@pytest.mark.parametrize("kind", [Logic, ClosureLogic, CodeBlockLogic])
def test_one_step_of_every_logic_trains_on_every_batch_type(kind: Any, given: Any) -> None:
    model = to(Scale(), "cpu")

    outputs = step(kind(), model, sgd(model, lr=0.5), 0, given)

    assert outputs["loss"].item() == 6
    assert model.weight.item() == 2 - 0.5 * 3


@pytest.mark.parametrize("kind", [Logic, CodeBlockLogic])
def test_an_evaluation_step_leaves_no_gradient(kind: Any) -> None:
    model = to(Scale(), "cpu")

    outputs = kind().eval_step({"main": model}, 0, batch(3))

    assert outputs["loss"].item() == 6
    assert model.weight.grad is None


@pytest.mark.parametrize(
    ("names", "gradient"), [(None, 11), ("b", 10), (["a"], 1), (("a", "b"), 11), (["a", "a"], 1)]
)
def test_backward_outputs_choose_what_is_differentiated(names: Any, gradient: float) -> None:
    model = Two()
    logic = Logic(options={"backward_outputs": names})

    logic.train_step({"main": model}, sgd(model), 0, batch(1))

    assert model.weight.grad is not None
    assert model.weight.grad.item() == gradient


def test_a_backward_output_that_is_missing_is_named_and_the_others_are_used() -> None:
    model = Two()
    logic = Logic(options={"backward_outputs": ["a", "lost"]})

    with pytest.warns(UserWarning, match="names 'lost', which is not among the outputs: a, b"):
        logic.train_step({"main": model}, sgd(model), 0, batch(1))

    assert model.weight.grad is not None
    assert model.weight.grad.item() == 1


def test_a_step_with_nothing_to_differentiate_says_so_and_changes_nothing() -> None:
    class Frozen(Scale):
        def forward(self, x: Any) -> dict[str, Tensor]:
            return {"loss": self.weight.detach() * x}

    model = Frozen()

    with pytest.warns(UserWarning, match="No gradient was computed"):
        step(Logic(options={"backward_outputs": "loss"}), model, sgd(model), 0, batch(1))

    assert model.weight.item() == 2


def test_a_backward_function_is_given_each_loss() -> None:
    model, seen = Two(), []
    logic = Logic(options={"backward_function": lambda loss: seen.append(loss.item())})

    logic.train_step({"main": model}, sgd(model), 0, batch(1))

    assert seen == [2, 20]
    assert model.weight.grad is None


def test_a_model_name_chooses_model_and_optimizer() -> None:
    one, other = Scale(), Scale()
    models = {"one": one, "other": other}
    optimizers = {name: sgd(model)["main"] for name, model in models.items()}
    logic = Logic("other")

    logic.train_step(models, optimizers, 0, batch(1))
    logic.train_step_optimizers(models, optimizers, 0)

    assert (one.weight.item(), other.weight.item()) == (2, 1)


# Autocast and scaling.


@pytest.mark.parametrize("moved", [True, False])
@pytest.mark.parametrize(
    ("option", "dtype"),
    [(True, torch.bfloat16), (False, torch.float32), ({"dtype": torch.float16}, torch.float16)],
)
def test_autocast_is_that_of_the_models_device(
    moved: bool, option: Any, dtype: torch.dtype
) -> None:
    model: nn.Module = nn.Linear(2, 1)
    model = to(model, "cpu") if moved else model
    logic = Logic(options={"autocast": option})

    trained = logic.train_step({"main": model}, sgd(model), 0, torch.ones(1, 2))
    evaluated = logic.eval_step({"main": model}, 0, torch.ones(1, 2))

    assert (trained.dtype, evaluated.dtype) == (dtype, dtype)


def test_a_model_without_parameters_computes_on_the_cpu() -> None:
    result = Logic().eval_step({"main": nn.ReLU()}, 0, torch.tensor(-1.0))

    assert result.item() == 0


def test_scaling_changes_no_value_and_its_state_is_the_logics() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    model = Two()
    logic = Logic(options={"grad_scaler": scaler})

    step(logic, model, sgd(model, lr=0.125), 0, batch(2))
    twin = Logic(options={"grad_scaler": torch.amp.GradScaler("cpu", init_scale=8.0)})
    twin.load_state_dict(logic.state_dict())

    assert model.weight.item() == 2 - 0.125 * 22
    assert twin.state_dict()["grad_scaler"]["scale"] == 1024
    Logic().load_state_dict(logic.state_dict())  # has nowhere to put it, and needs it not


def test_a_scaler_that_is_none_is_refused() -> None:
    with pytest.raises(TypeError, match="got str"):
        Logic(options={"grad_scaler": "yes"})


# Accumulation.


def gradients_at_steps(logic: Logic, values: list[float], loader: Any) -> list[tuple[int, float]]:
    """At which batches the weight moved, and by how much."""
    model = Scale()
    optimizers = sgd(model)
    logic.train_epoch_begin({"main": model}, 0, loader)
    moves = []
    for index, value in enumerate(values):
        before = model.weight.item()
        step(logic, model, optimizers, index, batch(value))
        if model.weight.item() != before:
            moves.append((index, before - model.weight.item()))
    return moves


def test_accumulation_steps_with_the_mean_of_each_window() -> None:
    logic = Logic(options={"gradient_accumulation_steps": 2})

    assert gradients_at_steps(logic, [1, 3, 5, 9], [0] * 4) == [(1, 2.0), (3, 7.0)]


def test_the_last_window_of_an_epoch_is_the_mean_over_itself() -> None:
    logic = Logic(options={"gradient_accumulation_steps": 4})

    moves = gradients_at_steps(logic, [1, 3, 5, 7, 9, 12], [0] * 6)

    assert moves == [(3, 4.0), (5, 10.5)]


def test_where_an_epoch_has_no_known_end_the_window_goes_on_in_the_next() -> None:
    logic = Logic(options={"gradient_accumulation_steps": 4})

    first = gradients_at_steps(logic, [1, 3, 5, 7, 9], Endless())

    assert first == [(3, 4.0)]
    assert logic._accumulated == 1


def test_accumulation_under_a_scaler_steps_once_and_updates_once_per_window() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    logic = Logic(options={"gradient_accumulation_steps": 3, "grad_scaler": scaler})

    moves = gradients_at_steps(logic, [1, 3, 5, 4, 6], [0] * 5)

    assert moves == [(2, 3.0), (4, 5.0)]
    assert scaler.get_scale() == 16  # grew once, after two updates


def test_parameters_without_a_gradient_are_left_out_of_a_short_window() -> None:
    model = Scale()
    idle = nn.Parameter(torch.tensor(1.0))
    optimizers = {"main": torch.optim.SGD([model.weight, idle], lr=1.0)}
    logic = Logic(options={"gradient_accumulation_steps": 2})
    logic.train_epoch_begin({"main": model}, 0, [0])

    step(logic, model, optimizers, 0, batch(1))

    assert (model.weight.item(), idle.item()) == (1, 1)


def test_windows_of_no_batch_are_refused() -> None:
    with pytest.raises(ValueError, match="gradient_accumulation_steps=0"):
        Logic(options={"gradient_accumulation_steps": 0})


# Closures.


class Parabola(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.at = nn.Parameter(torch.tensor([5.0, -3.0]))

    def forward(self, x: Tensor) -> Tensor:
        return ((self.at - x) ** 2).sum()


def test_a_closure_lets_lbfgs_find_the_minimum_and_gives_the_first_outputs() -> None:
    model = Parabola()
    optimizers = {"main": torch.optim.LBFGS(model.parameters(), line_search_fn="strong_wolfe")}

    outputs = step(ClosureLogic(), model, optimizers, 0, torch.tensor([1.0, 2.0]))

    assert outputs.item() == 16 + 25
    torch.testing.assert_close(model.at.detach(), torch.tensor([1.0, 2.0]))


def test_several_losses_make_one_objective_in_a_closure() -> None:
    model, returned = Two(), []

    class Asking(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            with torch.enable_grad():
                returned.append(closure().item())
            return super().step()

    optimizers = {"main": Asking(model.parameters(), lr=0.1)}

    step(ClosureLogic(), model, optimizers, 0, batch(1))

    assert returned == [22]
    assert model.weight.item() == pytest.approx(2 - 0.1 * 11)


def test_a_closure_without_a_loss_is_an_error() -> None:
    model = Scale()
    logic = ClosureLogic(options={"backward_outputs": "lost"})

    with (
        pytest.warns(UserWarning, match=r"names 'lost'|No gradient"),
        pytest.raises(ValueError, match=r"none of the outputs \(loss\) is one"),
    ):
        step(logic, model, sgd(model), 0, batch(1))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"grad_scaler": torch.amp.GradScaler("cpu")}, "scaler cannot work"),
        ({"gradient_accumulation_steps": 2}, "Use Logic to accumulate"),
    ],
)
def test_what_cannot_work_inside_a_closure_is_refused(options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ClosureLogic(options=options)


def test_the_name_of_the_original_is_an_alias() -> None:
    assert handler.ClousureLogic is ClosureLogic  # codespell:ignore clousure


# Code blocks.


def test_a_block_logic_differentiates_the_output_it_is_told() -> None:
    model = to(Two(), "cpu")

    step(CodeBlockLogic(options={"backward_outputs": "b"}), model, sgd(model), 0, batch(1))

    assert model.weight.item() == 2 - 10


def test_a_block_logic_steps_every_optimizer() -> None:
    model = to(Scale(), "cpu")
    extra = nn.Parameter(torch.tensor(1.0))
    extra.grad = torch.tensor(1.0)
    optimizers = {**sgd(model), "more": torch.optim.SGD([extra], lr=1.0)}

    step(CodeBlockLogic(), model, optimizers, 0, (torch.tensor(1.0),))

    assert model.weight.item() == 1
    assert extra.grad is None  # cleared, as those of every optimizer


def test_a_block_logic_takes_one_name() -> None:
    with pytest.raises(TypeError, match="one name"):
        CodeBlockLogic(options={"backward_outputs": ["a", "b"]})

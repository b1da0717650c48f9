"""Handlers: who is told what, in which order, for every module that was moved."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from trine.core import TrineError, to
from trine.core.handler import BaseHandler, BaseLogic, Handler, Logic
from trine.core.runtime import BaseRuntime, PyTorchRuntime, runtime_of

Call = tuple[Any, ...]


class Recording(PyTorchRuntime):
    """Writes down what it is told, with the name in its options."""

    def _told(self, moment: str, *what: Any) -> None:
        self.options["log"].append((self.options["name"], moment, *what))

    def initialize_module(self, module: Any, loader_or_batch: Any, optimizer: Any = None) -> None:
        self._told("initialize_module", loader_or_batch, optimizer)

    def train_epoch_begin(self, module: Any) -> None:
        self._told("train_epoch_begin")

    def train_epoch_end(self, module: Any) -> None:
        self._told("train_epoch_end")

    def train_pre_step(self, trainer: Any, module: Any, batch_idx: int, batch: Any) -> None:
        self._told("train_pre_step", batch_idx, batch)

    def train_post_step(
        self, trainer: Any, module: Any, batch_idx: int, batch: Any, outs: Any
    ) -> None:
        self._told("train_post_step", batch_idx, batch, outs)

    def train_cleanup(self, module: Any) -> None:
        self._told("train_cleanup")

    def train_validation_begin(self, module: Any) -> None:
        self._told("train_validation_begin")

    def train_validation_end(self, module: Any) -> None:
        self._told("train_validation_end")

    def eval_pre_step(self, evaluator: Any, module: Any, batch_idx: int, batch: Any) -> None:
        self._told("eval_pre_step", batch_idx, batch)

    def eval_post_step(
        self, evaluator: Any, module: Any, batch_idx: int, batch: Any, outs: Any
    ) -> None:
        self._told("eval_post_step", batch_idx, batch, outs)


class Telling(BaseLogic):
    """Writes down what it is told, and answers with what it was made with."""

    def __init__(self, log: list[Call], answer: Any = "outs") -> None:
        super().__init__()
        self.log, self.answer = log, answer

    def train_epoch_begin(self, models: Any, epoch: int, loader: Any) -> None:
        self.log.append(("logic", "train_epoch_begin", epoch, loader))

    def train_epoch_end(self, models: Any, epoch: int) -> None:
        self.log.append(("logic", "train_epoch_end", epoch))

    def train_step(self, models: Any, optimizers: Any, batch_idx: int, batch: Any) -> Any:
        self.log.append(("logic", "train_step", batch_idx, batch))
        return self.answer

    def train_step_optimizers(self, models: Any, optimizers: Any, batch_idx: int) -> None:
        self.log.append(("logic", "train_step_optimizers", batch_idx))

    def train_validation_begin(self, models: Any) -> None:
        self.log.append(("logic", "train_validation_begin"))

    def train_validation_end(self, models: Any) -> None:
        self.log.append(("logic", "train_validation_end"))

    def eval_step(self, models: Any, batch_idx: int, batch: Any) -> Any:
        self.log.append(("logic", "eval_step", batch_idx, batch))
        return self.answer


class Loop:
    """A trainer and an evaluator for handlers that expects no more than the protocols."""

    def __init__(
        self,
        models: Mapping[str, nn.Module],
        optimizers: Mapping[str, torch.optim.Optimizer] | None = None,
    ) -> None:
        self.models = models
        self.optimizers = optimizers or {}
        self.epoch = 4
        self.reported: dict[str, Any] = {}

    def report(self, values: Mapping[str, Any]) -> None:
        self.reported.update(values)


class Entry(BaseRuntime):
    def convert_batch(self, args: Any) -> Any:
        return f"moved {args}"


def moved(module: nn.Module, log: list[Call], name: str) -> nn.Module:
    return to(module, "cpu", runtime_class=Recording, options={"log": log, "name": name})


def two_parts(log: list[Call]) -> nn.Module:
    model = nn.ModuleDict({"encoder": nn.Linear(1, 1), "decoder": nn.Linear(1, 1)})
    moved(model["encoder"], log, "encoder")
    moved(model["decoder"], log, "decoder")
    return model


def test_each_moment_reaches_every_moved_submodule_and_then_the_logic() -> None:
    log: list[Call] = []
    loop = Loop({"main": two_parts(log)})
    handler = Handler(Telling(log), Entry("cpu", {}), {})

    def done(index: int, outs: Any) -> None:
        log.append(("complete", index, outs))

    def during(callback: Any, *arguments: Any) -> list[Call]:
        log.clear()
        callback(*arguments)
        return list(log)

    def both(moment: str, *what: Any) -> list[Call]:
        return [("encoder", moment, *what), ("decoder", moment, *what)]

    assert during(handler.train_setup, loop, "data") == both("initialize_module", "data", None)
    assert during(handler.eval_setup, loop, "data") == both("initialize_module", "data", None)
    assert during(handler.train_epoch_begin, loop, "data") == [
        *both("train_epoch_begin"),
        ("logic", "train_epoch_begin", 4, "data"),
    ]
    assert during(handler.train_step, loop, 3, "batch", done) == [
        *both("train_pre_step", 3, "batch"),
        ("logic", "train_step", 3, "moved batch"),
        ("logic", "train_step_optimizers", 3),
        ("complete", 3, "outs"),
    ]
    assert during(handler.train_post_step, loop, 3, "batch", "outs") == both(
        "train_post_step", 3, "batch", "outs"
    )
    assert during(handler.train_validation_begin, loop, loop) == [
        *both("train_validation_begin"),
        ("logic", "train_validation_begin"),
    ]
    assert during(handler.eval_loop_begin, loop) == []
    assert during(handler.eval_step, loop, 5, "batch", done) == [
        *both("eval_pre_step", 5, "batch"),
        ("logic", "eval_step", 5, "moved batch"),
        ("complete", 5, "outs"),
    ]
    assert during(handler.eval_post_step, loop, 5, "batch", "outs") == both(
        "eval_post_step", 5, "batch", "outs"
    )
    assert during(handler.eval_loop_end, loop) == []
    assert during(handler.train_validation_end, loop, loop) == [
        *both("train_validation_end"),
        ("logic", "train_validation_end"),
    ]
    assert during(handler.train_epoch_end, loop) == [
        *both("train_epoch_end"),
        ("logic", "train_epoch_end", 4),
    ]
    assert during(handler.train_cleanup, loop) == both("train_cleanup")


def test_a_submodule_with_a_runtime_of_its_own_is_told_beside_its_parent() -> None:
    log: list[Call] = []
    model = moved(nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)), log, "whole")
    moved(model.get_submodule("1"), log, "last")
    handler = Handler(Telling(log), Entry("cpu", {}), {})

    handler.train_cleanup(Loop({"main": model}))

    assert log == [("whole", "train_cleanup"), ("last", "train_cleanup")]


def test_an_evaluator_with_other_models_has_those_told() -> None:
    log: list[Call] = []
    trained = Loop({"main": moved(nn.ReLU(), log, "trained")})
    evaluated = Loop({"main": moved(nn.ReLU(), log, "evaluated")})
    handler = Handler(BaseLogic(), Entry("cpu", {}), {})

    handler.train_epoch_begin(trained, [])
    handler.train_validation_begin(trained, evaluated)
    handler.train_epoch_end(trained)

    assert log == [
        ("trained", "train_epoch_begin"),
        ("evaluated", "train_validation_begin"),
        ("trained", "train_epoch_end"),
    ]


def test_a_module_moved_again_between_runs_has_its_new_runtime_told() -> None:
    log: list[Call] = []
    model = moved(nn.ReLU(), log, "first")
    loop, handler = Loop({"main": model}), Handler(BaseLogic(), Entry("cpu", {}), {})
    handler.train_setup(loop, [])

    moved(model, log, "second")
    handler.train_setup(loop, [])
    handler.train_cleanup(loop)

    assert [name for name, *_ in log] == ["first", "second", "second"]


def test_setting_up_puts_the_models_into_their_mode() -> None:
    model = to(nn.Dropout(), "cpu")
    loop, handler = Loop({"main": model}), Handler(BaseLogic(), Entry("cpu", {}), {})

    handler.eval_setup(loop, [])
    evaluating = model.training
    handler.train_setup(loop, [])

    assert (evaluating, model.training) == (False, True)


def test_initialising_gives_each_module_its_loader_and_its_optimizer() -> None:
    log: list[Call] = []
    model = two_parts(log)
    optimizers = {
        name: torch.optim.SGD(model.parameters(), lr=1.0) for name in ("encoder", "other")
    }
    handler = Handler(BaseLogic(), Entry("cpu", {}), {})

    handler.train_setup(Loop({"main": model}, optimizers), {"decoder": "data"})

    assert log == [
        ("encoder", "initialize_module", None, optimizers["encoder"]),
        ("decoder", "initialize_module", "data", None),
    ]


def test_an_only_optimizer_is_every_modules() -> None:
    log: list[Call] = []
    model = two_parts(log)
    optimizer = torch.optim.SGD(model.parameters())
    handler = Handler(BaseLogic(), Entry("cpu", {}), {})

    handler.train_setup(Loop({"main": model}, {"main": optimizer}), [])

    assert [each[-1] for each in log] == [optimizer, optimizer]


def test_models_that_nobody_moved_are_refused_with_the_mending() -> None:
    handler = Handler(BaseLogic(), Entry("cpu", {}), {})

    with pytest.raises(TrineError, match=r"model = trine\.core\.to\(model, device\)"):
        handler.train_setup(Loop({"main": nn.ReLU()}), [])


# Options and reports.


def test_reports_carry_the_outputs_that_the_options_name() -> None:
    loop = Loop({"main": to(nn.ReLU(), "cpu")})
    handler = Handler(
        BaseLogic(),
        Entry("cpu", {}),
        {"train_report_keys": ["loss"], "eval_report_keys": ["loss", "0"], "async": True},
    )

    handler.train_post_step(loop, 0, None, {"loss": 1, "more": 2})
    with pytest.raises(ValueError, match="eval_report_keys names 0, but the outputs are: loss"):
        handler.eval_post_step(loop, 0, None, {"loss": 3})

    assert loop.reported == {"train/loss": 1}


def test_outputs_without_names_are_reported_by_position() -> None:
    loop = Loop({"main": to(nn.ReLU(), "cpu")})
    handler = Handler(BaseLogic(), Entry("cpu", {}), {"eval_report_keys": ["1"]})

    handler.eval_post_step(loop, 0, None, (5, 6))

    assert loop.reported == {"val/1": 6}


def test_options_are_consumed_from_a_copy() -> None:
    options = {"train_report_keys": ["loss"], "async": True}

    handler = Handler(BaseLogic(), Entry("cpu", {}), options)
    assert len(options) == 2
    options["someone_elses"] = 1
    handler.consume_options(options)

    assert options == {"someone_elses": 1}


def test_an_option_that_a_handler_does_not_know_is_refused() -> None:
    known = "async, eval_report_keys, train_report_keys"
    with pytest.raises(ValueError, match=f"Handler has no option 'keys'. Its options: {known}"):
        Handler(BaseLogic(), Entry("cpu", {}), {"keys": []})
    with pytest.raises(ValueError, match=r"BaseHandler has no option 'keys'\. Its options: none"):
        BaseHandler(BaseLogic(), {"keys": []})


def test_one_name_to_report_is_that_name_and_not_its_letters() -> None:
    options = {"train_report_keys": "loss", "eval_report_keys": None}
    handler, loop = Handler(BaseLogic(), Entry("cpu", {}), options), Loop({})

    handler.train_post_step(loop, 0, None, {"loss": 1, "l": 2})
    handler.eval_post_step(loop, 0, None, {"loss": 3})

    assert loop.reported == {"train/loss": 1}
    with pytest.raises(TypeError, match=r"'train_report_keys' takes names .* got \[3\]"):
        Handler(BaseLogic(), Entry("cpu", {}), {"train_report_keys": [3]})


def test_a_base_handler_takes_further_arguments_and_does_nothing() -> None:
    class Mine(BaseHandler):
        def consume_options(self, options: dict[str, Any]) -> None:
            self.mine = options.pop("mine")

    handler, loop = Mine(BaseLogic(), {"mine": 3}, "further", more=1), Loop({})

    handler.train_setup(loop, [])
    handler.train_epoch_begin(loop, [])
    handler.train_step(loop, 0, None, lambda index, outs: pytest.fail("nothing to complete"))
    handler.train_post_step(loop, 0, None, None)
    handler.train_validation_begin(loop, loop)
    handler.eval_setup(loop, [])
    handler.eval_loop_begin(loop)
    handler.eval_step(loop, 0, None, lambda index, outs: pytest.fail("nothing to complete"))
    handler.eval_post_step(loop, 0, None, None)
    handler.eval_loop_end(loop)
    handler.train_validation_end(loop, loop)
    handler.train_epoch_end(loop)
    handler.train_cleanup(loop)

    assert handler.mine == 3


def test_the_state_of_a_handler_is_its_logics() -> None:
    def make() -> Handler:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
        return Handler(Logic(options={"grad_scaler": scaler}), Entry("cpu", {}), {})

    state = make().state_dict()
    state["grad_scaler"]["scale"] = 32.0
    handler = make()
    handler.load_state_dict(state)

    assert handler.state_dict() == state


def test_a_step_moves_the_batch_and_trains() -> None:
    class Square(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.tensor(3.0))

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"loss": self.weight * x}

    model = to(Square(), "cpu")
    runtime = runtime_of(model)
    assert runtime is not None
    loop = Loop({"main": model}, {"main": torch.optim.SGD(model.parameters(), lr=1.0)})
    completed: list[Any] = []

    Handler(Logic(), runtime, {}).train_step(
        loop, 0, {"x": torch.tensor(2.0)}, lambda index, outs: completed.append((index, outs))
    )

    assert model.weight.item() == 3 - 2
    ((index, outs),) = completed
    assert (index, outs["loss"].item()) == (0, 6)

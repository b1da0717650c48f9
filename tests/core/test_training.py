"""Trainer and Evaluator: the order of a run, when it stops, and how it goes on later."""

from __future__ import annotations

import copy
import io
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, RandomSampler, Sampler

from trine.core import to, tracing
from trine.core.handler import BaseHandler, BaseLogic, CodeBlockLogic, Handler, Logic
from trine.core.runtime import PyTorchRuntime, runtime_of
from trine.core.tracing import TraceEvent, add_sink, remove_sink
from trine.core.training import Evaluator, Trainer


class Line(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 1)
        nn.init.constant_(self.linear.weight, 0.5)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        return {"loss": ((self.linear(x)[:, 0] - y) ** 2).mean()}


def data(count: int) -> list[dict[str, Tensor]]:
    """Batches of a fixed order, each other than the rest."""
    random = torch.Generator().manual_seed(0)
    inputs = torch.randn(count, 4, 2, generator=random)
    return [{"x": x, "y": x @ torch.tensor([2.0, -1.0])} for x in inputs]


def make(logic: BaseLogic | None = None, **arguments: Any) -> tuple[Trainer, Line]:
    """A trainer with momentum, so that optimizer state matters, and its model."""
    model = to(Line(), "cpu")
    runtime = runtime_of(model)
    assert runtime is not None
    options = {"train_report_keys": ["loss"], "eval_report_keys": ["loss"]}
    handler = Handler(logic or Logic(), runtime, options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    if arguments.pop("validate", False):
        arguments["evaluator"] = Evaluator(handler, model)
    return Trainer(handler, models=model, optimizers=optimizer, **arguments), model


class Quiet(BaseHandler):
    """Completes each step and writes down which."""

    def __init__(self) -> None:
        super().__init__(BaseLogic(), {})
        self.seen: list[tuple[Any, Any]] = []

    def train_step(self, trainer: Any, batch_idx: int, batch: Any, complete_fn: Any) -> None:
        complete_fn(batch_idx, None)

    def train_post_step(self, trainer: Any, batch_idx: int, batch: Any, outputs: Any) -> None:
        self.seen.append((batch_idx, batch))


def quiet(**arguments: Any) -> tuple[Trainer, Quiet]:
    handler = Quiet()
    return Trainer(handler, models=nn.ReLU(), optimizers={}, **arguments), handler


# The order of everything.


def recording(cls: type[Any], who: str, log: list[str], names: str) -> type[Any]:
    """A subclass that writes down the calls of these methods and passes them on."""

    def method(name: str) -> Any:
        def told(self: Any, *arguments: Any, **named: Any) -> Any:
            log.append(f"{who}.{name}")
            return getattr(super(made, self), name)(*arguments, **named)

        return told

    made = type(f"Recording{cls.__name__}", (cls,), {n: method(n) for n in names.split()})
    return made


SETUP = """
handler.train_setup
    runtime.initialize_module
handler.eval_setup
    runtime.initialize_module
"""
EPOCH_BEGIN = """
handler.train_epoch_begin
    runtime.train_epoch_begin
    logic.train_epoch_begin
"""
STEP = """
handler.train_step
    runtime.train_pre_step
    runtime.convert_batch
    logic.train_step
    logic.train_step_optimizers
handler.train_post_step
    runtime.train_post_step
"""
VALIDATION = """
handler.train_validation_begin
    runtime.train_validation_begin
    logic.train_validation_begin
handler.eval_loop_begin
handler.eval_step
    runtime.eval_pre_step
    runtime.convert_batch
    logic.eval_step
handler.eval_post_step
    runtime.eval_post_step
handler.eval_loop_end
handler.train_validation_end
    runtime.train_validation_end
    logic.train_validation_end
extension
"""
EPOCH_END = """
handler.train_epoch_end
    runtime.train_epoch_end
    logic.train_epoch_end
"""
CLEANUP = """
handler.train_cleanup
    runtime.train_cleanup
"""


def test_two_epochs_with_validation_call_everything_in_this_order() -> None:
    log: list[str] = []
    runtime_class = recording(
        PyTorchRuntime,
        "runtime",
        log,
        "initialize_module train_epoch_begin train_epoch_end train_pre_step train_post_step "
        "train_cleanup train_validation_begin train_validation_end eval_pre_step "
        "eval_post_step convert_batch",
    )
    logic_class = recording(
        Logic,
        "logic",
        log,
        "train_epoch_begin train_epoch_end train_step train_step_optimizers "
        "train_validation_begin train_validation_end eval_step",
    )
    handler_class = recording(
        Handler,
        "handler",
        log,
        "train_setup train_epoch_begin train_epoch_end train_step train_post_step "
        "train_cleanup train_validation_begin train_validation_end eval_setup "
        "eval_loop_begin eval_step eval_post_step eval_loop_end",
    )
    model = to(Line(), "cpu", runtime_class=runtime_class)
    handler = handler_class(logic_class(), runtime_of(model), {})
    trainer = Trainer(
        handler,
        models=model,
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
        evaluator=Evaluator(handler, model),
        max_epochs=2,
    )
    trainer.extend(lambda trainer: log.append("extension"))

    trainer.run(data(2), data(1))

    epoch = EPOCH_BEGIN + STEP + STEP + VALIDATION + EPOCH_END
    expected = SETUP + epoch + epoch + CLEANUP
    assert log == expected.split()


def test_callbacks_see_how_many_epochs_and_iterations_are_done() -> None:
    seen: list[tuple[str, int, int]] = []

    class Looking(Quiet):
        def train_epoch_begin(self, trainer: Any, loader: Any) -> None:
            seen.append(("begin", trainer.epoch, trainer.iteration))

        def train_post_step(self, trainer: Any, *rest: Any) -> None:
            seen.append(("step", trainer.epoch, trainer.iteration))

        def train_epoch_end(self, trainer: Any) -> None:
            seen.append(("end", trainer.epoch, trainer.iteration))

    Trainer(Looking(), models=nn.ReLU(), optimizers={}, max_epochs=2).run([7, 8])

    assert seen == [
        ("begin", 0, 0),
        ("step", 0, 0),
        ("step", 0, 1),
        ("end", 1, 2),
        ("begin", 1, 2),
        ("step", 1, 2),
        ("step", 1, 3),
        ("end", 2, 4),
    ]


# What comes out.


def test_training_is_that_of_a_plain_loop() -> None:
    trainer, model = make(max_epochs=3)
    plain = Line()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.05, momentum=0.9)
    for _ in range(3):
        for batch in data(4):
            optimizer.zero_grad()
            plain(**batch)["loss"].backward()
            optimizer.step()

    trainer.run(data(4))

    torch.testing.assert_close(model.state_dict(), plain.state_dict(), rtol=0, atol=0)


def test_reports_hold_the_latest_training_value_and_the_mean_of_the_validation() -> None:
    trainer, model = make(max_epochs=1, validate=True)
    before = copy.deepcopy(model)

    trainer.run(data(1), data(3))

    with torch.no_grad():
        first = before(**data(1)[0])["loss"]
        mean = sum(model(**batch)["loss"].item() for batch in data(3)) / 3
    torch.testing.assert_close(trainer.observation["train/loss"], first)
    assert not trainer.observation["train/loss"].requires_grad
    assert trainer.observation["val/loss"] == pytest.approx(mean)


def test_an_evaluator_works_alone_and_sets_up_once() -> None:
    log: list[str] = []
    handler_class = recording(Handler, "handler", log, "eval_setup eval_loop_begin")
    model = to(Line(), "cpu")
    handler = handler_class(Logic(), runtime_of(model), {"eval_report_keys": ["loss"]})
    evaluator = Evaluator(handler, model)

    whole = evaluator.run(data(3))
    part = evaluator.run(data(3), eval_len=1)

    assert log == ["handler.eval_setup", "handler.eval_loop_begin", "handler.eval_loop_begin"]
    losses = [model(**batch)["loss"].item() for batch in data(3)]
    assert whole == {"val/loss": pytest.approx(sum(losses) / 3)}
    assert part == {"val/loss": pytest.approx(losses[0])}


def test_every_evaluation_is_in_evaluation_mode_and_leaves_the_mode_as_it_was() -> None:
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.frozen = nn.BatchNorm1d(2), nn.BatchNorm1d(2)

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"loss": self.frozen(self.norm(x)).sum()}

    model = to(Normed(), "cpu")
    runtime = runtime_of(model)
    assert runtime is not None
    evaluator = Evaluator(Handler(Logic(), runtime, {}), model)
    modes = []

    for _ in range(2):
        model.train()
        model.frozen.eval()
        evaluator.run([{"x": torch.tensor([[1.0, 2.0], [3.0, 5.0]])}])
        modes.append((model.training, model.norm.training, model.frozen.training))

    assert modes == [(True, True, False)] * 2
    assert model.norm.running_mean is not None
    assert model.norm.running_mean.tolist() == [0, 0]


def test_an_evaluation_computes_no_gradients_and_trains_none_afterwards() -> None:
    seen: list[bool] = []

    class Looking(Logic):
        def eval_step(self, models: Any, batch_idx: int, batch: Any) -> Any:
            seen.append(torch.is_grad_enabled())
            return super().eval_step(models, batch_idx, batch)

    trainer, _ = make(Looking(), max_epochs=1, validate=True)

    trainer.run(data(1), data(2))

    assert seen == [False, False]
    assert torch.is_grad_enabled()


# Loaders.


class Endless:
    def __iter__(self) -> Iterator[int]:
        number = 0
        while True:
            yield number
            number += 1


def test_an_epoch_ends_where_it_is_told_and_the_next_one_starts_the_loader_over() -> None:
    trainer, handler = quiet(max_epochs=2)

    trainer.run(Endless(), train_len=3)

    assert handler.seen == [(0, 0), (1, 1), (2, 2)] * 2


def test_a_loader_shorter_than_the_epoch_is_started_over() -> None:
    trainer, handler = quiet(max_epochs=1)

    trainer.run([7, 8], train_len=5)

    assert [batch for _, batch in handler.seen] == [7, 8, 7, 8, 7]


def test_a_loader_is_let_go_at_the_end_of_the_epoch() -> None:
    closed: list[bool] = []

    class Loader:
        def __iter__(self) -> Iterator[int]:
            try:
                yield from range(100)
            finally:
                closed.append(True)

    class Looking(Quiet):
        def train_epoch_end(self, trainer: Any) -> None:
            assert closed == [True] * trainer.epoch

    Trainer(Looking(), models=nn.ReLU(), optimizers={}, max_epochs=2).run(Loader(), train_len=2)

    assert closed == [True, True]


@pytest.mark.parametrize(
    ("loader", "train_len", "message"),
    [
        (Endless(), None, r"no length.*train_len"),
        ([], None, "An epoch of 0 batches"),
        ([], 3, "gave no batch"),
    ],
)
def test_an_epoch_without_length_or_batches_is_refused(
    loader: Any, train_len: int | None, message: str
) -> None:
    trainer, _ = quiet(max_epochs=1)

    with pytest.raises(ValueError, match=message):
        trainer.run(loader, train_len=train_len)


def test_an_evaluator_and_its_loader_come_together() -> None:
    with pytest.raises(ValueError, match="val_loader is missing"):
        make(max_epochs=1, validate=True)[0].run(data(1))
    with pytest.raises(ValueError, match="evaluator is missing"):
        make(max_epochs=1)[0].run(data(1), data(1))


# Stopping.


@pytest.mark.parametrize(
    ("arguments", "iterations"),
    [
        ({"max_epochs": 2}, 6),
        ({"max_iterations": 4}, 4),
        ({"max_epochs": 5, "max_iterations": 7}, 7),
        ({"stop_trigger": (5, "iteration")}, 5),
        ({"stop_trigger": (1, "epoch")}, 3),
        ({"stop_trigger": lambda trainer: trainer.iteration == 2}, 2),
        ({"max_epochs": 0}, 0),
    ],
)
def test_a_run_stops_at_the_first_condition_that_holds(arguments: Any, iterations: int) -> None:
    trainer, handler = quiet(**arguments)

    trainer.run([0, 1, 2])

    assert trainer.iteration == len(handler.seen) == iterations


def test_a_stop_within_an_epoch_ends_the_epoch_and_the_run_in_order() -> None:
    log: list[str] = []
    handler = recording(Quiet, "handler", log, "train_epoch_end train_cleanup")()

    Trainer(handler, models=nn.ReLU(), optimizers={}, max_iterations=1).run([0, 1])

    assert log == ["handler.train_epoch_end", "handler.train_cleanup"]


def test_early_stopping_sees_the_validation_of_the_same_iteration() -> None:
    losses: list[float] = []

    def worse(trainer: Trainer) -> bool:
        if trainer.iteration % trainer.iterations_per_epoch:
            return False
        losses.append(trainer.observation["val/loss"])
        return len(losses) == 3

    trainer, _ = make(max_epochs=100, stop_trigger=worse, validate=True)

    trainer.run(data(2), data(1))

    assert trainer.epoch == 3
    assert losses == sorted(losses, reverse=True)


def test_a_run_that_nothing_would_stop_is_refused() -> None:
    with pytest.raises(ValueError, match="max_epochs, max_iterations or stop_trigger"):
        quiet()


@pytest.mark.parametrize(
    ("trigger", "error"),
    [((0, "epoch"), ValueError), ((1, "day"), ValueError), ((1,), ValueError), (3, TypeError)],
)
def test_a_trigger_that_is_none_is_refused(trigger: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=r"epoch"):
        quiet(stop_trigger=trigger)


def test_an_exception_leaves_the_trainer_where_it_was() -> None:
    class Failing(Quiet):
        def train_step(self, trainer: Any, batch_idx: int, batch: Any, complete_fn: Any) -> None:
            if batch == "bad":
                raise KeyError(batch)
            super().train_step(trainer, batch_idx, batch, complete_fn)

    handler = Failing()
    trainer = Trainer(handler, models=nn.ReLU(), optimizers={}, max_epochs=1)

    with pytest.raises(KeyError, match="bad"):
        trainer.run(["good", "bad", "good"])
    trainer.run(["good", "mended", "good"])

    assert handler.seen == [(0, "good"), (1, "mended"), (2, "good")]


# Validation and extensions at other times.


def test_several_evaluators_have_their_own_names_and_times() -> None:
    log: list[str] = []

    def evaluator(name: str) -> Evaluator:
        return Evaluator(recording(BaseHandler, name, log, "eval_loop_begin")(BaseLogic(), {}), {})

    trainer, _ = quiet(
        max_epochs=2,
        evaluator={
            "often": (evaluator("often"), (2, "iteration")),
            "seldom": (evaluator("seldom"), (2, "epoch")),
            "usual": evaluator("usual"),
        },
    )

    trainer.run([0, 1, 2], [0])

    each = {name: log.count(f"{name}.eval_loop_begin") for name in trainer.evaluators}
    assert each == {"often": 3, "seldom": 1, "usual": 2}


def test_an_extension_is_called_when_its_trigger_is_due() -> None:
    trainer, _ = quiet(max_epochs=2)
    seen: list[tuple[str, int]] = []

    def each_epoch(trainer: Trainer) -> None:
        seen.append(("epoch", trainer.iteration))

    trainer.extend(each_epoch)
    trainer.extend(
        lambda trainer: seen.append(("third", trainer.iteration)), "third", (3, "iteration")
    )
    trainer.run([0, 1])

    assert seen == [("epoch", 2), ("third", 3), ("epoch", 4)]
    with pytest.raises(ValueError, match="'each_epoch' already"):
        trainer.extend(each_epoch)


# Completing steps.


class Late(Quiet):
    """Completes the steps of an epoch at its end, in an order that can be chosen."""

    def __init__(self, order: list[int]) -> None:
        super().__init__()
        self.order = order
        self.complete: Any = None

    def train_step(self, trainer: Any, batch_idx: int, batch: Any, complete_fn: Any) -> None:
        self.complete = complete_fn

    def train_epoch_end(self, trainer: Any) -> None:
        for index in self.order:
            self.complete(index, f"outputs {index}")


def test_a_handler_may_complete_steps_later() -> None:
    handler = Late([0, 1, 2])

    Trainer(handler, models=nn.ReLU(), optimizers={}, max_epochs=1).run(["a", "b", "c"])

    assert handler.seen == [(0, "a"), (1, "b"), (2, "c")]


@pytest.mark.parametrize("order", [[1], [0, 0], [0, 1, 2, 3]])
def test_a_handler_must_complete_steps_in_order_and_once(order: list[int]) -> None:
    trainer = Trainer(Late(order), models=nn.ReLU(), optimizers={}, max_epochs=1)

    with pytest.raises(RuntimeError, match=f"completed iteration {order[-1]} of the epoch"):
        trainer.run(["a", "b", "c"])


def test_an_evaluation_must_complete_batches_in_order() -> None:
    class Wrong(BaseHandler):
        def eval_step(self, evaluator: Any, batch_idx: int, batch: Any, complete_fn: Any) -> None:
            complete_fn(batch_idx + 1, None)

    with pytest.raises(RuntimeError, match="completed batch 1, but 0 is the next"):
        Evaluator(Wrong(BaseLogic(), {}), {}).run([0])


# Resuming.


def saved(trainer: Trainer) -> Any:
    file = io.BytesIO()
    torch.save(trainer.state_dict(), file)
    file.seek(0)
    return torch.load(file)


@pytest.mark.parametrize("stop", [3, 4, 6, 8])
def test_a_resumed_run_ends_where_an_uninterrupted_one_does(stop: int) -> None:
    whole, expected = make(max_epochs=2)
    whole.run(data(4))
    first, _ = make(max_epochs=2, max_iterations=stop)
    first.run(data(4))

    second, model = make(max_epochs=2)
    second.load_state_dict(saved(first))
    second.run(data(4))

    assert second.iteration == 8
    torch.testing.assert_close(model.state_dict(), expected.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize("stop", [1, 2, 3, 4, 6, 7, 8])
def test_a_run_resumed_within_an_accumulation_window_is_the_uninterrupted_one(stop: int) -> None:
    def accumulating(**arguments: Any) -> tuple[Trainer, Line]:
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
        options = {"gradient_accumulation_steps": 3, "grad_scaler": scaler}
        return make(Logic(options=options), max_epochs=2, **arguments)

    whole, expected = accumulating()
    whole.run(data(5))
    first, _ = accumulating(max_iterations=stop)
    first.run(data(5))

    between, _ = accumulating()  # takes the state and gives it on without a step
    between.load_state_dict(saved(first))
    second, model = accumulating()
    second.load_state_dict(saved(between))
    second.run(data(5))

    torch.testing.assert_close(model.state_dict(), expected.state_dict(), rtol=0, atol=0)


def test_a_state_from_within_a_window_of_another_length_is_refused() -> None:
    first, _ = make(Logic(options={"gradient_accumulation_steps": 3}), max_iterations=2)
    first.run(data(5))
    second, _ = make(Logic(options={"gradient_accumulation_steps": 2}), max_iterations=4)

    with pytest.raises(ValueError, match=r"2 batches into a window of 3, .*steps=2"):
        second.load_state_dict(first.state_dict())


@pytest.mark.parametrize(("batches", "length", "steps"), [(3, 6, [1, 3, 5]), (7, 3, [1, 2])])
def test_windows_end_with_the_trainers_epoch_and_not_with_the_loader(
    batches: int, length: int, steps: list[int]
) -> None:
    trainer, _ = make(Logic(options={"gradient_accumulation_steps": 2}), max_epochs=2)
    stepped: list[int] = []
    trainer.optimizers["main"].register_step_post_hook(lambda *_: stepped.append(trainer.iteration))

    trainer.run(data(batches), train_len=length)

    assert stepped == steps + [length + each for each in steps]


def scaled_block(**arguments: Any) -> Trainer:
    scaler = torch.amp.GradScaler("cpu", growth_interval=2, init_scale=4.0)
    model = to(Line(), "cpu", options={"grad_scaler": scaler})
    runtime = runtime_of(model)
    assert runtime is not None
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    handler = Handler(CodeBlockLogic(), runtime, {})
    return Trainer(handler, models=model, optimizers=optimizer, **arguments)


def test_the_scaler_of_a_runtime_is_saved_with_the_trainer() -> None:
    first, second = scaled_block(max_iterations=5), scaled_block(max_iterations=6)
    first.run(data(6))
    second.load_state_dict(saved(first))

    second.run(data(6))

    runtime = runtime_of(second.models["main"])
    assert runtime is not None
    assert runtime.options["grad_scaler"].get_scale() == 4.0 * 2**3  # grew at 2, 4 and 6


class Sampled(Quiet):
    """Writes down its batches, and draws a number for each as dropout would."""

    def train_post_step(self, trainer: Any, batch_idx: int, batch: Any, outputs: Any) -> None:
        self.seen.append((batch.tolist(), torch.rand(()).item()))


def shuffling(kind: str) -> DataLoader[int]:
    own = torch.Generator().manual_seed(3)
    numbers: Any = range(10)
    if kind == "global":
        return DataLoader(numbers, 2, shuffle=True)
    if kind == "loader":
        return DataLoader(numbers, 2, shuffle=True, generator=own)
    if kind == "workers":
        return DataLoader(numbers, 2, shuffle=True, num_workers=1, generator=own)
    if kind == "sampler":
        return DataLoader(numbers, 2, sampler=RandomSampler(numbers, generator=own))

    class Python(Sampler[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(random.sample(numbers, len(numbers)))

        def __len__(self) -> int:
            return len(numbers)

    return DataLoader(numbers, 2, sampler=Python())


@pytest.mark.parametrize("kind", ["global", "loader", "workers", "sampler", "python"])
@pytest.mark.parametrize(("stop", "length"), [(3, 5), (5, 5), (7, 5), (6, 8), (5, 8)])
def test_a_resumed_run_sees_the_batches_that_an_uninterrupted_one_does(
    kind: str, stop: int, length: int
) -> None:
    def run(handler: Sampled, iterations: int, state: Any = None) -> Trainer:
        trainer = Trainer(handler, models={}, optimizers={}, max_iterations=iterations)
        if state is not None:
            trainer.load_state_dict(state)
        trainer.run(shuffling(kind), train_len=length)
        return trainer

    torch.manual_seed(0)
    random.seed(0)
    whole = Sampled()
    run(whole, 16)
    torch.manual_seed(0)
    random.seed(0)
    parts = Sampled()
    state = saved(run(parts, stop))
    torch.manual_seed(1)
    random.seed(1)

    run(parts, 16, state)

    assert parts.seen == whole.seen


def test_a_run_that_failed_goes_on_with_the_batches_that_were_left() -> None:
    class Failing(Sampled):
        def train_step(self, trainer: Any, batch_idx: int, batch: Any, complete_fn: Any) -> None:
            if len(self.seen) == 3 and not trainer.observation:
                trainer.report({"failed": 1})
                raise KeyboardInterrupt
            super().train_step(trainer, batch_idx, batch, complete_fn)

    handler = Failing()
    trainer = Trainer(handler, models={}, optimizers={}, max_epochs=1)
    loader = shuffling("global")
    with pytest.raises(KeyboardInterrupt):
        trainer.run(loader)

    trainer.run(loader)

    assert sorted(number for batch, _ in handler.seen for number in batch) == list(range(10))


def test_another_ranks_random_state_is_left_alone_with_a_warning() -> None:
    handler = Sampled()
    first = Trainer(Sampled(), models={}, optimizers={}, max_iterations=3)
    first.run(shuffling("global"))
    state = saved(first)
    state["position"]["rank"] = 1
    second = Trainer(handler, models={}, optimizers={}, max_iterations=5)

    with pytest.warns(UserWarning, match="saved by rank 1 in the middle of an epoch, and rank 0"):
        second.load_state_dict(state)
    torch.manual_seed(7)
    second.run([torch.tensor(each) for each in range(5)])

    drawn = [number for _, number in handler.seen]
    torch.manual_seed(7)
    assert drawn == [torch.rand(()).item() for _ in range(2)]


@pytest.mark.parametrize("at", [1, 2, 3, 4])
def test_what_is_due_after_the_extension_that_saves_is_done_on_resuming(at: int) -> None:
    class Patience:
        """A stop condition, or trigger of an extension, that counts how often it is asked."""

        def __init__(self, limit: int) -> None:
            self.asked, self.limit = 0, limit

        def __call__(self, trainer: Trainer) -> bool:
            self.asked += 1
            return self.asked % self.limit == 0

        def state_dict(self) -> dict[str, int]:
            return {"asked": self.asked}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.asked = state["asked"]

    states: list[Any] = []

    def run(state: Any = None) -> tuple[Trainer, list[int]]:
        trainer, _ = make(max_epochs=9, stop_trigger=Patience(5))
        late: list[int] = []
        counter = Counter()
        trainer.extend(lambda _: None, "early", (1, "iteration"))
        trainer.extend(lambda each: states.append(saved(each)), "save", (1, "iteration"))
        trainer.extend(lambda each: late.append(each.iteration), "late", Patience(2))
        trainer.extend(counter, trigger=(1, "iteration"))
        if state is not None:
            trainer.load_state_dict(state)
        trainer.run(data(3))
        return trainer, [*late, counter.calls]

    whole, expected = run()
    resumed, done = run(states[at - 1])

    assert expected == [2, 4, 5]
    assert done == [*(each for each in (2, 4) if each >= at), 5]
    assert resumed.iteration == whole.iteration == 5
    assert resumed.observation == whole.observation


def test_a_checkpoint_taken_by_an_extension_resumes_at_the_next_epoch() -> None:
    trainer, _ = make(max_epochs=1)
    states: list[Any] = []
    trainer.extend(lambda trainer: states.append(saved(trainer)), "checkpoint")
    trainer.run(data(2))

    resumed, _ = make(max_epochs=2)
    resumed.load_state_dict(states[0])

    assert (resumed.epoch, resumed.iteration) == (1, 2)


def test_a_trainer_that_is_done_does_not_train_again() -> None:
    first, _ = make(max_epochs=1)
    first.run(data(2))
    second, model = make(max_epochs=1)
    second.load_state_dict(saved(first))
    before = copy.deepcopy(model.state_dict())

    second.run(data(2))

    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


def test_a_run_can_be_prolonged() -> None:
    trainer, handler = quiet(max_epochs=1)
    trainer.run([0, 1])

    trainer.max_epochs = 2
    trainer.run([0, 1])

    assert handler.seen == [(0, 0), (1, 1)] * 2


class Counter:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, trainer: Trainer) -> None:
        self.calls += 1

    def state_dict(self) -> dict[str, int]:
        return {"calls": self.calls}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.calls = state["calls"]


def test_an_extension_with_state_is_saved_with_the_trainer() -> None:
    first, second = quiet(max_epochs=1)[0], quiet(max_epochs=3)[0]
    counter = Counter()
    first.extend(Counter())
    second.extend(counter)
    first.run([0])

    second.load_state_dict(first.state_dict())
    second.run([0])

    assert counter.calls == 3


def test_the_state_of_other_models_or_optimizers_is_refused() -> None:
    trainer, model = make(max_epochs=1)
    other = Trainer(Quiet(), models={"net": model}, optimizers={}, max_epochs=1)

    with pytest.raises(ValueError, match=r"with the models \['main'\].*has \['net'\]"):
        other.load_state_dict(trainer.state_dict())


def test_an_epoch_of_another_length_cannot_go_on() -> None:
    first, second = quiet(max_epochs=1)[0], quiet(max_epochs=2)[0]
    first.run([0, 1])
    second.load_state_dict(first.state_dict())

    with pytest.raises(ValueError, match="2 iterations and has 3 now"):
        second.run([0, 1, 2])


def test_the_length_of_an_epoch_is_unknown_before_the_first_run() -> None:
    trainer, _ = quiet(max_epochs=1)

    assert trainer.epoch == 0
    with pytest.raises(RuntimeError, match="once run"):
        _ = trainer.iterations_per_epoch


# What a timeline sees.


def test_a_run_reports_its_steps_with_their_numbers() -> None:
    class ListSink:
        def __init__(self) -> None:
            self.events: list[TraceEvent] = []

        def record(self, event: TraceEvent) -> None:
            self.events.append(event)

    trainer, _ = make(max_epochs=2)
    sink = ListSink()
    add_sink(sink)
    try:
        trainer.run(data(1))
    finally:
        remove_sink(sink)
        tracing.set_step(-1)

    step = [
        ("load batch", "io"),
        ("train_pre_step", "user"),
        ("move batch", "io"),
        ("forward", "compute"),
        ("backward", "compute"),
        ("optimizer", "compute"),
        ("train_post_step", "user"),
        ("step", "step"),
    ]
    told = [(event.name, event.category) for event in sink.events]
    epoch = [("train_epoch_begin", "user"), *step, ("train_epoch_end", "user")]
    assert told == [("initialize_module", "user"), *epoch, *epoch, ("train_cleanup", "user")]
    steps = [event.step for event in sink.events if event.name == "forward"]
    assert steps == [0, 1]


def test_validations_and_extensions_are_reported_with_their_names() -> None:
    class ListSink:
        def __init__(self) -> None:
            self.names: list[str] = []

        def record(self, event: TraceEvent) -> None:
            self.names.append(event.name)

    trainer, _ = make(max_epochs=1, validate=True)
    trainer.extend(lambda trainer: None, name="save", trigger=(1, "epoch"))
    sink = ListSink()
    add_sink(sink)
    try:
        trainer.run(data(1), data(2))
    finally:
        remove_sink(sink)
        tracing.set_step(-1)

    after = sink.names[sink.names.index("step") + 1 :]
    batch = ["load batch", "eval_pre_step", "move batch", "forward", "eval_post_step"]
    assert after == [
        "train_validation_begin",
        *batch * 2,
        "load batch",  # there is none
        "train_validation_end",
        "validation",
        "save",
        "train_epoch_end",
        "train_cleanup",
    ]

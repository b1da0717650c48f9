"""The progress line: one line on a terminal, plain lines elsewhere, rank 0 alone."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore

from trine.core import to
from trine.core.handler import BaseHandler, BaseLogic, Handler, Logic
from trine.core.runtime import PyTorchRuntime
from trine.core.training import Evaluator, Trainer
from trine.core.training.progress import ProgressLine, is_rank_zero


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    """Shows the seconds it is set to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def lines_at(stream: io.StringIO, seconds: list[float], **values: Any) -> str:
    """What one step at each of these times writes."""
    clock = Clock()
    line = ProgressLine(stream, clock)
    for done, clock.now in enumerate(seconds, start=1):
        line.update("epoch 1/2", done, len(seconds), values, final=done == len(seconds))
    return stream.getvalue()


def test_elsewhere_there_is_a_line_every_ten_seconds_and_at_the_end() -> None:
    written = lines_at(io.StringIO(), [4, 8, 12, 16, 20], loss=0.25)

    assert written.splitlines() == [
        "epoch 1/2  3/5  loss 0.25  0.25 steps/s",
        "epoch 1/2  5/5  loss 0.25  0.25 steps/s",
    ]


def test_on_a_terminal_one_line_is_written_over_and_ended_at_the_end() -> None:
    written = lines_at(Terminal(), [1, 1.05, 2, 4])

    assert written == (
        "\repoch 1/2  1/4  1 steps/s\repoch 1/2  3/4  2 steps/s\repoch 1/2  4/4  0.5 steps/s\n"
    )


def test_a_shorter_line_covers_the_longer_one_before_it() -> None:
    stream, clock = Terminal(), Clock()
    line = ProgressLine(stream, clock)

    clock.now = 1
    line.update("x", 1, 9, {"loss": 123.4})
    clock.now = 2
    line.update("x", 2, 9, {})

    first, second = stream.getvalue().split("\r")[1:]
    assert second == "x  2/9  1 steps/s".ljust(len(first))


def test_a_line_left_open_is_ended_by_closing_and_only_once() -> None:
    stream, clock = Terminal(), Clock()
    line = ProgressLine(stream, clock)
    clock.now = 1
    line.update("x", 1, 9, {})

    line.close()
    line.close()

    assert stream.getvalue().count("\n") == 1


def test_values_that_are_no_single_numbers_are_left_out() -> None:
    written = lines_at(
        io.StringIO(), [0], one=torch.tensor([2.0]), two=torch.ones(2), text="?", none=None
    )

    assert written == "epoch 1/2  1/1  one 2\n"


def test_a_value_is_read_only_when_a_line_is_due() -> None:
    class Costly:
        reads = 0

        def __float__(self) -> float:
            self.reads += 1
            return 1.0

    costly = Costly()
    lines_at(io.StringIO(), [1, 2, 3, 4], loss=costly)

    assert costly.reads == 1


def test_rank_zero_is_who_the_process_group_or_the_environment_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    assert is_rank_zero()
    monkeypatch.setenv("RANK", "1")
    assert not is_rank_zero()

    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        assert is_rank_zero()
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("rank", ["", " ", "none"])
def test_a_rank_that_is_no_number_does_not_stop_a_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], rank: str
) -> None:
    monkeypatch.setenv("RANK", rank)

    trainer(max_epochs=1, progress_bar=True).run([{"x": torch.ones(())}])

    assert "epoch 1/1  1/1" in capsys.readouterr().err


class Broken(io.StringIO):
    """A pipe that nobody reads any more."""

    writes = 0

    def write(self, text: str) -> int:
        self.writes += 1
        raise BrokenPipeError


def closed() -> io.StringIO:
    stream = io.StringIO()
    stream.close()
    return stream


@pytest.mark.parametrize("stream", [None, Broken(), closed()])
def test_a_run_goes_on_when_its_standard_error_does_not(
    monkeypatch: pytest.MonkeyPatch, stream: Any
) -> None:
    monkeypatch.setattr("sys.stderr", stream)
    running = trainer(max_epochs=2, progress_bar=True)

    running.run([{"x": torch.ones(())}] * 2)

    assert running.iteration == 4
    assert getattr(stream, "writes", 1) == 1  # and it is not tried again


def trainer(**arguments: Any) -> Trainer:
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.tensor(1.0))

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": self.weight * x}

    model = to(Scale(), "cpu")
    options = {"train_report_keys": ["loss"]}
    handler = Handler(Logic(), PyTorchRuntime("cpu", {}), options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    return Trainer(handler, models=model, optimizers=optimizer, **arguments)


BATCHES = [{"x": torch.tensor(1.0)}] * 2


def test_a_trainer_shows_each_epoch_with_what_was_reported(
    capsys: pytest.CaptureFixture[str],
) -> None:
    trainer(max_epochs=2, progress_bar=True).run(BATCHES)

    shown = [line.rsplit("  ", 1)[0] for line in capsys.readouterr().err.splitlines()]
    assert shown == ["epoch 1/2  2/2  train/loss 0.5", "epoch 2/2  2/2  train/loss -0.5"]


def test_a_run_without_a_number_of_epochs_shows_none(capsys: pytest.CaptureFixture[str]) -> None:
    trainer(max_iterations=1, progress_bar=True).run(BATCHES)

    assert capsys.readouterr().err.startswith("epoch 1  1/2  train/loss 1  ")


def test_other_ranks_and_trainers_that_were_not_asked_show_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer(max_epochs=1).run(BATCHES)
    monkeypatch.setenv("RANK", "3")
    trainer(max_epochs=1, progress_bar=True).run(BATCHES)

    assert capsys.readouterr().err == ""


class Silent(BaseHandler):
    def eval_step(self, evaluator: Any, batch_idx: int, batch: Any, complete_fn: Any) -> None:
        complete_fn(batch_idx, None)


@pytest.mark.parametrize(
    ("loader", "shown"), [([1, 2, 3], "validation  3/3"), (iter([1, 2, 3]), "validation  3")]
)
def test_an_evaluator_shows_how_far_it_is(
    loader: Any, shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Evaluator(Silent(BaseLogic(), {}), {}, progress_bar=True).run(loader)

    assert capsys.readouterr().err.rsplit("  ", 1)[0] == shown

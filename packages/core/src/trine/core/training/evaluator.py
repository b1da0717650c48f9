"""Evaluator: one pass over a loader without gradients, and the mean of what was reported."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from trine.core.handler.base import BaseHandler
from trine.core.tracing import span
from trine.core.training.progress import ProgressLine, is_rank_zero

__all__ = ["Evaluator"]


class Evaluator:
    """Evaluates models batch by batch, by itself or within a trainer's validation.

    Args:
        handler: what is done with each batch.
        models: the models by name, or one, which is called `main`.
        progress_bar: show on rank 0 how far an evaluation is.
    """

    def __init__(
        self,
        handler: BaseHandler,
        models: nn.Module | Mapping[str, nn.Module],
        *,
        progress_bar: bool = False,
    ) -> None:
        self.handler = handler
        self.models = {"main": models} if isinstance(models, nn.Module) else dict(models)
        self._progress_bar = progress_bar
        self._is_set_up = False
        self._pending: deque[tuple[int, Any]] = deque()
        self._values: dict[str, list[Any]] = {}

    def setup(self, loader: Iterable[Any]) -> None:
        """Let the handler prepare the models; a trainer does so, and else the first `run`."""
        self.handler.eval_setup(self, loader)
        self._is_set_up = True

    def report(self, values: Mapping[str, Any]) -> None:
        """Take values of one batch, single numbers; `run` returns their means."""
        for name, value in values.items():
            kept = value.detach() if isinstance(value, Tensor) else value
            self._values.setdefault(name, []).append(kept)

    def run(self, loader: Iterable[Any], *, eval_len: int | None = None) -> dict[str, float]:
        """Evaluate, and average what was reported.

        The models are in evaluation mode meanwhile, and afterwards in the mode they were in.

        Args:
            loader: batches.
            eval_len: how many of them; by default all.

        Returns:
            The mean of each reported value over this rank's batches, each batch counting
            the same.
        """
        modes = [
            (model, [(module, module.training) for module in model.modules()])
            for model in self.models.values()
        ]
        try:
            if not self._is_set_up:
                self.setup(loader)
            for model in self.models.values():
                model.eval()
            return self._run(loader, eval_len)
        finally:
            for model, before in modes:
                model.train(before[0][1])  # a module may do more than remember the mode
                for module, training in before:
                    module.training = training

    def _run(self, loader: Iterable[Any], eval_len: int | None) -> dict[str, float]:
        self._pending.clear()
        self._values.clear()
        total = eval_len if eval_len is not None else _length(loader)
        line = ProgressLine() if self._progress_bar and is_rank_zero() else None
        done = 0
        self.handler.eval_loop_begin(self)
        try:
            with torch.no_grad():
                for index, batch in enumerate(_timed(islice(loader, eval_len))):
                    self._pending.append((index, batch))
                    self.handler.eval_step(self, index, batch, self._complete)
                    done = index + 1
                    if line is not None:
                        line.update("validation", done, total, {})
            self.handler.eval_loop_end(self)
            if line is not None:
                line.update("validation", done, total, {}, final=True)
        finally:
            if line is not None:
                line.close()
        return {
            name: sum(float(value) for value in values) / len(values)
            for name, values in self._values.items()
        }

    def _complete(self, batch_idx: int, outputs: Any) -> None:
        """What a handler calls when a step is complete."""
        index, batch = self._pending[0] if self._pending else (None, None)
        if index != batch_idx:
            raise RuntimeError(
                f"The handler completed batch {batch_idx}, but {index} is the next to "
                "complete. Steps complete in order and once."
            )
        self._pending.popleft()
        self.handler.eval_post_step(self, batch_idx, batch, outputs)


def _timed(batches: Iterator[Any]) -> Iterator[Any]:
    while True:
        with span("load batch", category="io"):
            try:
                batch = next(batches)
            except StopIteration:
                return
        yield batch


def _length(loader: Iterable[Any]) -> int | None:
    try:
        return len(loader)  # type: ignore[arg-type]  # asking is the point
    except (TypeError, NotImplementedError):
        return None

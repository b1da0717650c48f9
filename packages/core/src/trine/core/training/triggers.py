"""When something is due: every so many epochs or iterations, or as a function says."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from trine.core.training.trainer import Trainer

__all__ = ["Trigger", "TriggerLike", "make_trigger"]

Trigger = Callable[["Trainer"], bool]
"""Asked once after each iteration; True when due."""

TriggerLike = Trigger | tuple[int, Literal["epoch", "iteration"]]
"""A function of the trainer, or a period such as `(1, "epoch")`."""


def make_trigger(spec: TriggerLike) -> Trigger:
    """The trigger that `spec` describes.

    Raises:
        ValueError: if it is a tuple, but no period.
        TypeError: if it is neither callable nor a tuple.
    """
    if callable(spec):
        return spec
    if not isinstance(spec, tuple):
        raise TypeError(
            f"A trigger is a function of the trainer or a tuple such as (1, 'epoch'), "
            f"got {type(spec).__name__}."
        )
    match spec:
        case (int(period), "epoch") if period > 0:
            return lambda trainer: (
                trainer.iteration > 0
                and trainer.iteration % (period * trainer.iterations_per_epoch) == 0
            )
        case (int(period), "iteration") if period > 0:
            return lambda trainer: trainer.iteration > 0 and trainer.iteration % period == 0
    raise ValueError(
        f"{spec!r} is no period: expected a number above 0 and 'epoch' or 'iteration'."
    )

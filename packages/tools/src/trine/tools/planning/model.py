"""Build the model to plan for, without memory, from where the user's program has it."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import torch
from torch import nn

from trine.core.planning import PlanError
from trine.tools.planning.arguments import place_of

__all__ = ["build_on_meta"]


def build_on_meta(place: str, dtype: torch.dtype | None = None) -> nn.Module:
    """The model that a function or class makes when it is called without arguments.

    Args:
        place: `package.module:factory`, importable from the current folder too.
        dtype: of its floating-point parameters; None leaves them as they are made.

    Raises:
        PlanError: if there is no such thing, or what it makes is no module.
    """
    module_name, name = place_of(place)
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        factory = importlib.import_module(module_name)
        for part in name.split("."):
            factory = getattr(factory, part)
    except (Exception, SystemExit) as error:  # a user's module may raise anything
        raise PlanError(f"{place} cannot be found. {type(error).__name__}: {error}") from error
    if isinstance(factory, nn.Module):
        raise PlanError(
            f"{place} is a model. Expected a function or class that makes one, so that it can be "
            "made without memory."
        )
    if not callable(factory):
        raise PlanError(f"{place} is {type(factory).__name__}, not a function that makes a model.")
    try:
        with torch.device("meta"):
            model = factory()
    except (Exception, SystemExit) as error:  # one that parses our arguments exits
        raise PlanError(
            f"{place} does not make a model when it is called without arguments on the meta "
            f"device. {type(error).__name__}: {error}"
        ) from error
    if not isinstance(model, nn.Module):
        raise PlanError(f"{place} makes {type(model).__name__}; expected a torch.nn.Module.")
    return model.to("meta" if dtype is None else dtype).to("meta")

"""What else training needs to go on: `extra`, packed when saved, and given back when loaded.

Objects that are given their state run code of the user's, which may refuse it. They come
before the model, and what they were before is put back if one of them fails on any rank.
"""

from __future__ import annotations

import copy
import logging
import reprlib
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from torch.distributed.tensor import DTensor

from trine.distributed.checkpoint.state import require_readable, saved_bytes

__all__ = ["Wanted", "load_wanted", "packed_extra", "wanted_of"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Wanted:
    """An object that is to be given its state.

    Attributes:
        where: it stands, as in `extra['scheduler']`.
        owner: has a `load_state_dict`.
        state: that was saved in its place.
    """

    where: str
    owner: Any
    state: Any


def packed_extra(extra: object) -> bytes:
    """What the user wants to find again, as a file that is safe to load.

    Raises:
        ValueError: if a part of it is neither plain data nor has a `state_dict`.
    """
    plain = _plain(extra, "extra")
    require_readable("extra", plain)
    return saved_bytes(plain)


def wanted_of(extra: object, saved: object) -> list[Wanted]:
    """The objects that are to be loaded, each with its state; nothing is loaded yet.

    Args:
        extra: objects with a `load_state_dict` in the containers in which they were saved.
            What else is in them is passed over, as is what was saved and is not wanted.
        saved: the plain data of `packed_extra`.

    Raises:
        ValueError: if nothing was saved in the place of an object, naming both.
    """
    return list(_walk(extra, saved, "extra"))


def load_wanted(wanted: list[Wanted], undo: ExitStack) -> None:
    """Give objects their state.

    Args:
        wanted: what to load.
        undo: gets what puts back the state that the objects have now.

    Raises:
        ValueError: if one of them does not take it, naming it.
    """
    for each in wanted:
        if callable(getattr(each.owner, "state_dict", None)):
            undo.callback(_put_back, each, copy.deepcopy(each.owner.state_dict()))
        try:
            each.owner.load_state_dict(each.state)
        except Exception as error:  # of the user's
            raise ValueError(
                f"{each.where} ({type(each.owner).__qualname__}) does not take the state that was "
                f"saved, {reprlib.repr(each.state)}: {type(error).__name__}: {error}"
            ) from error


def _put_back(wanted: Wanted, before: object) -> None:
    try:
        wanted.owner.load_state_dict(before)
    except Exception as error:  # the reason why it is put back must not be lost
        _log.warning(
            "%s (%s) does not take back its own state either, and may have changed: %s: %s",
            wanted.where,
            type(wanted.owner).__qualname__,
            type(error).__name__,
            error,
        )


def _walk(given: object, saved: object, where: str) -> Iterator[Wanted]:
    if hasattr(given, "load_state_dict"):
        yield Wanted(where, given, saved)
    elif isinstance(given, Mapping):
        for key, each in given.items():
            inner = f"{where}[{key!r}]"
            if isinstance(saved, Mapping) and key in saved:
                yield from _walk(each, saved[key], inner)
            else:
                _require_nothing_in(each, inner, saved, where)
    elif isinstance(given, list | tuple):
        fits = isinstance(saved, list | tuple) and len(saved) == len(given)
        for i, each in enumerate(given):
            inner = f"{where}[{i}]"
            if fits:
                assert isinstance(saved, list | tuple)
                yield from _walk(each, saved[i], inner)
            else:
                _require_nothing_in(each, inner, saved, f"{where}, a list of {len(given)} here,")


def _require_nothing_in(given: object, where: str, saved: object, around: str) -> None:
    for wanted in _walk_all(given, where):
        raise ValueError(
            f"{wanted} was to be loaded, but was not saved: in the checkpoint {around} is "
            f"{_described(saved)}. Leave out of extra what was not saved."
        )


def _walk_all(given: object, where: str) -> Iterator[str]:
    """Where all objects with a `load_state_dict` stand."""
    if hasattr(given, "load_state_dict"):
        yield where
    elif isinstance(given, Mapping):
        for key, each in given.items():
            yield from _walk_all(each, f"{where}[{key!r}]")
    elif isinstance(given, list | tuple):
        for i, each in enumerate(given):
            yield from _walk_all(each, f"{where}[{i}]")


def _described(saved: object) -> str:
    if isinstance(saved, Mapping):
        keys = ", ".join(sorted(map(repr, saved)))
        return f"a dict with the keys {keys}" if keys else "an empty dict"
    if isinstance(saved, list | tuple):
        return f"a {type(saved).__name__} of {len(saved)}"
    return reprlib.repr(saved)


def _plain(value: object, where: str) -> object:
    if isinstance(value, DTensor):
        raise ValueError(
            f"{where} is a DTensor, of which each rank holds a part. Save sharded values as part "
            "of the model or the optimizer, or make it whole with full_tensor()."
        )
    state_dict = getattr(value, "state_dict", None)
    if callable(state_dict):
        return _plain(state_dict(), where)
    if isinstance(value, dict):
        return type(value)({key: _plain(each, f"{where}[{key!r}]") for key, each in value.items()})
    if type(value) in (list, tuple):
        assert isinstance(value, list | tuple)
        return type(value)(_plain(each, f"{where}[{i}]") for i, each in enumerate(value))
    return value

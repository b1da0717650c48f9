"""Reach every tensor of a nested batch, keeping the types that hold them.

Handles mappings, lists, tuples, namedtuples, sets and dataclasses. Everything else is
a leaf: tensors are given to the function, other leaves are returned as they are.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

from torch import Tensor

__all__ = ["map_tensors", "tensors_of"]


def map_tensors(batch: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """A batch of the same shape and types with `function` applied to each tensor.

    Containers in which nothing changed are returned as they are, so a batch without
    tensors to change costs no copies and keeps its identity. The caller's containers
    are never changed.
    """
    if isinstance(batch, Tensor):
        return function(batch)
    if batch is None or isinstance(batch, (str, bytes, int, float)):
        return batch
    if isinstance(batch, Mapping):
        mapped = {key: map_tensors(value, function) for key, value in batch.items()}
        if all(mapped[key] is value for key, value in batch.items()):
            return batch
        return _with_items(batch, mapped)
    if isinstance(batch, (list, tuple)):
        values = [map_tensors(value, function) for value in batch]
        if all(new is old for new, old in zip(values, batch, strict=True)):
            return batch
        return _with_values(batch, values)
    if isinstance(batch, (set, frozenset)):
        members = list(batch)
        values = [map_tensors(value, function) for value in members]
        if all(new is old for new, old in zip(values, members, strict=True)):
            return batch
        return type(batch)(values)
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        changed = {}
        for field in dataclasses.fields(batch):
            old = getattr(batch, field.name, None)
            new = map_tensors(old, function)
            if new is not old:
                changed[field.name] = new
        if not changed:
            return batch
        twin = copy.copy(batch)
        for name, value in changed.items():
            object.__setattr__(twin, name, value)  # frozen dataclasses too
        return twin
    return batch


def tensors_of(batch: Any) -> Iterator[Tensor]:
    """Every tensor of a nested batch, in the order of its containers."""
    if isinstance(batch, Tensor):
        yield batch
    elif batch is None or isinstance(batch, (str, bytes, int, float)):
        return
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from tensors_of(value)
    elif isinstance(batch, (list, tuple, set, frozenset)):
        for value in batch:
            yield from tensors_of(value)
    elif dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        for field in dataclasses.fields(batch):
            yield from tensors_of(getattr(batch, field.name, None))


def _with_items(old: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    if type(old) is dict:
        return items
    if not isinstance(old, MutableMapping):
        return type(old)(items)  # type: ignore[call-arg]  # a read-only mapping wraps another
    # A copy keeps a default_factory and the attributes of subclasses.
    if isinstance(old, dict) or hasattr(old, "__copy__"):
        twin = copy.copy(old)
    else:
        # A shallow copy could share the inner storage, and setting items would then reach
        # the caller's object. The memo makes the values leaves, so no tensor is copied.
        twin = copy.deepcopy(old, {id(value): value for value in old.values()})
    for key, value in items.items():
        twin[key] = value
    return twin


def _with_values(old: list[Any] | tuple[Any, ...], values: list[Any]) -> Any:
    if type(old) is list:
        return values
    if type(old) is tuple:
        return tuple(values)
    if hasattr(old, "_fields"):
        return type(old)(*values)
    return type(old)(values)  # list and tuple subclasses take an iterable

"""Reach every tensor of a nested batch, keeping the types that hold them.

Looks inside mappings, lists, tuples, namedtuples, sets, deques, dataclasses, attrs classes
and packed sequences, however deep they are nested. Everything else is a leaf: tensors are
given to the function, other leaves are returned as they are.

The walk keeps its own stack, so nesting costs no Python frames. Modules and iterators are
never looked into: copying the first is not ours to do, and the second can be read once.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import UserList, deque
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from functools import lru_cache
from itertools import pairwise
from operator import is_
from typing import Any, Final, NamedTuple

from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

__all__ = ["map_tensors", "tensors_of"]


def map_tensors(
    batch: Any,
    function: Callable[[Tensor], Tensor],
    *,
    objects: Callable[[Any], Any] | None = None,
) -> Any:
    """A batch of the same shape and types with `function` applied to each tensor.

    What is in several places of the batch (a tensor, or a container) is mapped once, and
    the result is in the same places. Containers in which nothing changed are returned as
    they are, so a batch without tensors to change costs no copies and keeps its identity.
    The caller's containers are never changed.

    Of a packed sequence the lengths (`batch_sizes`) are left alone: torch keeps them on
    the host. Dataclasses and attrs classes are copied, not made anew: neither `__init__`
    nor `__post_init__` runs, and fields that hold no tensor keep their values. A class that is
    a container besides has both its items and its fields mapped. What else hangs on an object
    of a subclass (attributes that are no fields) is kept as it is. A read-only mapping is
    made anew by calling its class with a dict.

    Args:
        batch: anything.
        function: called with each tensor, once.
        objects: called, instead of looking inside, with each object that has a method
            `to` of its own and is neither a tensor nor a packed sequence. Without it
            these are containers and leaves like any other.

    Raises:
        ValueError: if a container contains itself; the message says where.
        TypeError: if a container with a tensor that changed cannot be made anew; likewise.
    """
    if isinstance(batch, Tensor):
        return function(batch)
    kind_of = _kind_of if objects is None else _kind_or_object
    # The originals are kept beside the results: a container may make its values when they
    # are asked for, and the id of one that is gone could be given to another.
    memo: dict[int, tuple[Any, Any]] = {}
    outer: list[tuple[Any, _Container, list[Any], list[Any], Iterator[Any]]] = []
    container, inside = None, _LIST
    old: list[Any] = [batch]
    new: list[Any] = []
    pending = iter(old)
    result: Any
    while True:
        for value in pending:
            kind = kind_of(type(value))
            if kind is None:
                new.append(value)
                continue
            seen = memo.get(id(value))
            if seen is not None:
                if seen is _OPEN:
                    around = [frame[0] for frame in outer[1:]]
                    raise ValueError(_contains_itself([*around, container], value))
                new.append(seen[1])
            elif kind is _TENSOR:
                result = function(value)
                memo[id(value)] = (value, result)
                new.append(result)
            elif isinstance(kind, _Container):
                memo[id(value)] = _OPEN
                outer.append((container, inside, old, new, pending))
                container, inside = value, kind
                old, new = kind.values(value), []
                pending = iter(old)
                break
            else:
                assert objects is not None
                result = objects(value)
                memo[id(value)] = (value, result)
                new.append(result)
        else:
            if not outer:
                return new[0]
            if all(map(is_, old, new)):
                result = container
            else:
                try:
                    result = inside.rebuild(container, old, new)
                except Exception as error:
                    around = [frame[0] for frame in outer[1:]]
                    raise TypeError(_cannot_be_rebuilt([*around, container], error)) from error
            memo[id(container)] = (container, result)
            container, inside, old, new, pending = outer.pop()
            new.append(result)


def tensors_of(batch: Any) -> Iterator[Tensor]:
    """Every tensor of a nested batch, in the order of its containers.

    One that is in several places comes once, at the first of them.

    Raises:
        ValueError: as `map_tensors`.
    """
    if isinstance(batch, Tensor):
        return iter((batch,))
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    map_tensors(batch, note)
    return iter(found)


class _Container(NamedTuple):
    """How to look into one kind of container, and how to make its like."""

    values: Callable[[Any], list[Any]]
    rebuild: Callable[[Any, list[Any], list[Any]], Any]  # container, old and new values
    places: Callable[[Any], list[str]]  # as in Python source, for messages


_TENSOR: Final = object()
_OBJECT: Final = object()
_OPEN: Final = (None, None)  # in the memo, what is being looked into now


def _look_at(kind: type[Any]) -> object:
    """What an object of this type is to the walk: see `_kind_of`."""
    if issubclass(kind, Tensor):
        return _TENSOR
    if issubclass(kind, (str, bytes, nn.Module)):
        return None
    if issubclass(kind, PackedSequence):
        return _PACKED
    items, fields = _items_of(kind), _fields_of(kind)
    return items if fields is None else _with_fields(fields, items)


def _items_of(kind: type[Any]) -> _Container | None:
    if issubclass(kind, Mapping):
        return _MAPPING
    if issubclass(kind, (list, deque, UserList)):
        return _LIST
    if issubclass(kind, tuple):
        return _NAMEDTUPLE if hasattr(kind, "_make") else _TUPLE
    if issubclass(kind, (set, frozenset)):
        return _SET
    return None


def _fields_of(kind: type[Any]) -> tuple[str, ...] | None:
    if dataclasses.is_dataclass(kind):
        return tuple(field.name for field in dataclasses.fields(kind))
    if hasattr(kind, "__attrs_attrs__"):
        return tuple(attribute.name for attribute in kind.__attrs_attrs__)
    return None


def _look_for_objects(kind: type[Any]) -> object:
    if not issubclass(kind, (Tensor, PackedSequence)) and callable(getattr(kind, "to", None)):
        return _OBJECT
    return _kind_of(kind)


# A _Container, _TENSOR, _OBJECT, or None for a leaf. Each type is looked at once.
_Lookup = Callable[[type[Any]], object]
_cached = lru_cache(maxsize=1024)
_kind_of: _Lookup = _cached(_look_at)  # type: ignore[assignment]  # types are hashable
_kind_or_object: _Lookup = _cached(_look_for_objects)  # type: ignore[assignment]  # as above


def _indices(old: Any) -> list[str]:
    return [f"[{index}]" for index in range(len(old))]


def _rebuild_list(old: Any, _: list[Any], new: list[Any]) -> Any:
    if type(old) is list:
        return new
    twin = copy.copy(old)  # keeps what a subclass has beside its items, and a deque's bound
    twin.clear()
    twin.extend(new)
    return twin


def _rebuild_tuple(old: Any, _: list[Any], new: list[Any]) -> Any:
    kind = type(old)
    if kind is tuple or hasattr(kind, "n_sequence_fields"):
        return kind(new)  # torch's result tuples take an iterable too, and want to be asked
    # Not by its constructor, which may take anything.
    return _with_attributes(tuple.__new__(kind, new), old)


def _rebuild_namedtuple(old: Any, _: list[Any], new: list[Any]) -> Any:
    return _with_attributes(type(old)._make(new), old)


def _rebuild_set(old: Any, _: list[Any], new: list[Any]) -> Any:
    kind = type(old)
    if isinstance(old, frozenset):
        return _with_attributes(frozenset.__new__(kind, new), old)
    twin = set.__new__(kind)
    set.update(twin, new)
    return _with_attributes(twin, old)


def _with_attributes(twin: Any, old: Any) -> Any:
    """The twin, with what hangs on an object of a subclass beside its items."""
    state = object.__getstate__(old)  # its dictionary, and its slots if it has some
    for attributes in state if isinstance(state, tuple) else (state,):
        for name, value in (attributes or {}).items():
            object.__setattr__(twin, name, value)
    return twin


def _rebuild_mapping(old: Mapping[Any, Any], values: list[Any], new: list[Any]) -> Any:
    if type(old) is dict:
        return dict(zip(old, new, strict=True))
    if not isinstance(old, MutableMapping):
        # A read-only mapping wraps another one.
        return type(old)(dict(zip(old, new, strict=True)))  # type: ignore[call-arg]
    # A copy keeps a default_factory and the attributes of subclasses.
    if isinstance(old, dict) or hasattr(old, "__copy__"):
        twin = copy.copy(old)
    else:
        # A shallow copy could share the inner storage, and setting items would then reach
        # the caller's object. The memo makes the values leaves, so no tensor is copied.
        twin = copy.deepcopy(old, {id(value): value for value in values})
    for key, value, changed in zip(list(old), values, new, strict=True):
        if changed is not value:
            twin[key] = changed
    return twin


def _rebuild_packed(old: PackedSequence, _: list[Any], new: list[Any]) -> PackedSequence:
    data, sorted_indices, unsorted_indices = new
    return type(old)(data, old.batch_sizes, sorted_indices, unsorted_indices)


def _with_fields(names: tuple[str, ...], items: _Container | None) -> _Container:
    """How to look into a class with fields, which may be a container of items as well."""

    def values(old: Any) -> list[Any]:
        fields = [getattr(old, name, None) for name in names]  # init=False may never be set
        return fields if items is None else fields + items.values(old)

    def rebuild(old: Any, values: list[Any], new: list[Any]) -> Any:
        n = len(names)
        twin = copy.copy(old) if items is None else items.rebuild(old, values[n:], new[n:])
        for name, value, changed in zip(names, values[:n], new[:n], strict=True):
            if changed is not value:
                object.__setattr__(twin, name, changed)  # frozen classes too
        return twin

    def places(old: Any) -> list[str]:
        fields = [f".{name}" for name in names]
        return fields if items is None else fields + items.places(old)

    return _Container(values, rebuild, places)


_LIST: Final = _Container(list, _rebuild_list, _indices)
_TUPLE: Final = _Container(list, _rebuild_tuple, _indices)
_NAMEDTUPLE: Final = _Container(
    list, _rebuild_namedtuple, lambda old: [f".{name}" for name in old._fields]
)
_SET: Final = _Container(list, _rebuild_set, lambda old: ["{...}"] * len(old))
_MAPPING: Final = _Container(
    lambda old: list(old.values()), _rebuild_mapping, lambda old: [f"[{key!r}]" for key in old]
)
_PACKED: Final = _Container(
    lambda old: [old.data, old.sorted_indices, old.unsorted_indices],
    _rebuild_packed,
    lambda _: [".data", ".sorted_indices", ".unsorted_indices"],
)


def _contains_itself(around: list[Any], value: Any) -> str:
    """Say where `value`, one of the containers `around`, was met again."""
    first = next(index for index, container in enumerate(around) if container is value)
    return (
        f"The batch contains itself: {_path([*around, value])} is {_path(around[: first + 1])} "
        "again, so it has no end. Take that reference out, or make it a weakref."
    )


def _cannot_be_rebuilt(around: list[Any], error: Exception) -> str:
    """Say where the last one of `around` is, and what can be done about it."""
    kind = type(around[-1]).__qualname__
    return (
        f"{_path(around)} is a {kind}, which cannot be made anew with the tensors that changed: "
        f"{type(error).__name__}: {error}. A read-only mapping is called with a dict, other "
        "containers are copied by copy.copy: support that, or return a plain container. For "
        "moving to a device, a method to(device) of its own does as well."
    )


def _path(containers: list[Any]) -> str:
    path = "batch"
    for outer, inner in pairwise(containers):
        kind = _kind_of(type(outer))
        assert isinstance(kind, _Container)
        places = zip(kind.values(outer), kind.places(outer), strict=True)
        path += next((place for value, place in places if value is inner), "[...]")
    return path if len(path) <= 200 else f"{path[:95]} ... {path[-95:]}"

"""Nested batches: every tensor is reached, every container keeps its type, nothing is harmed."""

from __future__ import annotations

from collections import Counter, OrderedDict, UserDict, defaultdict
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from trine.core.batches import map_tensors, tensors_of


class Pair(NamedTuple):
    x: Any
    y: Any


@dataclass
class Sample:
    image: Tensor
    label: str
    extra: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class FrozenSample:
    image: Tensor
    label: str = ""


@dataclass(frozen=True, slots=True)
class SlottedSample:
    image: Tensor
    label: str = ""


class Tagged(dict[str, Tensor]):
    """A dict subclass with an attribute of its own."""

    tag = ""


class Words(list[Any]):
    """A list subclass."""


class Store(MutableMapping[str, Any]):
    """A mapping around inner storage, which a shallow copy would share."""

    def __init__(self) -> None:
        self.inner: dict[str, Any] = {}

    def __getitem__(self, key: str) -> Any:
        return self.inner[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self.inner[key] = value

    def __delitem__(self, key: str) -> None:
        del self.inner[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.inner)

    def __len__(self) -> int:
        return len(self.inner)


def double(tensor: Tensor) -> Tensor:
    return tensor * 2


def keep(tensor: Tensor) -> Tensor:
    return tensor


def ones() -> Tensor:
    return torch.ones(2)


def a_batch_of_everything() -> dict[str, Any]:
    return {
        "list": [ones(), "text", None],
        "tuple": (ones(), 1, 2.5, b"raw"),
        "pair": Pair(ones(), [ones()]),
        "default": defaultdict(list, {"a": [ones()]}),
        "ordered": OrderedDict(b=ones(), a=ones()),
        "user": UserDict({"u": ones()}),
        "sample": Sample(ones(), "cat", {"mask": ones()}),
        "frozen": FrozenSample(ones(), "dog"),
        "set": {ones()},
        "leaf": object(),
    }


def test_every_tensor_of_a_nested_batch_is_given_to_the_function_once() -> None:
    seen: list[Tensor] = []
    batch = a_batch_of_everything()

    def look(tensor: Tensor) -> Tensor:
        seen.append(tensor)
        return tensor

    map_tensors(batch, look)

    assert len(seen) == 12
    assert [id(tensor) for tensor in tensors_of(batch)] == [id(tensor) for tensor in seen]


def test_a_nested_batch_keeps_all_its_types_and_other_leaves() -> None:
    batch = a_batch_of_everything()

    mapped = map_tensors(batch, double)

    assert [type(value) for value in mapped.values()] == [type(v) for v in batch.values()]
    assert list(mapped) == list(batch)
    assert all(torch.equal(tensor, torch.full((2,), 2.0)) for tensor in tensors_of(mapped))
    assert mapped["list"][1:] == ["text", None]
    assert mapped["tuple"][1:] == (1, 2.5, b"raw")
    assert mapped["leaf"] is batch["leaf"]


def test_the_callers_batch_is_left_as_it_was() -> None:
    batch = a_batch_of_everything()
    containers = dict(batch)
    tensors = list(tensors_of(batch))

    map_tensors(batch, double)

    assert all(batch[key] is value for key, value in containers.items())
    assert all(new is old for new, old in zip(tensors_of(batch), tensors, strict=True))
    assert all(torch.equal(tensor, ones()) for tensor in tensors)


def test_a_batch_in_which_nothing_changes_is_returned_itself() -> None:
    batch = a_batch_of_everything()

    assert map_tensors(batch, keep) is batch


def test_only_containers_on_the_way_to_a_change_are_made_anew() -> None:
    target, other = torch.zeros(1), torch.ones(1)
    batch = {"changes": [target], "stays": [other]}

    mapped = map_tensors(batch, lambda tensor: tensor + 1 if tensor is target else tensor)

    assert mapped["changes"] is not batch["changes"]
    assert mapped["stays"] is batch["stays"]


@pytest.mark.parametrize("leaf", [None, "text", b"raw", 3, 2.5, True, Sample, object])
def test_leaves_that_hold_no_tensor_come_back_themselves(leaf: object) -> None:
    assert map_tensors(leaf, double) is leaf
    assert list(tensors_of(leaf)) == []


def test_a_bare_tensor_is_a_batch() -> None:
    tensor = ones()

    assert map_tensors(tensor, double).tolist() == [2.0, 2.0]
    assert [id(found) for found in tensors_of(tensor)] == [id(tensor)]


def test_a_namedtuple_keeps_its_field_names() -> None:
    mapped = map_tensors(Pair(x=ones(), y="kept"), double)

    assert isinstance(mapped, Pair)
    assert mapped.x.tolist() == [2.0, 2.0]
    assert mapped.y == "kept"


def test_a_result_tuple_of_torch_keeps_its_type() -> None:
    result = torch.max(torch.tensor([[1.0, 3.0]]), dim=1)

    mapped = map_tensors(result, double)

    assert type(mapped) is type(result)
    assert (mapped.values.item(), mapped.indices.item()) == (6.0, 2)


def test_a_defaultdict_keeps_its_factory() -> None:
    mapped = map_tensors(defaultdict(list, a=ones()), double)

    assert mapped.default_factory is list
    assert mapped["absent"] == []


def test_an_ordered_dict_keeps_its_order() -> None:
    mapped = map_tensors(OrderedDict(b=ones(), a=ones()), double)

    assert list(mapped) == ["b", "a"]
    mapped.move_to_end("b")  # still an OrderedDict, not only a dict
    assert list(mapped) == ["a", "b"]


def test_a_dict_subclass_keeps_its_attributes() -> None:
    batch = Tagged(x=ones())
    batch.tag = "train"

    mapped = map_tensors(batch, double)

    assert type(mapped) is Tagged
    assert mapped.tag == "train"
    assert mapped["x"].tolist() == [2.0, 2.0]


def test_a_list_subclass_keeps_its_type() -> None:
    mapped = map_tensors(Words([ones(), "w"]), double)

    assert type(mapped) is Words
    assert mapped[1] == "w"


@pytest.mark.parametrize("kind", [UserDict, Store])
def test_a_mapping_around_inner_storage_does_not_share_it_with_its_twin(
    kind: type[MutableMapping[str, Any]],
) -> None:
    tensor, untouched = ones(), object()
    batch = kind()
    batch["x"], batch["other"] = tensor, untouched

    mapped = map_tensors(batch, double)

    assert type(mapped) is kind
    assert mapped["x"].tolist() == [2.0, 2.0]
    assert mapped["other"] is untouched
    assert batch["x"] is tensor


def test_a_read_only_mapping_stays_read_only() -> None:
    mapped = map_tensors(MappingProxyType({"x": ones()}), double)

    assert isinstance(mapped, MappingProxyType)
    assert mapped["x"].tolist() == [2.0, 2.0]


class Row(tuple[Any, ...]):
    """A tuple with a constructor of its own, which no iterable fits."""

    note = ""

    def __new__(cls, x: Any, y: Any) -> Row:
        return super().__new__(cls, (x, y))


class NotedPair(Pair):
    """A namedtuple with a dictionary."""

    note = ""


class Bag(set[Any]):
    """A set with a constructor of its own."""

    note = ""

    def __init__(self, x: Any, y: Any) -> None:
        super().__init__((x, y))


class FrozenBag(frozenset[Any]):
    """The same, frozen and with a slot."""

    __slots__ = ("note",)
    note: str

    def __new__(cls, x: Any, y: Any) -> FrozenBag:
        return super().__new__(cls, (x, y))


@pytest.mark.parametrize("kind", [Row, NotedPair, Bag, FrozenBag])
def test_tuples_and_sets_with_attributes_and_constructors_of_their_own_keep_them(
    kind: Any,
) -> None:
    batch = kind(ones(), "cat")
    batch.note = "first"

    mapped = map_tensors(batch, double)

    assert (type(mapped), mapped.note, len(mapped)) == (kind, "first", 2)
    assert [tensor.tolist() for tensor in tensors_of(mapped)] == [[2.0, 2.0]]
    assert "cat" in mapped
    assert [tensor.tolist() for tensor in tensors_of(batch)] == [[1.0, 1.0]]


@dataclass
class Record(dict[str, Any]):
    x: Any
    unset: Any = field(init=False)


@dataclass
class Rows(list[Any]):
    x: Any
    unset: Any = field(init=False)


@pytest.mark.parametrize("in_items", [True, False])
def test_a_dataclass_that_is_a_dict_has_its_fields_and_its_items_mapped(in_items: bool) -> None:
    batch = Record(ones())
    batch["y"] = ones() if in_items else "no tensor"

    mapped = map_tensors(batch, double)

    assert type(mapped) is Record
    assert mapped.x.tolist() == [2.0, 2.0]
    assert not hasattr(mapped, "unset")
    assert (mapped["y"].tolist() == [2.0, 2.0]) if in_items else (mapped["y"] == "no tensor")
    assert batch.x.tolist() == [1.0, 1.0]


def test_a_dataclass_that_is_a_list_has_its_fields_and_its_items_mapped() -> None:
    batch = Rows(ones())
    batch.append(ones())

    mapped = map_tensors(batch, double)

    assert (type(mapped), mapped.x.tolist()) == (Rows, [2.0, 2.0])
    assert [tensor.tolist() for tensor in mapped] == [[2.0, 2.0]]


def test_a_dataclass_that_is_a_list_and_contains_itself_says_where() -> None:
    batch = Rows(1)
    batch.append(batch)

    with pytest.raises(ValueError, match=r"batch\[0\] is batch again"):
        map_tensors(batch, double)


class Lazy(Mapping[str, Any]):
    """A read-only mapping that is not made from another one."""

    def __getitem__(self, key: str) -> Any:
        return ones()

    def __iter__(self) -> Iterator[str]:
        return iter("x")

    def __len__(self) -> int:
        return 1


def test_a_container_that_cannot_be_made_anew_is_refused_with_its_place() -> None:
    with pytest.raises(TypeError, match=r"batch\['a'\]\[1\] is a Lazy, which cannot be made anew"):
        map_tensors({"a": [1, Lazy()]}, double)


@pytest.mark.parametrize("kind", [set, frozenset])
def test_a_set_keeps_its_type_and_its_identity_when_nothing_changes(
    kind: type[set[Any]] | type[frozenset[Any]],
) -> None:
    batch = kind([ones(), "word"])

    mapped = map_tensors(batch, double)

    assert type(mapped) is kind
    assert [tensor.tolist() for tensor in tensors_of(mapped)] == [[2.0, 2.0]]
    assert "word" in mapped
    assert map_tensors(batch, keep) is batch


@pytest.mark.parametrize("kind", [FrozenSample, SlottedSample, Sample])
def test_a_dataclass_is_rebuilt_frozen_slotted_or_not(kind: type[Any]) -> None:
    batch = kind(ones(), "cat")

    mapped = map_tensors(batch, double)

    assert type(mapped) is kind
    assert mapped.image.tolist() == [2.0, 2.0]
    assert mapped.label == "cat"
    assert batch.image.tolist() == [1.0, 1.0]
    assert map_tensors(batch, keep) is batch


def test_a_counter_holds_no_tensors_and_keeps_its_identity() -> None:
    counts = Counter("abca")

    assert map_tensors(counts, double) is counts

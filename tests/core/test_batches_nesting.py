"""Nested batches: what is shared stays shared, no depth is too deep, rarer containers are kept."""

from __future__ import annotations

import copy
import re
from collections import UserList, deque
from collections.abc import Iterator, Mapping
from dataclasses import InitVar, dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence, pad_packed_sequence

from trine.core import get_device
from trine.core.batches import map_tensors, tensors_of


def ones() -> Tensor:
    return torch.ones(2)


def double(tensor: Tensor) -> Tensor:
    return tensor * 2


# Sharing.


def test_a_tensor_in_two_places_is_mapped_once_and_stays_one_tensor() -> None:
    shared, calls = ones(), []

    def note_and_double(tensor: Tensor) -> Tensor:
        calls.append(tensor)
        return tensor * 2

    mapped = map_tensors({"a": shared, "b": [shared, (shared,)]}, note_and_double)

    assert len(calls) == 1
    assert mapped["a"] is mapped["b"][0] is mapped["b"][1][0]


def test_equal_tensors_that_are_not_one_stay_two() -> None:
    mapped = map_tensors([ones(), ones()], double)

    assert mapped[0] is not mapped[1]


def test_a_container_in_two_places_stays_one_container() -> None:
    inner = {"x": ones()}

    mapped = map_tensors([inner, {"again": inner}], double)

    assert mapped[0] is mapped[1]["again"]
    assert mapped[0] is not inner


def test_each_tensor_of_a_batch_is_listed_once_where_it_comes_first() -> None:
    a, b = torch.zeros(1), torch.ones(1)

    found = list(tensors_of([b, a, (b, a)]))

    assert [id(tensor) for tensor in found] == [id(b), id(a)]


def test_a_lattice_of_shared_containers_is_walked_in_the_time_of_its_containers() -> None:
    level: Any = ones()
    for _ in range(200):  # 2 to the power 200 paths, 200 containers
        level = [level, level]

    mapped = map_tensors(level, double)

    for _ in range(200):
        mapped = mapped[0]
    assert mapped.tolist() == [2.0, 2.0]


class LazyRows(Mapping[str, Any]):
    """A mapping that makes its values when asked, so that each time they are others."""

    def __init__(self, rows: Mapping[str, Any]) -> None:
        self.rows = rows

    def __getitem__(self, key: str) -> Any:
        return torch.as_tensor(self.rows[key])

    def __iter__(self) -> Iterator[str]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)


def test_values_made_when_asked_for_are_not_taken_for_one_another() -> None:
    # Each of these tensors is gone once its container is done, and the next may get its id.
    batch = [LazyRows({"x": float(number)}) for number in range(50)]

    mapped = map_tensors(batch, double)

    assert [rows["x"].item() for rows in mapped] == [2.0 * number for number in range(50)]


# Depth, and batches without an end.


@pytest.mark.parametrize("depth", [1_000, 20_000])
def test_no_depth_overflows_and_the_innermost_tensor_is_reached(depth: int) -> None:
    batch: Any = ones()
    for level in range(depth):
        batch = {"in": batch} if level % 3 == 0 else [batch] if level % 3 == 1 else (batch, "x")

    mapped = map_tensors(batch, double)

    levels = 0
    while not isinstance(mapped, Tensor):
        mapped = mapped["in"] if isinstance(mapped, dict) else mapped[0]
        levels += 1
    assert levels == depth
    assert mapped.tolist() == [2.0, 2.0]
    assert len(list(tensors_of(batch))) == 1


def test_a_list_in_itself_is_refused_by_its_place() -> None:
    batch: list[Any] = [ones()]
    batch.append(batch)

    with pytest.raises(ValueError, match=r"contains itself: batch\[1\] is batch again"):
        map_tensors(batch, double)


def test_a_container_in_one_of_its_own_is_refused_by_both_places() -> None:
    inner: dict[str, Any] = {"x": ones()}
    inner["back"] = (0, [inner])

    places = re.escape("batch['second']['back'][1][0] is batch['second'] again")
    with pytest.raises(ValueError, match=places):
        list(tensors_of({"first": 1, "second": inner}))


@dataclass
class Node:
    value: Tensor
    parent: Any = None
    children: list[Any] = field(default_factory=list)


def test_a_field_that_leads_back_is_refused_by_its_name() -> None:
    root = Node(ones())
    root.children.append(Node(ones(), parent=root))

    with pytest.raises(ValueError, match=r"batch\.children\[0\]\.parent is batch again"):
        map_tensors(root, double)


def test_the_place_of_a_very_deep_loop_is_told_by_its_two_ends() -> None:
    start: dict[str, Any] = {}
    inner = start
    for _ in range(500):
        inner["deeper"] = {}
        inner = inner["deeper"]
    inner["loop"] = start

    with pytest.raises(ValueError, match=r"batch\['deeper'\].* \.\.\. .*\['loop'\] is batch"):
        map_tensors(start, double)


def test_a_loop_through_values_made_when_asked_for_is_refused_too() -> None:
    class Endless(Mapping[str, Any]):
        def __init__(self) -> None:
            self.held = [self]

        def __getitem__(self, key: str) -> Any:
            return list(self.held)  # another list every time

        def __iter__(self) -> Iterator[str]:
            return iter(["x"])

        def __len__(self) -> int:
            return 1

    with pytest.raises(ValueError, match="contains itself"):
        map_tensors(Endless(), double)


# Dataclasses, by the letter.


@dataclass
class WithRest:
    x: Tensor
    scale: InitVar[int]
    y: Tensor = field(init=False)
    unset: Tensor = field(init=False)
    initialised: list[int] = field(default_factory=list, init=False)

    def __post_init__(self, scale: int) -> None:
        self.y = self.x * scale
        self.initialised.append(scale)


def test_a_dataclass_is_copied_without_running_its_initialiser_again() -> None:
    batch = WithRest(ones(), scale=3)

    mapped = map_tensors(batch, double)

    assert (mapped.x.tolist(), mapped.y.tolist()) == ([2.0, 2.0], [6.0, 6.0])
    assert mapped.initialised == [3]
    assert not hasattr(mapped, "unset")
    assert batch.y.tolist() == [3.0, 3.0]


# attrs, without depending on attrs.


class Attribute(NamedTuple):
    name: str


class LooksLikeAttrs:
    """Has what attrs puts on its classes, and refuses assignment as its frozen ones do."""

    __attrs_attrs__ = (Attribute("x"), Attribute("label"))

    def __init__(self, x: Tensor, label: str) -> None:
        object.__setattr__(self, "x", x)
        object.__setattr__(self, "label", label)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{name} is frozen")


def test_a_class_with_the_marks_of_attrs_is_looked_into() -> None:
    batch = LooksLikeAttrs(ones(), "cat")

    mapped: Any = map_tensors({"b": batch}, double)["b"]

    assert type(mapped) is LooksLikeAttrs
    assert (mapped.x.tolist(), mapped.label) == ([2.0, 2.0], "cat")  # type: ignore[attr-defined]
    assert next(tensors_of(batch)).tolist() == [1.0, 1.0]
    assert map_tensors(batch, lambda tensor: tensor) is batch


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("slots", [False, True])
def test_a_class_of_attrs_itself_is_looked_into(frozen: bool, slots: bool) -> None:
    attrs = pytest.importorskip("attrs")
    made = attrs.make_class("Made", {"x": attrs.field(), "n": attrs.field()})
    kind = attrs.define(type("Kind", (), {"__annotations__": {"x": Any, "n": int}}), slots=slots)
    if frozen:
        kind = attrs.frozen(
            type("Kind", (), {"__annotations__": {"x": Any, "n": int}}), slots=slots
        )

    for batch in (made(ones(), 3), kind([ones()], 3)):
        mapped = map_tensors(batch, double)

        assert type(mapped) is type(batch)
        assert [tensor.tolist() for tensor in tensors_of(mapped)] == [[2.0, 2.0]]
        assert mapped.n == 3
        assert [tensor.tolist() for tensor in tensors_of(batch)] == [[1.0, 1.0]]


# Packed sequences.


def packed(*lengths: int) -> PackedSequence:
    return pack_sequence([torch.full((n,), float(n)) for n in lengths], enforce_sorted=False)


def test_a_packed_sequence_stays_one_and_unpacks_to_mapped_values_in_the_same_order() -> None:
    batch = packed(2, 3, 1)

    mapped = map_tensors(batch, lambda t: t * 2 if t.is_floating_point() else t)

    assert type(mapped) is PackedSequence
    values, lengths = pad_packed_sequence(mapped, batch_first=True)
    assert lengths.tolist() == [2, 3, 1]
    assert values.tolist() == [[4.0, 4.0, 0.0], [6.0, 6.0, 6.0], [2.0, 0.0, 0.0]]
    assert batch.data.max().item() == 3.0


def test_the_lengths_of_a_packed_sequence_are_never_moved_but_its_indices_are() -> None:
    batch, seen = packed(2, 3), []

    def note(tensor: Tensor) -> Tensor:
        seen.append(tensor)
        return tensor.clone()

    mapped = map_tensors({"x": batch}, note)["x"]

    assert [id(t) for t in seen] == [
        id(t) for t in (batch.data, batch.sorted_indices, batch.unsorted_indices)
    ]
    assert mapped.batch_sizes is batch.batch_sizes


def test_a_packed_sequence_that_was_sorted_has_no_indices_to_map() -> None:
    batch = pack_sequence([torch.ones(3), torch.ones(1)])

    mapped = map_tensors(batch, double)

    assert mapped.sorted_indices is None
    assert mapped.unsorted_indices is None
    assert map_tensors(batch, lambda tensor: tensor) is batch


# Lists that are more than lists.


class Titled(list[Any]):
    """A list with a title, whose constructor takes no items."""

    def __init__(self, title: str) -> None:
        super().__init__()
        self.title = title


def test_a_list_subclass_keeps_what_it_has_beside_its_items() -> None:
    batch = Titled("train")
    batch.append(ones())

    mapped = map_tensors(batch, double)

    assert type(mapped) is Titled
    assert (mapped.title, mapped[0].tolist()) == ("train", [2.0, 2.0])
    assert batch[0].tolist() == [1.0, 1.0]


def test_a_deque_keeps_its_bound() -> None:
    batch = deque([ones(), "x"], maxlen=5)

    mapped = map_tensors(batch, double)

    assert (type(mapped), mapped.maxlen, mapped[1]) == (deque, 5, "x")
    assert mapped[0].tolist() == [2.0, 2.0]


def test_a_user_list_does_not_share_its_storage_with_its_twin() -> None:
    batch = UserList([ones()])

    mapped = map_tensors(batch, double)

    assert type(mapped) is UserList
    assert (mapped[0].tolist(), batch[0].tolist()) == ([2.0, 2.0], [1.0, 1.0])


class Checked(NamedTuple):
    x: Any
    y: Any = None

    def total(self) -> Any:
        return self.x + self.y


def test_a_namedtuple_keeps_its_methods_and_defaults() -> None:
    mapped = map_tensors(Checked(ones(), 1), double)

    assert mapped.total().tolist() == [3.0, 3.0]


def test_modules_and_iterators_are_left_alone() -> None:
    module, rows = nn.Linear(2, 2), iter([ones()])
    batch = {"module": module, "rows": rows}

    assert map_tensors(batch, double) is batch
    assert next(rows).tolist() == [1.0, 1.0]


# Objects that move themselves.


class Graph:
    """Moves itself into a copy."""

    def __init__(self, nodes: Tensor) -> None:
        self.nodes = nodes
        self.asked: list[Any] = []

    def to(self, device: Any) -> Graph:
        twin = copy.copy(self)
        twin.nodes = self.nodes + 1
        twin.asked = [device]
        return twin


class InPlace(Graph):
    """Moves itself where it is, and returns nothing."""

    def to(self, device: Any) -> Any:
        self.asked.append(device)


@dataclass
class Chooses:
    """A dataclass that knows which of its fields belong on the device."""

    x: Tensor
    stays: Tensor

    def to(self, device: Any) -> Chooses:
        return Chooses(self.x + 1, self.stays)


class Encoding(dict[str, Any]):
    """A dict with a method of its own, as tokenizers return."""

    def to(self, device: Any) -> Encoding:
        return Encoding({name: value + 1 for name, value in self.items()})


def test_an_object_with_a_to_of_its_own_is_asked_to_move_itself() -> None:
    device = get_device("cpu")

    moved = device.batch_to_device({"g": [Graph(ones())]})

    assert moved["g"][0].nodes.tolist() == [2.0, 2.0]
    assert moved["g"][0].asked == [device.torch_device]


def test_an_object_that_moves_in_place_and_returns_nothing_is_kept() -> None:
    graph = InPlace(ones())

    moved = get_device("cpu").batch_to_device([graph])

    assert moved[0] is graph
    assert len(graph.asked) == 1


def test_a_container_with_a_to_of_its_own_is_not_looked_into() -> None:
    chooses, encoding = Chooses(ones(), ones()), Encoding(ids=ones())

    moved = get_device("cpu").batch_to_device([chooses, encoding, chooses])

    assert (moved[0].x.tolist(), moved[0].stays.tolist()) == ([2.0, 2.0], [1.0, 1.0])
    assert (type(moved[1]), moved[1]["ids"].tolist()) == (Encoding, [2.0, 2.0])
    assert moved[2] is moved[0]


def test_a_packed_sequence_is_no_object_to_be_asked() -> None:
    batch = packed(1, 2)

    assert get_device("cpu").batch_to_device(batch) is batch


def test_classes_and_fields_called_to_are_not_taken_for_a_method() -> None:
    @dataclass
    class Letter:
        text: Tensor
        to: str = "you"

    moved = map_tensors({"l": Letter(ones()), "kind": Graph}, double, objects=pytest.fail)

    assert (moved["l"].text.tolist(), moved["l"].to) == ([2.0, 2.0], "you")
    assert moved["kind"] is Graph


def test_without_a_mover_for_objects_their_containers_are_containers() -> None:
    mapped = map_tensors([Chooses(ones(), ones()), Graph(ones())], double)

    assert mapped[0].stays.tolist() == [2.0, 2.0]
    assert mapped[1].nodes.tolist() == [1.0, 1.0]

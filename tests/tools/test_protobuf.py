"""The wire format, against examples of its specification and a decoder of our own."""

from __future__ import annotations

import pytest

from tests.tools.protobuf import decode, double, signed
from trine.tools.tracing import protobuf


@pytest.mark.parametrize(
    ("number", "encoded"),
    [(0, "00"), (1, "01"), (127, "7f"), (128, "8001"), (150, "9601"), (16_384, "808001")],
)
def test_numbers_have_the_bytes_that_the_specification_gives(number: int, encoded: str) -> None:
    assert protobuf.varint(number).hex() == encoded


def test_the_example_messages_of_the_specification_are_met() -> None:
    assert protobuf.integer(1, 150).hex() == "089601"
    assert protobuf.text(2, "testing").hex() == "120774657374696e67"


@pytest.mark.parametrize("shift", range(64))
def test_every_length_of_a_number_is_read_back(shift: int) -> None:
    for number in ((1 << shift) - 1, 1 << shift):
        assert decode(protobuf.integer(5, number)) == {5: [number]}


def test_a_negative_number_is_its_complement_of_64_bits() -> None:
    (found,) = decode(protobuf.integer(4, -3))[4]

    assert signed(found) == -3
    assert len(protobuf.varint(-1)) == 10


def test_messages_within_messages_and_numbers_of_fixed_size_are_read_back() -> None:
    inner = protobuf.double(44, 0.1) + protobuf.fixed64(47, 2**64 - 1)

    (content,) = decode(protobuf.message(60, inner))[60]

    fields = decode(content)
    assert double(fields[44][0]) == 0.1
    assert fields[47] == [b"\xff" * 8]


def test_a_text_that_utf_8_cannot_hold_is_written_as_an_escape() -> None:
    (content,) = decode(protobuf.text(1, "a\ud800\u202e"))[1]

    assert content.decode("utf-8") == "a\\ud800\u202e"

"""Numbers and names as people read them."""

from __future__ import annotations

import pytest

from trine.tools.text import format_nbytes, format_ns, printable


@pytest.mark.parametrize(
    ("ns", "text"),
    [
        (0, "0 ns"),
        (999, "999 ns"),
        (999.6, "1.00 us"),
        (1_234, "1.23 us"),
        (9_996, "10.0 us"),
        (99_960, "100 us"),
        (999_400, "999 us"),
        (999_600, "1.00 ms"),
        (12_345_678, "12.3 ms"),
        (61_500_000_000, "61.5 s"),
    ],
)
def test_durations_have_three_digits(ns: float, text: str) -> None:
    assert format_ns(ns) == text


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1000, "1000 B"),
        (1024, "1.00 KiB"),
        (1536, "1.50 KiB"),
        (2**20 - 1, "1.00 MiB"),
        (5 * 2**30, "5.00 GiB"),
        (3 * 2**40, "3.00 TiB"),
    ],
)
def test_sizes_have_three_digits(nbytes: float, text: str) -> None:
    assert format_nbytes(nbytes) == text


def test_printable_text_stays_as_it_is() -> None:
    assert printable("blocks.0 größe 层") == "blocks.0 größe 层"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\x1b[31m", r"a\x1b[31m"),
        ("a\nb", r"a\nb"),
        ("\u202ea", r"\u202ea"),
        ("\ud800", r"\ud800"),
    ],
)
def test_what_could_steer_a_terminal_is_written_out(text: str, shown: str) -> None:
    assert printable(text) == shown

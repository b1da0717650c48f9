"""Numbers and names as people read them. Names come from files, so none is trusted here."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["format_nbytes", "format_ns", "format_ranks", "printable"]


def printable(text: str) -> str:
    """The text with everything that could steer a terminal written as an escape.

    Trace files come from elsewhere: a name may hold control sequences, line breaks,
    text-direction marks or lone surrogates.
    """
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode("ascii")
        for char in text
    )


def format_ns(ns: float) -> str:
    """A duration with three digits and the unit that suits it: `1.23 ms`."""
    for unit, size in (("s", 1e9), ("ms", 1e6), ("us", 1e3)):
        if abs(ns) >= 0.9995 * size:
            return f"{_three_digits(ns / size)} {unit}"
    return f"{ns:.0f} ns"


def format_nbytes(nbytes: float) -> str:
    """A size with three digits and the unit that suits it: `1.50 MiB`."""
    for unit, size in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(nbytes) >= 0.9995 * size:
            return f"{_three_digits(nbytes / size)} {unit}"
    return f"{nbytes:.0f} B"


def format_ranks(ranks: Iterable[int]) -> str:
    """Which ranks: `rank 3`, or `ranks 0, 2-5`."""
    ordered = sorted(set(ranks))
    runs: list[list[int]] = []
    for rank in ordered:
        if runs and runs[-1][-1] == rank - 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    parts = []
    for run in runs:
        # Two are no range: "0, 1" reads better than "0-1".
        parts += [str(rank) for rank in run] if len(run) < 3 else [f"{run[0]}-{run[-1]}"]
    return f"{'rank' if len(ordered) == 1 else 'ranks'} {', '.join(parts)}"


def _three_digits(number: float) -> str:
    # Each border lies where rounding to three digits reaches the next power of ten.
    digits = 2 if abs(number) < 9.995 else 1 if abs(number) < 99.95 else 0
    return f"{number:.{digits}f}"

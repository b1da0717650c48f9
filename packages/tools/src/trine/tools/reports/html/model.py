"""What a page is made of: sections with pictures and tables. The template knows nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from markupsafe import Markup

from trine.tools.text import format_nbytes, format_ns, printable

__all__ = [
    "BESIDE",
    "PART_LABELS",
    "Cell",
    "Figure",
    "LegendEntry",
    "Page",
    "Section",
    "Table",
    "count_cell",
    "nbytes_cell",
    "ns_cell",
    "share_cell",
    "text_cell",
]

PART_LABELS: Final = {
    "compute": "compute",
    "exposed": "exposed communication",
    "wait": "waiting for other ranks",
    "data": "loading data",
    "optimizer": "optimizer",
    "checkpoint": "checkpoints",
    "other": "other",
    "hidden": "hidden communication",
}
"""Parts of a step's time and what people call them, in the order in which they are stacked."""

BESIDE: Final = "hidden"
"""The one that lies beside the sum."""


@dataclass(frozen=True)
class Cell:
    """A cell of a table.

    Attributes:
        text: what is shown.
        key: what the column is sorted by: the number behind the text, or the text.
        number: whether it is one.
    """

    text: str
    key: str
    number: bool = True


@dataclass(frozen=True)
class Table:
    """A table whose columns can be sorted.

    Attributes:
        caption: what it shows.
        header: titles of its columns.
        rows: as many cells each.
        folded: whether it stands beside a picture that says the same.
    """

    caption: str
    header: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    folded: bool = False


@dataclass(frozen=True)
class LegendEntry:
    """What a colour and a pattern mean."""

    part: str
    label: str


@dataclass(frozen=True)
class Figure:
    """A picture.

    Attributes:
        caption: what it shows.
        svg: the picture.
        legend: of its colours.
        labels: names of what is drawn, for pictures whose marks have numbers only.
        wide: whether it can be enlarged.
    """

    caption: str
    svg: Markup
    legend: Sequence[LegendEntry]
    labels: Sequence[str] = ()
    wide: bool = False


@dataclass(frozen=True)
class Section:
    """A part of the page under a title of its own.

    Attributes:
        anchor: its name in links.
        title: its title.
        texts: sentences, a paragraph each.
        figures: its pictures.
        tables: its tables.
    """

    anchor: str
    title: str
    texts: Sequence[str]
    figures: Sequence[Figure] = ()
    tables: Sequence[Table] = ()


@dataclass(frozen=True)
class Page:
    """A report.

    Attributes:
        title: of the page.
        verdict: what it comes to, a sentence each.
        facts: name and value of what was recorded where.
        notes: what is left out or uncertain.
        sections: the rest.
    """

    title: str
    verdict: Sequence[str]
    facts: Sequence[tuple[str, str]]
    notes: Sequence[str]
    sections: Sequence[Section] = field(default_factory=list)


def text_cell(text: str) -> Cell:
    """A name from a file."""
    return Cell(printable(text), printable(text), number=False)


def count_cell(count: float) -> Cell:
    """How many; without digits after the point that say nothing."""
    return Cell(f"{count:.2f}".rstrip("0").rstrip("."), f"{count:.6g}")


def ns_cell(ns: float) -> Cell:
    """A duration."""
    return Cell(format_ns(ns), f"{ns:.0f}")


def nbytes_cell(nbytes: float) -> Cell:
    """A size."""
    return Cell(format_nbytes(nbytes), f"{nbytes:.0f}")


def share_cell(share: float) -> Cell:
    """A part of a whole."""
    text = f"{share:.1%}"
    return Cell("0.0%" if text == "-0.0%" else text, f"{share:.6f}")

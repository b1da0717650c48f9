"""Lines and a table for a person: rich on a terminal, aligned plain text elsewhere."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TextIO

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

__all__ = ["print_table"]


def print_table(
    lines: Sequence[str],
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    file: TextIO,
    left: Collection[int] = (0,),
) -> None:
    """Print lines and, below them, a table if it has rows.

    Args:
        lines: above the table; names from files in them must be `printable`.
        header: titles of the columns, which may have several lines.
        rows: cells; a row whose first one is "total" is set off.
        file: where.
        left: which columns are aligned to the left; the others to the right.
    """
    console = Console(file=file, highlight=False)
    if console.is_terminal:
        # Text, not markup: names from files must not be able to style anything.
        console.print(Text("\n".join(lines)))
        if rows:
            console.print()
            console.print(_rich_table(header, rows, left))
    else:
        print("\n".join(lines), file=file)
        if rows:
            print("\n" + _plain_table(header, rows, left), file=file)


def _rich_table(
    header: Sequence[str], rows: Sequence[Sequence[str]], left: Collection[int]
) -> Table:
    # The box itself puts a space between columns; more would not fit 80 columns.
    table = Table(box=SIMPLE_HEAD, padding=0, show_edge=False, header_style="bold")
    for index, title in enumerate(header):
        if index in left:
            table.add_column(Text(title), overflow="fold", vertical="bottom")
        else:
            table.add_column(Text(title), justify="right", no_wrap=True, vertical="bottom")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row), style="bold" if row[0] == "total" else "")
    return table


def _plain_table(
    header: Sequence[str], rows: Sequence[Sequence[str]], left: Collection[int]
) -> str:
    titles = [title.split("\n") for title in header]
    height = max(len(title) for title in titles)
    # Titles stand on their last line.
    columns = [[""] * (height - len(title)) + title for title in titles]
    for row in rows:
        for column, cell in zip(columns, row, strict=True):
            column.append(cell)
    widths = [max(len(cell) for cell in column) for column in columns]
    lines = []
    for index, row in enumerate(zip(*columns, strict=True)):
        cells = [
            cell.ljust(width) if place in left else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
        if index == height - 1:
            lines.append("-" * (sum(widths) + 2 * (len(widths) - 1)))
    return "\n".join(lines)

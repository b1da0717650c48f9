"""`trine trace report`: a page to look at and to send on."""

from __future__ import annotations

from pathlib import Path

import click

from trine.tools.cli.paths import TracePath, one_sentence_errors, require, require_folder_of
from trine.tools.text import printable

__all__ = ["report"]


@click.command()
@click.argument("path", type=TracePath(path_type=Path))
@click.option(
    "--out",
    type=TracePath(path_type=Path, dir_okay=False),
    required=True,
    help="The HTML file to write. It needs no other file and no network.",
)
@click.option("--title", help="Title of the page; the name of PATH if it is not given.")
def report(path: Path, out: Path, title: str | None) -> None:
    """Write one HTML page about a run: where the time went, and whose fault it is.

    PATH is the folder that a run was recorded to, or the trace file of one rank; traces of
    torch.profiler and JSON dumps of the flight recorder, one for each rank, are read too.
    """
    require(path)
    require_folder_of(out)
    with one_sentence_errors():
        import torch

        from trine.tools.reports.html import write_report
        from trine.tools.sources import read, source_files
        from trine.tools.tracing.merge import check_out

        torch.set_num_threads(1)  # sorting gains nothing from more
        check_out(source_files(path), out, "report", "report.html")
        write_report(read(path), out, title or path.resolve().name)
    click.echo(f"{printable(str(out))}: {out.stat().st_size / 1000:.0f} KB")

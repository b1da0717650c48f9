"""`trine trace hang`: at which collective a job stands."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import click

from trine.tools.cli.paths import NoAnswer, TracePath, one_sentence_errors, require

__all__ = ["hang"]


@click.command()
@click.argument("path", type=TracePath(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print JSON, times in ns.")
@click.pass_context
def hang(context: click.Context, path: Path, as_json: bool) -> None:
    """Name the collective at which a job hangs, and the ranks that did not come.

    PATH is the folder that a run was recorded to. Files may be cut off or missing. The exit
    status is 1 if something hangs, 0 if nothing does, and 2 if there is nothing to read.
    """
    require(path)
    with one_sentence_errors(NoAnswer):
        from trine.tools.analysis.hang import find_hang
        from trine.tools.analysis.leftovers import read_leftovers
        from trine.tools.reports.hang_table import print_hang

        traces, unreadable = read_leftovers(path)
        found = find_hang(traces, unreadable)
    if as_json:
        data = {"format": "trine-hang", "version": 1, "hangs": found.hangs}
        click.echo(json.dumps({**data, **asdict(found)}))
    else:
        print_hang(found)
    context.exit(1 if found.hangs else 0)

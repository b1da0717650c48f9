"""`trine trace stragglers`: which ranks make the others wait."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import click

from trine.tools.cli.paths import TracePath, one_sentence_errors, require

__all__ = ["stragglers"]


@click.command()
@click.argument("path", type=TracePath(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print JSON, times in ns.")
def stragglers(path: Path, as_json: bool) -> None:
    """Name the ranks that make the others wait, and where they lose the time.

    PATH is the folder that a run was recorded to. Ranks are compared by the time they took for
    themselves, so that one that was held up by others is not taken for slow.
    """
    require(path)
    with one_sentence_errors():
        from trine.tools.analysis.stragglers import find_stragglers
        from trine.tools.reports.stragglers_table import print_stragglers, verdict
        from trine.tools.sources import read_each

        found = find_stragglers(read_each(path))
    if as_json:
        data = {"format": "trine-stragglers", "version": 1, "verdict": verdict(found)}
        click.echo(json.dumps({**data, **asdict(found)}))
    else:
        print_stragglers(found)

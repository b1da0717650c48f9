"""`trine trace diff`: what changed from one run to another."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import click

from trine.tools.cli.paths import TracePath, one_sentence_errors, require

__all__ = ["diff"]


@click.command()
@click.argument("before", type=TracePath(path_type=Path))
@click.argument("after", type=TracePath(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print JSON, times in ns, sizes in bytes.")
def diff(before: Path, after: Path, as_json: bool) -> None:
    """Compare two runs: step time, its parts, and the communication of each FSDP unit.

    BEFORE and AFTER are folders that runs were recorded to, or files that
    `trine trace summary --json` wrote. A difference is said to be one if chance, as the steps
    show it, does not explain it.
    """
    require(before)
    require(after)
    with one_sentence_errors():
        from trine.tools.analysis.diff import diff as compare_runs
        from trine.tools.analysis.saved import read_measured
        from trine.tools.reports.diff_table import print_diff

        found = compare_runs(read_measured(before), read_measured(after))
    if as_json:
        click.echo(json.dumps({"format": "trine-diff", "version": 1, **asdict(found)}))
    else:
        print_diff(found)

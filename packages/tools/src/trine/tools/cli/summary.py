"""`trine trace summary`: where the time of a run went."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import click

from trine.tools.cli.paths import TracePath, one_sentence_errors, require
from trine.tools.cli.progress import Progress

__all__ = ["summary"]


@click.command()
@click.argument("path", type=TracePath(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print JSON, times in ns, sizes in bytes.")
def summary(path: Path, as_json: bool) -> None:
    """Show where the time of a run went, per step, rank and FSDP unit.

    PATH is the folder that a run was recorded to, or the trace file of one rank; traces of
    torch.profiler and JSON dumps of the flight recorder, one for each rank, are read too. Time
    is divided into computing, exposed communication, waiting for late ranks, loading data, the
    optimizer, checkpoints and the rest.
    """
    require(path)
    with one_sentence_errors():
        import torch

        from trine.tools.analysis.saved import SUMMARY_FORMAT, SUMMARY_VERSION
        from trine.tools.reports import print_summary, summarize
        from trine.tools.sources import read_each, source_files

        # Sorting gains nothing from threads, and on a shared machine they wait for each other.
        torch.set_num_threads(1)
        with Progress("ranks read", len(source_files(path))) as progress:
            result = summarize(progress.over(read_each(path)))
    if as_json:
        data = {"format": SUMMARY_FORMAT, "version": SUMMARY_VERSION, **asdict(result)}
        click.echo(json.dumps(data))
    else:
        print_summary(result)

"""`trine trace`: read what ranks recorded."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import click

from trine.tools.cli.check import check
from trine.tools.cli.diff import diff
from trine.tools.cli.export import export, merge
from trine.tools.cli.hang import hang
from trine.tools.cli.memory import memory
from trine.tools.cli.paths import TracePath, one_sentence_errors, require
from trine.tools.cli.report import report
from trine.tools.cli.run import run
from trine.tools.cli.sinks import sinks
from trine.tools.cli.stragglers import stragglers

# The packages that read traces import torch, by way of trine.core. Commands import
# them when they run, so that `trine --help` need not wait for it.

__all__ = ["trace"]


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def trace() -> None:
    """Record a run; merge, sum up and explain its traces."""


@trace.command()
@click.argument("path", type=TracePath(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print JSON, times in ns, sizes in bytes.")
def summary(path: Path, as_json: bool) -> None:
    """Show where the communication time of a run went, per FSDP unit.

    PATH is the folder that a run was recorded to, or the trace file of one rank; traces of
    torch.profiler and JSON dumps of the flight recorder, one for each rank, are read too.
    """
    require(path)
    with one_sentence_errors():
        from trine.tools.reports import print_summary, summarize
        from trine.tools.sources import read

        result = summarize(read(path))
        if as_json:
            click.echo(json.dumps({"format": "trine-summary", "version": 1, **asdict(result)}))
        else:
            print_summary(result)


trace.add_command(check)
trace.add_command(diff)
trace.add_command(export)
trace.add_command(hang)
trace.add_command(memory)
trace.add_command(merge)
trace.add_command(report)
trace.add_command(run)
trace.add_command(sinks)
trace.add_command(stragglers)

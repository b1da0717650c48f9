"""`trine trace`: read what ranks recorded."""

from __future__ import annotations

import click

from trine.tools.cli.check import check
from trine.tools.cli.diff import diff
from trine.tools.cli.export import export, merge
from trine.tools.cli.hang import hang
from trine.tools.cli.memory import memory
from trine.tools.cli.report import report
from trine.tools.cli.run import run
from trine.tools.cli.sinks import sinks
from trine.tools.cli.stragglers import stragglers
from trine.tools.cli.summary import summary

# The packages that read traces import torch, by way of trine.core. Commands import
# them when they run, so that `trine --help` need not wait for it.

__all__ = ["trace"]


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def trace() -> None:
    """Record a run; merge, sum up and explain its traces."""


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
trace.add_command(summary)

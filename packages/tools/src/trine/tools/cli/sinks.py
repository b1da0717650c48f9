"""`trine trace sinks`: where events can be sent while training runs."""

from __future__ import annotations

import click

from trine.tools.text import printable

__all__ = ["sinks"]


@click.command()
def sinks() -> None:
    """List the sinks that `trine.tools.sinks.get_sink` knows.

    A sink receives events while training runs. Packages add theirs by entry points of the
    group trine.sinks.
    """
    from trine.tools.sinks.registry import known_sinks

    known = known_sinks()
    width = max(map(len, known))
    for name, words in known.items():
        click.echo(f"{printable(name):{width}}  {words}")

"""The command `trine`."""

from trine.tools.cli.app import main

__all__ = ["main"]

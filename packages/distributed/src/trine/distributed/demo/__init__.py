"""The demo: train a small GPT on real text, sharded over ranks, and show what it cost."""

from trine.distributed.demo.cli import main

__all__ = ["main"]

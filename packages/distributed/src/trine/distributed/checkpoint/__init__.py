"""Checkpoints of sharded models that survive a kill, a full disk and a change of ranks."""

from trine.distributed.checkpoint.consolidate import consolidate
from trine.distributed.checkpoint.load import load_checkpoint
from trine.distributed.checkpoint.ranks import CheckpointError
from trine.distributed.checkpoint.save import save_checkpoint

__all__ = ["CheckpointError", "consolidate", "load_checkpoint", "save_checkpoint"]

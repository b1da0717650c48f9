"""Fully sharded training: process groups, meshes, and (in `trine.distributed.fsdp`) the engine."""

from importlib.metadata import version

from trine.distributed.barriers import monitored_barrier
from trine.distributed.mesh import init_mesh
from trine.distributed.process_groups import destroy_process_group, init_process_group

__version__ = version("trine-distributed")

__all__ = ["destroy_process_group", "init_mesh", "init_process_group", "monitored_barrier"]

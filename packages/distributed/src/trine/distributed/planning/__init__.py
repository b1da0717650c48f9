"""What training takes of each rank, by the engine's own rules, before there are ranks.

The entry point `trine.planners` of trine-distributed; `trine plan` asks it. No process groups
and no memory: the engine's schedule runs once more, on units that only count bytes.
"""

from trine.distributed.planning.plan import plan

__all__ = ["plan"]

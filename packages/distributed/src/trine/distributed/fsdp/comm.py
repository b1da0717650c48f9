"""Base classes for collectives of one's own, to hand to a sharded module."""

from trine.distributed._fsdp.custom_comm import AllGather, CommPrimitive, ReduceScatter

__all__ = ["AllGather", "CommPrimitive", "ReduceScatter"]

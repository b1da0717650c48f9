"""Fully sharded data parallel training, with the names of `torch.distributed.fsdp`."""

from trine.distributed._fsdp.fully_shard import fully_shard
from trine.distributed._fsdp.module import FSDPModule, UnshardHandle
from trine.distributed._fsdp.policies import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
)

__all__ = [
    "CPUOffloadPolicy",
    "FSDPModule",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "UnshardHandle",
    "fully_shard",
]

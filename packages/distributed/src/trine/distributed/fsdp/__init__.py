"""Fully sharded data parallel training, with the names of `torch.distributed.fsdp`."""

from trine.distributed._fsdp.errors import CommError, NonFiniteGradient, RanksDisagree
from trine.distributed._fsdp.fully_shard import (
    fully_shard,
    register_fsdp_forward_method,
    share_comm_ctx,
)
from trine.distributed._fsdp.grad_norm import clip_grad_norm_
from trine.distributed._fsdp.module import FSDPModule, UnshardHandle
from trine.distributed._fsdp.policies import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardPlacement,
)
from trine.distributed.mesh import DataParallelMeshDims

__all__ = [
    "CPUOffloadPolicy",
    "CommError",
    "DataParallelMeshDims",
    "FSDPModule",
    "MixedPrecisionPolicy",
    "NonFiniteGradient",
    "OffloadPolicy",
    "RanksDisagree",
    "ShardPlacement",
    "UnshardHandle",
    "clip_grad_norm_",
    "fully_shard",
    "register_fsdp_forward_method",
    "share_comm_ctx",
]

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
from trine.distributed._wrapper.fully_sharded_data_parallel import FullyShardedDataParallel
from trine.distributed._wrapper.options import (
    BackwardPrefetch,
    CPUOffload,
    MixedPrecision,
    ShardingStrategy,
)
from trine.distributed._wrapper.state_dict_types import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    OptimStateDictConfig,
    OptimStateKeyType,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
)
from trine.distributed.fsdp import api as api
from trine.distributed.fsdp import fully_sharded_data_parallel as fully_sharded_data_parallel
from trine.distributed.fsdp import wrap as wrap
from trine.distributed.mesh import DataParallelMeshDims

__all__ = [
    "BackwardPrefetch",
    "CPUOffload",
    "CPUOffloadPolicy",
    "CommError",
    "DataParallelMeshDims",
    "FSDPModule",
    "FullOptimStateDictConfig",
    "FullStateDictConfig",
    "FullyShardedDataParallel",
    "LocalOptimStateDictConfig",
    "LocalStateDictConfig",
    "MixedPrecision",
    "MixedPrecisionPolicy",
    "NonFiniteGradient",
    "OffloadPolicy",
    "OptimStateDictConfig",
    "OptimStateKeyType",
    "RanksDisagree",
    "ShardPlacement",
    "ShardedOptimStateDictConfig",
    "ShardedStateDictConfig",
    "ShardingStrategy",
    "StateDictConfig",
    "StateDictSettings",
    "StateDictType",
    "UnshardHandle",
    "clip_grad_norm_",
    "fully_shard",
    "register_fsdp_forward_method",
    "share_comm_ctx",
]

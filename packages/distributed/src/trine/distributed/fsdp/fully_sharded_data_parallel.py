"""The wrapper, under the name that torch gives its module."""

from trine.distributed._wrapper.fully_sharded_data_parallel import FullyShardedDataParallel
from trine.distributed._wrapper.state_dict_types import OptimStateKeyType
from trine.distributed.fsdp.api import *  # noqa: F403
from trine.distributed.fsdp.api import __all__ as _of_api

# Not named by torch's either, and there all the same.
from trine.distributed.fsdp.wrap import CustomPolicy, ModuleWrapPolicy  # noqa: F401

__all__ = ["FullyShardedDataParallel", "OptimStateKeyType", *_of_api]

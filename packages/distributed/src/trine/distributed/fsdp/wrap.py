"""Which modules `FullyShardedDataParallel` wraps on their own; `torch.distributed.fsdp.wrap`."""

from trine.distributed._wrapper.wrap import (
    CustomPolicy,
    ModuleWrapPolicy,
    always_wrap_policy,
    enable_wrap,
    lambda_auto_wrap_policy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
    wrap,
)

# Private in torch as well, and used by programs all the same.
from trine.distributed._wrapper.wrap import or_policy as _or_policy  # noqa: F401

__all__ = [
    "CustomPolicy",
    "ModuleWrapPolicy",
    "always_wrap_policy",
    "enable_wrap",
    "lambda_auto_wrap_policy",
    "size_based_auto_wrap_policy",
    "transformer_auto_wrap_policy",
    "wrap",
]

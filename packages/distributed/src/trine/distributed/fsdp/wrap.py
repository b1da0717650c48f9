"""Policies for `FullyShardedDataParallel`: which modules below get a wrapper of their own.

A policy is handed to the constructor as `auto_wrap_policy`. Names and arguments are those of
torch's module of this name, whose own policies are taken as well. `ModuleWrapPolicy({Block})`
is the usual one: every block is gathered and freed by itself. Policies that are functions get
their arguments from `functools.partial`, as in
`partial(size_based_auto_wrap_policy, min_num_params=1_000_000)`.
"""

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

"""Policies that say which modules get a wrapper of their own, and wrapping by hand.

Policies decide and touch nothing; `auto_wrap` asks them and wraps. A policy is a `CustomPolicy`,
or anything that can be called with `module`, `recurse` and `nonwrapped_numel`. It is asked twice
about a module: on the way down whether to look at what is below (`recurse=True`), and on the
way up whether to wrap it. `nonwrapped_numel` is how many elements of parameters the module holds
that are in no wrapper yet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import nn

__all__ = [
    "CustomPolicy",
    "ModuleWrapPolicy",
    "always_wrap_policy",
    "enable_wrap",
    "lambda_auto_wrap_policy",
    "or_policy",
    "size_based_auto_wrap_policy",
    "transformer_auto_wrap_policy",
    "wrap",
]


class ModuleWrapPolicy:
    """Wraps every module of some classes, and of classes made from them.

    Args:
        module_classes: such as `{TransformerBlock}`.

    Raises:
        TypeError: for anything but classes.
    """

    def __init__(self, module_classes: Iterable[type[nn.Module]]) -> None:
        self._module_classes = set(_as_classes(module_classes, "module_classes"))

    def __call__(self, module: nn.Module, recurse: bool, *args: Any, **kwargs: Any) -> bool:
        return recurse or isinstance(module, tuple(self._module_classes))

    def __repr__(self) -> str:
        return f"ModuleWrapPolicy({_names(self._module_classes)})"


class CustomPolicy:
    """Wraps the modules that a function chooses, each with arguments of its own if it says so.

    Args:
        lambda_fn: called with a module. True has it wrapped as the constructor's arguments say,
            a dict as they say except for what the dict holds, such as
            `{"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP}`. False and an empty dict
            leave it to the module around it.

    Raises:
        TypeError: for anything but a function.
    """

    def __init__(self, lambda_fn: Callable[[nn.Module], bool | dict[str, Any]]) -> None:
        given: object = lambda_fn
        if not callable(given) or isinstance(given, type):
            raise TypeError(
                f"lambda_fn must be a function of a module, got {given!r}. For example "
                "lambda module: module is model.head; for classes take ModuleWrapPolicy."
            )
        self._lambda_fn = lambda_fn

    def __repr__(self) -> str:
        return f"CustomPolicy({self._lambda_fn!r})"


def always_wrap_policy(*args: Any, **kwargs: Any) -> bool:
    """Wrap every module that has a forward of its own."""
    return True


def lambda_auto_wrap_policy(
    module: nn.Module,
    recurse: bool,
    nonwrapped_numel: int,
    lambda_fn: Callable[[nn.Module], bool],
) -> bool:
    """Wrap the modules that a function chooses.

    Args:
        module: asked about.
        recurse: whether the question is to look below it; always answered with yes.
        nonwrapped_numel: not used.
        lambda_fn: called with a module; given with `functools.partial`.
    """
    return recurse or lambda_fn(module)


def transformer_auto_wrap_policy(
    module: nn.Module,
    recurse: bool,
    nonwrapped_numel: int,
    transformer_layer_cls: set[type[nn.Module]],
) -> bool:
    """Wrap every module of some classes, as `ModuleWrapPolicy` does.

    Args:
        module: asked about.
        recurse: whether the question is to look below it; always answered with yes.
        nonwrapped_numel: not used.
        transformer_layer_cls: the classes; given with `functools.partial`.

    Raises:
        TypeError: if these are not classes.
    """
    return recurse or isinstance(
        module, _as_classes(transformer_layer_cls, "transformer_layer_cls")
    )


def size_based_auto_wrap_policy(
    module: nn.Module,
    recurse: bool,
    nonwrapped_numel: int,
    min_num_params: int = int(1e8),
    force_leaf_modules: set[type[nn.Module]] | None = None,
    exclude_wrap_modules: set[type[nn.Module]] | None = None,
) -> bool:
    """Wrap modules that hold many parameters, less those that were wrapped below them.

    Args:
        module: asked about.
        recurse: whether the question is to look below it.
        nonwrapped_numel: how many elements its parameters have that are in no wrapper yet.
        min_num_params: the fewest elements that get a wrapper.
        force_leaf_modules: classes below whose modules nothing is wrapped; None for
            `size_based_auto_wrap_policy.FORCE_LEAF_MODULES`.
        exclude_wrap_modules: classes whose modules are not wrapped, but what is below them; None
            for `size_based_auto_wrap_policy.EXCLUDE_WRAP_MODULES`.

    Raises:
        TypeError: if the classes are something else.
    """
    spared = force_leaf_modules if recurse else exclude_wrap_modules
    name = "force_leaf_modules" if recurse else "exclude_wrap_modules"
    if spared is None:
        spared = getattr(size_based_auto_wrap_policy, name.upper())
    return nonwrapped_numel >= min_num_params and not isinstance(module, _as_classes(spared, name))


# Attributes of the function, so that a program can change them for all its policies, as with
# torch's.
size_based_auto_wrap_policy.EXCLUDE_WRAP_MODULES = {nn.ModuleList, nn.ModuleDict}  # type: ignore[attr-defined]
size_based_auto_wrap_policy.FORCE_LEAF_MODULES = {nn.MultiheadAttention}  # type: ignore[attr-defined]


def or_policy(
    module: nn.Module,
    recurse: bool,
    nonwrapped_numel: int,
    policies: Iterable[Callable[..., bool]],
) -> bool:
    """Wrap the modules that any of several policies chooses.

    Args:
        module: asked about.
        recurse: whether the question is to look below it.
        nonwrapped_numel: how many elements its parameters have that are in no wrapper yet.
        policies: asked in their order; given with `functools.partial`.
    """
    return any(
        policy(module=module, recurse=recurse, nonwrapped_numel=nonwrapped_numel)
        for policy in policies
    )


_enclosing: ContextVar[tuple[Callable[..., nn.Module], dict[str, Any]] | None]
_enclosing = ContextVar("enable_wrap", default=None)


@contextmanager
def enable_wrap(*, wrapper_cls: Any, **wrapper_kwargs: Any) -> Iterator[None]:
    """Let `wrap` wrap inside this block; inside another one, this one holds until it ends.

    Args:
        wrapper_cls: called with a module, such as `FullyShardedDataParallel`.
        wrapper_kwargs: further arguments for it.

    Raises:
        TypeError: if `wrapper_cls` cannot be called.
    """
    if not callable(wrapper_cls):
        raise TypeError(
            f"wrapper_cls must be a class that wraps a module, got {wrapper_cls!r}. For example "
            "enable_wrap(wrapper_cls=FullyShardedDataParallel)."
        )
    token = _enclosing.set((wrapper_cls, wrapper_kwargs))
    try:
        yield
    finally:
        _enclosing.reset(token)


def wrap(module: nn.Module, **wrap_overrides: Any) -> nn.Module:
    """Wrap a module as the `enable_wrap` around this call says; without one, return it as it is.

    Args:
        module: to wrap.
        wrap_overrides: arguments that take the place of those of `enable_wrap`.
    """
    enclosing = _enclosing.get()
    if enclosing is None:
        return module
    wrapper_cls, wrapper_kwargs = enclosing
    return wrapper_cls(module, **{**wrapper_kwargs, **wrap_overrides})


def _as_classes(given: object, name: str) -> tuple[type, ...]:
    """The classes that the argument `name` holds."""
    if isinstance(given, (str, type)) or not isinstance(given, Iterable):
        raise TypeError(
            f"{name} must be a set of module classes, got {given!r}. For example "
            f"{name}={{nn.TransformerEncoderLayer}}."
        )
    classes = tuple(given)
    for each in classes:
        if not isinstance(each, type):
            raise TypeError(
                f"{name} holds module classes, got {each!r} ({type(each).__name__}). Pass the "
                f"classes themselves, such as {name}={{nn.TransformerEncoderLayer}}."
            )
    return classes


def _names(classes: Iterable[type]) -> str:
    return f"{{{', '.join(sorted(f'{each.__module__}.{each.__qualname__}' for each in classes))}}}"

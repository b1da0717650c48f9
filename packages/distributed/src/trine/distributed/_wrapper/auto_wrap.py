"""Automatic wrapping: a policy is asked about all modules, then the chosen ones are replaced.

All is decided before the first module is wrapped. A policy therefore sees the model as it was
made, and one that is refused leaves it so.
"""

from __future__ import annotations

import inspect
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from trine.distributed._fsdp.torch_internals import compiled_from, function_of_policy
from trine.distributed._wrapper.wrap import CustomPolicy

__all__ = ["Apart", "auto_wrap"]

Question = Callable[[nn.Module, bool, int], object]
"""What a policy says of a module: asked with `recurse` and `nonwrapped_numel`."""


@dataclass(frozen=True)
class Apart:
    """A policy: what another one chooses, and all modules of some classes on their own.

    Attributes:
        policy: the other one; None for none.
        module_classes: such as batch norms, which are to compute in full precision.
        overrides: arguments of these modules, which come before those that the other one gives.
    """

    policy: object
    module_classes: tuple[type[nn.Module], ...]
    overrides: Mapping[str, Any]


def auto_wrap(
    root: nn.Module,
    policy: object,
    wrap_one: Callable[[nn.Module, dict[str, Any]], nn.Module],
    ignored_modules: set[nn.Module],
    ignored_params: set[nn.Parameter],
    is_wrapped: Callable[[nn.Module], bool],
) -> None:
    """Replace modules below `root` by wrappers around them, from the inside out.

    To be called by the constructor of a wrapper. What is wrapped already is left as it is, with
    all that is in it. A module that stands in several places is wrapped once and replaced in
    all of them. Of a module that `torch.compile` was called on, the compiled one is wrapped, since
    it would go past a wrapper inside it. What is in an `nn.MultiheadAttention` stays bare: that
    takes its parameters without calling it.

    Args:
        root: not replaced itself.
        policy: ours, torch's, `Apart`, or anything that can be called with `module`, `recurse`
            and `nonwrapped_numel`.
        wrap_one: makes the wrapper of a module, given the arguments that differ for it.
        ignored_modules: left as they are, with what is below them.
        ignored_params: not counted.
        is_wrapped: whether a module is a wrapper.

    Raises:
        TypeError: if `policy` is no policy.
        ValueError: if it chose what cannot be wrapped, or said something else than yes, no or,
            from a `CustomPolicy`, which arguments.
    """
    tree = _Tree(root, ignored_modules, is_wrapped)
    apart: dict[nn.Module, dict[str, Any]] = {}
    if isinstance(policy, Apart):
        classes, overrides, policy = policy.module_classes, policy.overrides, policy.policy
        apart = {
            target: dict(overrides)
            for module in tree.modules
            if isinstance(module, classes) and (target := tree.target(module)) is not root
        }
    picked: dict[nn.Module, dict[str, Any]] = {}
    if policy is not None:
        question = _question(policy)
        counted_elsewhere = {*ignored_params, *tree.wrapped_params}
        for module in apart:
            counted_elsewhere.update(module.parameters())
        picked = _ask_all(tree, question, counted_elsewhere)
        if not picked and len(tree.modules) > 1:
            _warn_if_nothing_fits(tree, question, policy)
    _replace(
        tree,
        {
            module: {**picked.get(module, {}), **apart.get(module, {})}
            for module in tree.modules
            if module in picked or module in apart
        },
        wrap_one,
    )


class _Tree:
    """A model as automatic wrapping sees it.

    Attributes:
        root: of the tree.
        modules: what may be wrapped, and the root, with full names; children before those that
            hold them.
        children: of each of `modules`, those that may be wrapped.
        compiled: by a module, the one that `torch.compile` made from it.
        wrapped_at: of the modules inside a wrapper: the name of that wrapper.
        wrapped_params: theirs.
    """

    def __init__(
        self, root: nn.Module, ignored: set[nn.Module], is_wrapped: Callable[[nn.Module], bool]
    ) -> None:
        self.root = root
        self.modules: dict[nn.Module, str] = {}
        self.children: dict[nn.Module, list[nn.Module]] = {}
        self.compiled: dict[nn.Module, nn.Module] = {}
        self.wrapped_at: dict[nn.Module, str] = {}
        self.wrapped_params: set[nn.Parameter] = set()

        def walk(module: nn.Module, name: str) -> None:
            below = self.children[module] = []
            inner = compiled_from(module)
            if inner is not None:
                self.compiled[inner] = module
            calls_none = type(module).forward is nn.MultiheadAttention.forward
            for child_name, child in () if calls_none else module.named_children():
                full_name = f"{name}.{child_name}" if name else child_name
                if child in ignored:
                    continue
                if is_wrapped(child):
                    self.wrapped_at.update(dict.fromkeys(child.modules(), full_name))
                    self.wrapped_params.update(child.parameters())
                    continue
                below.append(child)
                if child not in self.children:
                    walk(child, full_name)
            self.modules[module] = name

        walk(root, "")

    def target(self, module: nn.Module) -> nn.Module:
        """What is wrapped where a module was chosen."""
        return self.compiled.get(module, module)

    def described(self, module: nn.Module) -> str:
        """The full name of a module, and its class."""
        name = self.modules.get(module)
        if name is None:  # ignored, or in a wrapper
            name = next(name for name, each in self.root.named_modules() if each is module)
        return f"{name or 'the outermost module'} ({type(module).__name__})"


def _question(policy: object) -> Question:
    """How to ask a policy.

    Raises:
        TypeError: if it is none.
    """
    custom = policy._lambda_fn if isinstance(policy, CustomPolicy) else function_of_policy(policy)
    if custom is not None:
        return lambda module, recurse, numel: recurse or custom(module)
    if not callable(policy) or isinstance(policy, type):
        raise TypeError(
            f"auto_wrap_policy must be a policy, got {policy!r} ({type(policy).__name__}). For "
            "example ModuleWrapPolicy({TransformerBlock}), or "
            "functools.partial(size_based_auto_wrap_policy, min_num_params=1_000_000)."
        )
    ask: Callable[..., object] = policy
    try:
        signature = inspect.signature(ask)
    except (TypeError, ValueError):  # some that are made in C do not tell
        signature = None
    if signature is not None:
        try:
            signature.bind(module=None, recurse=True, nonwrapped_numel=0)
        except TypeError as error:
            raise TypeError(
                f"auto_wrap_policy is called with module, recurse and nonwrapped_numel, and "
                f"{policy!r} does not take that ({error}). Give other arguments with "
                "functools.partial, such as "
                "partial(transformer_auto_wrap_policy, transformer_layer_cls={TransformerBlock}). "
                "A function of the module alone becomes a policy with CustomPolicy(function)."
            ) from None
    return lambda module, recurse, numel: bool(
        ask(module=module, recurse=recurse, nonwrapped_numel=numel)
    )


def _ask(
    tree: _Tree, question: Question, module: nn.Module, recurse: bool, numel: int
) -> bool | dict[str, Any]:
    """What a policy says of a module; an empty dict is a no.

    Raises:
        ValueError: if it is neither yes nor no nor a dict.
    """
    try:
        answer = question(module, recurse, numel)
    except Exception as error:
        error.add_note(f"auto_wrap_policy was asked about {tree.described(module)}.")
        raise
    if isinstance(answer, (bool, dict)):
        return answer
    raise ValueError(
        f"The function of CustomPolicy returned {answer!r} for {tree.described(module)}. Expected "
        "True, False, or a dict of arguments, such as {'mixed_precision': None}."
    )


def _ask_all(
    tree: _Tree, question: Question, counted_elsewhere: set[nn.Parameter]
) -> dict[nn.Module, dict[str, Any]]:
    """The modules that a policy chooses, with the arguments that it gives them.

    Args:
        tree: to ask about; its root is not chosen.
        question: to the policy.
        counted_elsewhere: parameters that no module is said to hold; those of chosen modules
            are added.
    """
    picked: dict[nn.Module, dict[str, Any]] = {}
    seen = {tree.root}

    def numel_of(module: nn.Module) -> int:
        return sum(p.numel() for p in module.parameters() if p not in counted_elsewhere)

    def visit(module: nn.Module) -> None:
        if not _ask(tree, question, module, True, numel_of(module)):
            return
        for child in tree.children[module]:
            if child not in seen:
                seen.add(child)
                visit(child)
        if module is tree.root:
            return
        numel = numel_of(module)
        answer = _ask(tree, question, module, False, numel)
        if not answer:
            return
        # Asked of the object: a compiled module has its forward there.
        if getattr(module.forward, "__func__", None) is nn.Module.forward:
            # A wrapper of it would do nothing. No harm if nothing is left for it, or if it was
            # chosen for its size: then the module around it holds what is in it.
            if numel and _ask(tree, question, module, False, 0):
                raise ValueError(_without_forward(tree, module))
            return
        target = tree.target(module)
        if target is not tree.root:
            picked[target] = {**picked.get(target, {}), **(answer if answer is not True else {})}
            counted_elsewhere.update(module.parameters())

    visit(tree.root)
    return picked


def _without_forward(tree: _Tree, module: nn.Module) -> str:
    classes = sorted({type(child).__name__ for child in module.children()})
    instead = f"what is in it ({', '.join(classes)})" if classes else "the module that uses it"
    return (
        f"auto_wrap_policy chose {tree.described(module)}, which has no forward of its own, so "
        f"nothing would ever gather its parameters. Choose {instead} instead. To leave single "
        "modules out, take a CustomPolicy."
    )


def _warn_if_nothing_fits(tree: _Tree, question: Question, policy: object) -> None:
    """Say so if the policy would choose none of the modules, were they as large as can be."""
    if any(_ask(tree, question, module, False, sys.maxsize) for module in tree.root.modules()):
        return
    counted = Counter(
        f"{type(module).__module__}.{type(module).__qualname__}"
        for module in tree.modules
        if module is not tree.root and next(module.parameters(), None) is not None
    )
    if not counted:
        return
    classes = ", ".join(f"{name} ({count})" for name, count in counted.most_common(6))
    warnings.warn(
        f"auto_wrap_policy={policy!r} chose no module of {type(tree.root).__name__}, so all its "
        "parameters are gathered at once. The classes with parameters that occur most in it: "
        f"{classes}.",
        stacklevel=_to_the_program(),
    )


def _to_the_program() -> int:
    """The `stacklevel` at which a warning of the caller points out of this package."""
    level, frame = 0, inspect.currentframe()
    while frame is not None and frame.f_globals.get("__name__", "").startswith("trine."):
        level, frame = level + 1, frame.f_back
    return level


def _replace(
    tree: _Tree,
    chosen: dict[nn.Module, dict[str, Any]],
    wrap_one: Callable[[nn.Module, dict[str, Any]], nn.Module],
) -> None:
    """Wrap modules in the given order, and put the wrappers where they stood."""
    for module in reversed(chosen):  # the outermost says most
        if module in tree.wrapped_at:
            raise ValueError(
                f"auto_wrap_policy chose {tree.described(module)}, but that is wrapped already in "
                f"another place, {tree.wrapped_at[module]}. Put what stands there in both places."
            )
    places: dict[nn.Module, list[tuple[nn.Module, str]]] = {module: [] for module in chosen}
    for path, module in tree.root.named_modules(remove_duplicate=False):
        if module in chosen:
            parent, _, name = path.rpartition(".")
            places[module].append((tree.root.get_submodule(parent), name))
    for module, overrides in chosen.items():
        try:
            wrapper = wrap_one(module, overrides)
        except Exception as error:
            given = f" with {overrides}" if overrides else ""
            error.add_note(f"auto_wrap_policy wrapped {tree.described(module)}{given}.")
            raise
        for parent_module, name in places[module]:
            setattr(parent_module, name, wrapper)

"""What a wrapper's state dicts hold, and its optimizer's: the methods that say and do it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from trine.distributed._fsdp.state import WRAPPED, FSDPState, plain_name, state_of
from trine.distributed._fsdp.torch_internals import asked_by_torchs_checkpoints
from trine.distributed._wrapper import optim_states, state_dicts
from trine.distributed._wrapper.optim_names import OptimInput, rekeyed
from trine.distributed._wrapper.state_dict_types import (
    FullOptimStateDictConfig,
    OptimStateDictConfig,
    OptimStateKeyType,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
    as_settings,
    default_settings,
)

__all__ = ["SavesState"]


class SavesState(nn.Module):
    """The part of a wrapper that looks after state dicts."""

    def __init__(self) -> None:
        super().__init__()
        self._settings: StateDictSettings | None = None
        self._load_errors: list[str] = []
        # The first ones, so that hooks of the user's find plain names and final values.
        self.register_state_dict_post_hook(_collect)  # type: ignore[no-untyped-call]  # torch's own
        self.register_load_state_dict_pre_hook(_give_back)  # type: ignore[no-untyped-call]  # torch's own
        self.register_load_state_dict_post_hook(_report_plain_names)  # type: ignore[no-untyped-call]  # torch's own

    @staticmethod
    def set_state_dict_type(
        module: nn.Module,
        state_dict_type: StateDictType,
        state_dict_config: StateDictConfig | None = None,
        optim_state_dict_config: OptimStateDictConfig | None = None,
    ) -> StateDictSettings:
        """Choose what state dicts of the wrappers in a tree of modules hold.

        Args:
            module: the top of the tree.
            state_dict_type: of the model's and the optimizer's state dicts.
            state_dict_config: of the model's, made for that type; None for its defaults.
            optim_state_dict_config: of the optimizer's, the same.

        Returns:
            What was set before, for the outermost wrapper.

        Raises:
            ValueError: if a configuration is made for another type, or the tree has no wrapper.
        """
        chosen = as_settings(state_dict_type, state_dict_config, optim_state_dict_config)
        wrappers = _wrappers(module)
        if not wrappers:
            SavesState.get_state_dict_type(module)  # says what is wrong
        before = wrappers[0]._settings or default_settings()
        for wrapper in wrappers:
            wrapper._settings = chosen
        return before

    @staticmethod
    @contextmanager
    def state_dict_type(
        module: nn.Module,
        state_dict_type: StateDictType,
        state_dict_config: StateDictConfig | None = None,
        optim_state_dict_config: OptimStateDictConfig | None = None,
    ) -> Iterator[None]:
        """The same for the time of a `with` block; see `set_state_dict_type`."""
        wrappers = _wrappers(module)
        before = [wrapper._settings for wrapper in wrappers]
        SavesState.set_state_dict_type(
            module, state_dict_type, state_dict_config, optim_state_dict_config
        )
        try:
            yield
        finally:
            for wrapper, settings in zip(wrappers, before, strict=True):
                wrapper._settings = settings

    @staticmethod
    def get_state_dict_type(module: nn.Module) -> StateDictSettings:
        """What is set for the wrappers in a tree of modules.

        Raises:
            ValueError: if there is none, or they are set differently.
        """
        wrappers = _wrappers(module)
        if not wrappers:
            raise ValueError(
                f"{type(module).__name__} holds no FullyShardedDataParallel, so there is nothing "
                "to set. Wrap it, or modules inside it, first."
            )
        found = [wrapper._settings or default_settings() for wrapper in wrappers]
        if any(settings != found[0] for settings in found):
            kinds = sorted({settings.state_dict_type.name for settings in found})
            raise ValueError(
                f"The wrappers inside of this {type(module).__name__} are set differently "
                f"({', '.join(kinds)}, or other configurations). Call set_state_dict_type on the "
                "outermost one."
            )
        return found[0]

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The state of the wrapped module, of the type that `set_state_dict_type` has set.

        By default whole tensors; every rank must then ask for it together.
        """
        names = ("destination", "prefix", "keep_vars")
        given = dict(zip(names, args, strict=False)) | kwargs
        into, prefix = given.get("destination"), given.get("prefix", "")
        sharded = self._settings is None and asked_by_torchs_checkpoints()
        before = self._set_sharded() if sharded else None
        try:
            # In a dictionary of its own, so that only what is this wrapper's is renamed.
            found = super().state_dict(prefix=prefix, keep_vars=given.get("keep_vars", False))
        finally:
            for wrapper in before or ():
                wrapper._settings = None
        # Versions of modules, where a model without wrappers looks for them too.
        versions = getattr(found, "_metadata", {})
        versions |= {plain_name(name): about for name, about in versions.items()}
        if into is None:
            return found
        into.update(found)
        getattr(into, "_metadata", {}).update(getattr(found, "_metadata", {}))
        return into

    def _set_sharded(self) -> list[SavesState]:
        unset = [each for each in _wrappers(self) if each._settings is None]
        for wrapper in unset:
            wrapper._settings = StateDictSettings(
                StateDictType.SHARDED_STATE_DICT,
                ShardedStateDictConfig(),
                ShardedOptimStateDictConfig(),
            )
        return unset

    # --- the optimizer's ----------------------------------------------------------------------

    @staticmethod
    def optim_state_dict(
        model: nn.Module,
        optim: torch.optim.Optimizer,
        optim_state_dict: dict[str, Any] | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> dict[str, Any]:
        """An optimizer's state under full names of parameters, of the type that is set.

        Args:
            model: the top of a tree with wrappers in it.
            optim: of parameters of `model`.
            optim_state_dict: what `optim.state_dict()` gave; None to ask it.
            group: whose first rank `rank0_only` means; None for all ranks.

        Returns:
            `"state"` by names, and `"param_groups"`, whose `"params"` are names; empty where
            `rank0_only` wants none.

        Every rank must call it together if the values are to be whole.
        """
        settings = SavesState.get_state_dict_type(model)
        return optim_states.collected(model, optim, optim_state_dict, settings, group)

    @staticmethod
    def optim_state_dict_to_load(
        model: nn.Module,
        optim: torch.optim.Optimizer,
        optim_state_dict: dict[str, Any],
        is_named_optimizer: bool = False,
        load_directly: bool = False,
        group: dist.ProcessGroup | None = None,
    ) -> dict[str, Any]:
        """What `optim.load_state_dict` takes, made of what `optim_state_dict` gave.

        Args:
            model: the top of a tree with wrappers in it.
            optim: of parameters of `model`.
            optim_state_dict: by names or numbers; whole tensors or DTensors, or, where
                `LOCAL_STATE_DICT` is set, this rank's rows. Not changed. With `rank0_only` that
                of the first rank counts; it is sent to the others one tensor at a time.
            is_named_optimizer: file it under names, for optimizers that load it so.
            load_directly: give it to `optim` too.
            group: whose first rank `rank0_only` means; None for all ranks.

        Raises:
            ValueError: if names or shapes are not those of the optimizer, naming them.
        """
        settings = SavesState.get_state_dict_type(model)
        config = settings.optim_state_dict_config
        if isinstance(config, FullOptimStateDictConfig) and config.rank0_only:
            made = optim_states.scattered(
                model, optim_state_dict, optim, group=group, named=is_named_optimizer
            )
        else:
            rows = settings.state_dict_type is StateDictType.LOCAL_STATE_DICT
            made = optim_states.to_load(
                model, optim_state_dict, optim, named=is_named_optimizer, rows=rows
            )
        if load_directly:
            optim.load_state_dict(made)
        return made

    @staticmethod
    def full_optim_state_dict(
        model: nn.Module,
        optim: torch.optim.Optimizer,
        optim_input: OptimInput = None,
        rank0_only: bool = True,
        group: dist.ProcessGroup | None = None,
    ) -> dict[str, Any]:
        """`optim_state_dict` of whole tensors on the host, whatever type is set.

        Args:
            model: the top of a tree with wrappers in it.
            optim: of parameters of `model`.
            optim_input: accepted: `optim` knows its parameters.
            rank0_only: only the first rank gets it; the others get an empty one.
            group: whose first rank; None for all ranks.
        """
        config = FullOptimStateDictConfig(offload_to_cpu=True, rank0_only=rank0_only)
        settings = as_settings(StateDictType.FULL_STATE_DICT, None, config)
        return optim_states.collected(model, optim, None, settings, group)

    @staticmethod
    def sharded_optim_state_dict(
        model: nn.Module,
        optim: torch.optim.Optimizer,
        group: dist.ProcessGroup | None = None,
    ) -> dict[str, Any]:
        """`optim_state_dict` of DTensors on the host, whatever type is set."""
        settings = as_settings(StateDictType.SHARDED_STATE_DICT, None, None)
        return optim_states.collected(model, optim, None, settings, group)

    @staticmethod
    def shard_full_optim_state_dict(
        full_optim_state_dict: dict[str, Any],
        model: nn.Module,
        optim_input: OptimInput = None,
        optim: torch.optim.Optimizer | None = None,
    ) -> dict[str, Any]:
        """What `optim.load_state_dict` takes, of whole tensors that every rank has.

        Args:
            full_optim_state_dict: what `full_optim_state_dict` gave; not changed.
            model: the top of a tree with wrappers in it.
            optim_input: parameters or groups of the optimizer, where there is no `optim`; None
                for all parameters of `model`.
            optim: of parameters of `model`.
        """
        return optim_states.to_load(model, full_optim_state_dict, optim, optim_input)

    @staticmethod
    def flatten_sharded_optim_state_dict(
        sharded_optim_state_dict: dict[str, Any],
        model: nn.Module,
        optim: torch.optim.Optimizer,
    ) -> dict[str, Any]:
        """What `optim.load_state_dict` takes, of what `sharded_optim_state_dict` gave."""
        return optim_states.to_load(model, sharded_optim_state_dict, optim)

    @staticmethod
    def scatter_full_optim_state_dict(
        full_optim_state_dict: dict[str, Any] | None,
        model: nn.Module,
        optim_input: OptimInput = None,
        optim: torch.optim.Optimizer | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> dict[str, Any]:
        """The same as `shard_full_optim_state_dict` of what only the first rank has.

        It is sent to the others one tensor at a time; every rank must call it together.

        Args:
            full_optim_state_dict: what `full_optim_state_dict` gave; ignored on other ranks.
            model: the top of a tree with wrappers in it.
            optim_input: parameters or groups of the optimizer, where there is no `optim`; None
                for all parameters of `model`.
            optim: of parameters of `model`.
            group: whose first rank; None for all ranks.
        """
        return optim_states.scattered(model, full_optim_state_dict, optim, optim_input, group)

    @staticmethod
    def rekey_optim_state_dict(
        optim_state_dict: dict[str, Any],
        optim_state_key_type: OptimStateKeyType,
        model: nn.Module,
        optim_input: OptimInput = None,
        optim: torch.optim.Optimizer | None = None,
    ) -> dict[str, Any]:
        """An optimizer's state under names instead of numbers, or the other way round.

        With it a full state dict moves from and to programs that do not wrap their model.

        Args:
            optim_state_dict: under either; its values are shared with the result.
            optim_state_key_type: what the result is under.
            model: wrapped or not.
            optim_input: parameters or groups of the optimizer, where there is no `optim`; None
                for all parameters of `model`.
            optim: of parameters of `model`.

        Raises:
            ValueError: if names or groups are not those of the optimizer, naming them.
        """
        return rekeyed(model, optim_state_dict, optim_state_key_type, optim, optim_input)

    @staticmethod
    def _fqn_modifiers() -> dict[str, str]:
        # torch.distributed.checkpoint.state_dict leaves out such a name while it walks.
        return {"": WRAPPED}


def _collect(module: nn.Module, values: Any, prefix: str, metadata: Any) -> None:
    assert isinstance(module, SavesState)
    settings = module._settings or default_settings()
    state_dicts.collected(_state(module), values, prefix, settings)


def _give_back(
    module: nn.Module,
    values: dict[str, Any],
    prefix: str,
    metadata: dict[str, Any],
    strict: bool,
    missing: list[str],
    unexpected: list[str],
    errors: list[str],
) -> None:
    assert isinstance(module, SavesState)
    settings = module._settings or default_settings()
    local = settings.state_dict_type is StateDictType.LOCAL_STATE_DICT
    own = state_dicts.own_names(module)
    state_dicts.given_back(_state(module), values, prefix, own, local)
    module._load_errors = errors


def _report_plain_names(module: nn.Module, incompatible: Any) -> None:
    assert isinstance(module, SavesState)
    errors, module._load_errors = module._load_errors, []
    for names in (incompatible.missing_keys, incompatible.unexpected_keys, errors):
        names[:] = [state_dicts.without_infix(name) for name in names]


def _wrappers(module: nn.Module) -> list[SavesState]:
    return [each for each in module.modules() if isinstance(each, SavesState)]


def _state(wrapper: nn.Module) -> FSDPState:
    state = state_of(wrapper)
    assert state is not None
    return state

"""load_checkpoint: read into a scratch copy, verify, and only then touch anything live."""

from __future__ import annotations

import io
import logging
import os
import time
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from trine.core import tracing
from trine.distributed.checkpoint.extra import load_wanted, wanted_of
from trine.distributed.checkpoint.folders import find
from trine.distributed.checkpoint.manifest import (
    Manifest,
    read_manifest,
    replaced,
    unreplaced,
    verify,
)
from trine.distributed.checkpoint.ranks import CheckpointError, Ranks
from trine.distributed.checkpoint.save import EXTRA, wait_for_pending_save
from trine.distributed.checkpoint.state import (
    group_of,
    listed,
    load_model_values,
    load_optimizer_values,
    model_values,
    optimizer_params,
)

__all__ = ["load_checkpoint", "read_metadata", "read_values"]

_log = logging.getLogger(__name__)


def load_checkpoint(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    extra: object = None,
) -> Any:
    """Load what `save_checkpoint` wrote, on any number of ranks and any mesh.

    Every rank of the world must call it. Everything is read into a copy and compared with the
    checksums of the manifest first: a checkpoint that is damaged, or does not fit, leaves the
    model, the optimizer and `extra` as they are, on every rank. That copy takes as much memory as
    this rank's part of the model and the optimizer. So does an object in `extra` that does not
    take its state. A module of the model that does not (its `set_extra_state` raises) may leave
    the model changed: that is said in the message.

    Load only what you trust. Parameters, optimizer states and `extra` are read with
    `torch.load(weights_only=True)`, which makes tensors and plain data only; but the index of
    `torch.distributed.checkpoint` (`.metadata`) is a pickle, and reading it can run code of
    whoever wrote it.

    Args:
        path: what `save_checkpoint` was given.
        model: gets the values; must have memory (not the meta device). Sharded or not,
            whichever way it was when saved.
        optimizer: made from parameters of `model`, in the groups that were saved; need not
            have made a step. None leaves out what was saved of one.
        extra: objects with a `load_state_dict` in the containers in which they were saved;
            they are given their state, before the model is. Each must have been saved, lists
            at their full length; what was saved may be left out of dicts.

    Returns:
        The `extra` that was saved, with states in the place of objects.

    Raises:
        CheckpointError: on every rank, if it failed on one: naming the ranks, and the file or
            the values, by full name, that are damaged, missing, unexpected or of another shape.
            Also for an object of `extra` that was not saved, or does not take its state.
    """
    wait_for_pending_save()
    path = Path(path).absolute()
    ranks = Ranks()
    start = time.perf_counter()
    read: dict[str, Any] = {}

    def read_all() -> Manifest:
        folder = find(path)
        if folder != path:
            _log.warning("A save of %s was cut off; loading %s.", path, folder)
        manifest = read_manifest(folder)
        with unreplaced(folder, manifest):
            with tracing.span("checkpoint_verify", "io"):
                verify(folder, manifest, ranks.rank, ranks.size)
            with tracing.span("checkpoint_read", "io"):
                read.update(_read(folder, model, optimizer))
        read["wanted"] = wanted_of(extra, read["extra"])
        return manifest

    def apply_extra() -> None:
        load_wanted(read["wanted"], undo)

    def apply() -> None:
        if optimizer is not None:
            # Loading makes new ones.
            undo.callback(_set, optimizer, optimizer.state, optimizer.param_groups)
            load_optimizer_values(read["params"], optimizer, read["optimizer"])
        load_model_values(model, read["model"])

    doing = f"loading {path} (nothing was changed)"
    manifests = ranks.on_all(doing, read_all)
    if any(manifest != manifests[0] for manifest in manifests):
        raise CheckpointError(f"While {doing}: {replaced(path)}")
    with tracing.span("checkpoint_apply", "io"), ExitStack() as undo:
        ranks.on_all(doing, apply_extra)
        ranks.on_all(f"loading {path} (values of the model may have changed)", apply)
        undo.pop_all()  # of which nothing is called
    if ranks.rank == 0:
        seconds = time.perf_counter() - start
        _log.info("Loaded %s: %.1f MB in %.1f s.", path, manifests[0].nbytes / 1e6, seconds)
    return read["extra"]


def _set(
    optimizer: Optimizer, state: defaultdict[Tensor, Any], groups: list[dict[str, Any]]
) -> None:
    optimizer.state, optimizer.param_groups = state, groups


def read_metadata(folder: Path) -> Metadata:
    """The index of torch's checkpoint in a folder; a pickle."""
    return FileSystemReader(folder).read_metadata()


def read_values(folder: Path, metadata: Metadata, values: dict[str, Any]) -> None:
    """Fill tensors from a checkpoint, and exchange what is not a tensor.

    Args:
        folder: of the checkpoint.
        metadata: its index.
        values: by the keys of the index; changed. DTensors get this rank's part.
    """
    reader = FileSystemReader(folder)
    planner = _PlainDataPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(values, metadata)
    reader.set_up_storage_reader(metadata, True)
    plan = planner.finish_plan(reader.prepare_local_plan(planner.create_local_plan()))
    reader.read_data(plan, planner).wait()


class _PlainDataPlanner(DefaultLoadPlanner):
    """Reads values that are no tensors without running code from the file."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.state_dict[read_item.dest_index.fqn] = torch.load(value, weights_only=True)


def _read(folder: Path, model: nn.Module, optimizer: Optimizer | None) -> dict[str, Any]:
    """Everything that was asked for, as a copy."""
    metadata = read_metadata(folder)
    scratch = _model_scratch(metadata, model)
    params: list[dict[str, Tensor]] = []
    if optimizer is not None:
        params = optimizer_params(model, optimizer)
        scratch.update(_optimizer_scratch(metadata, params, optimizer))
    read_values(folder, metadata, scratch)
    read = _nested(metadata, scratch)
    if optimizer is not None:
        for group in params:
            group_of(group, read["optimizer"]["param_groups"])  # refuses what does not fit
    with (folder / EXTRA).open("rb") as stream:
        extra = torch.load(stream, map_location="cpu", weights_only=True)
    return {"optimizer": None, **read, "params": params, "extra": extra}


def _model_scratch(metadata: Metadata, model: nn.Module) -> dict[str, Any]:
    """Room for the values of a model, by the keys of the index.

    Raises:
        CheckpointError: if they are not those of the checkpoint.
    """
    own = model_values(model)
    on_meta = {name for name, value in own.items() if isinstance(value, Tensor) and value.is_meta}
    if on_meta:
        raise CheckpointError(
            f"Parameters on the meta device have no memory to load into: {listed(on_meta)}. Give "
            "them some with model.to_empty(device=...)."
        )
    saved = {path[1]: key for key, path in _paths(metadata).items() if path[0] == "model"}
    problems = []
    if missing := own.keys() - saved.keys():
        problems.append(f"missing in the checkpoint: {listed(missing)}")
    if unexpected := saved.keys() - own.keys():
        problems.append(f"unexpected, as the model lacks them: {listed(unexpected)}")
    for name in sorted(own.keys() & saved.keys()):
        entry, value = metadata.state_dict_metadata[saved[name]], own[name]
        shape = tuple(value.shape) if isinstance(value, Tensor) else None
        found = tuple(entry.size) if isinstance(entry, TensorStorageMetadata) else None
        if shape != found:
            problems.append(
                f"{name} has {_shape(found)} in the checkpoint, {_shape(shape)} in the model"
            )
    if problems:
        raise CheckpointError("The checkpoint is of another model. " + "; ".join(problems) + ".")
    return {
        saved[name]: torch.empty_like(value) if isinstance(value, Tensor) else None
        for name, value in own.items()
    }


def _shape(shape: tuple[int, ...] | None) -> str:
    return "no tensor" if shape is None else f"shape {shape}"


def _optimizer_scratch(
    metadata: Metadata, params: list[dict[str, Tensor]], optimizer: Optimizer
) -> dict[str, Any]:
    """Room for the state of an optimizer, which need not have any yet."""
    paths = {key: path for key, path in _paths(metadata).items() if path[0] == "optimizer"}
    if not paths:
        raise CheckpointError("The checkpoint holds no optimizer. Pass optimizer=None.")
    named = {name: param for group in params for name, param in group.items()}
    scratch: dict[str, Any] = {}
    for key, path in paths.items():
        entry = metadata.state_dict_metadata[key]
        scratch[key] = None
        if isinstance(entry, TensorStorageMetadata):
            param = named.get(path[2]) if path[1] == "state" else None
            live = optimizer.state.get(param, {}).get(path[3]) if param is not None else None
            scratch[key] = _room(".".join(map(str, path[2:])), path[3], entry, param, live)
    return scratch


def _room(
    name: str, kind: str, entry: TensorStorageMetadata, param: Tensor | None, live: object
) -> Tensor:
    """An empty tensor for a state of an optimizer, sharded like what it belongs to."""
    dtype = entry.properties.dtype
    # Step counts have no dims, like some parameters, but are plain on every rank.
    if isinstance(param, DTensor) and kind != "step":
        for like in (live, param):
            if isinstance(like, DTensor) and like.shape == entry.size:
                return torch.empty_like(like, dtype=dtype)
        if not isinstance(live, Tensor) and len(entry.chunks) > 1:
            raise CheckpointError(
                f"The optimizer state {name} has shape {tuple(entry.size)}, unlike its parameter "
                f"({tuple(param.shape)}), so how to shard it is not known. Make one step with the "
                "optimizer before loading: the state is replaced by what is loaded."
            )
    return torch.empty(entry.size, dtype=dtype)


def _paths(metadata: Metadata) -> dict[str, tuple[Any, ...]]:
    """Where each key of the index stands in the nested state."""
    paths: dict[str, tuple[Any, ...]] = metadata.planner_data or {}
    return paths


def _nested(metadata: Metadata, values: dict[str, Any]) -> dict[str, Any]:
    """Values by the keys of the index as the dicts and lists they were in."""
    nested: dict[str, Any] = {}
    for key, path in _paths(metadata).items():
        if key not in values:
            continue
        here: Any = nested
        for part, following in zip(path, (*path[1:], None), strict=True):
            inner: Any = values[key] if following is None else ([] if _is_index(following) else {})
            if isinstance(here, list):
                while len(here) <= part:
                    here.append(None)
                if here[part] is None:
                    here[part] = inner
            else:
                here.setdefault(part, inner)
            here = here[part]
    return nested


def _is_index(part: object) -> bool:
    return isinstance(part, int)

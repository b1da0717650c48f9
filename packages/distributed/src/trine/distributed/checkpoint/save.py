"""save_checkpoint: write beside, make durable, rename at the end."""

from __future__ import annotations

import logging
import os
import shutil
import time
import warnings
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, nullcontext, suppress
from pathlib import Path
from typing import Any, Literal, overload

from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import save
from torch.optim import Optimizer

from trine.core import tracing
from trine.distributed.checkpoint.extra import packed_extra
from trine.distributed.checkpoint.folders import prepare, replace, sync
from trine.distributed.checkpoint.manifest import Manifest, entry_of, write_manifest
from trine.distributed.checkpoint.ranks import CheckpointError, Ranks
from trine.distributed.checkpoint.state import (
    model_values,
    optimizer_values,
    require_loadable,
)

__all__ = ["EXTRA", "save_checkpoint", "wait_for_pending_save"]

EXTRA = "extra.pt"

_log = logging.getLogger(__name__)
_pending: Future[None] | None = None


@overload
def save_checkpoint(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    extra: object = None,
    async_save: Literal[False] = False,
) -> None: ...


@overload
def save_checkpoint(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    extra: object = None,
    async_save: Literal[True],
) -> Future[None]: ...


def save_checkpoint(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    extra: object = None,
    async_save: bool = False,
) -> Future[None] | None:
    """Save a model, its optimizer and what else training needs to go on, for any number of ranks.

    Every rank of the world must call it, and all must see the folder. Each writes the parts
    that it holds. A checkpoint that lies at `path` stays whole until the new one is: a kill or
    a full disk at any moment leaves one that loads. What a killed save has left beside `path`
    (`path.tmp-...`, `path.old-...`) is cleared away by the next one. Only one program may save to
    a path at a time; a second one is refused, except on file systems without locks (NFS).

    The folder is one of `torch.distributed.checkpoint`, whose `load` reads it too, with two
    files beside: a manifest with checksums, and `extra`.

    Args:
        path: folder to make or to replace; its parents are made.
        model: sharded or not.
        optimizer: made from parameters of `model`.
        extra: plain data and tensors in lists, tuples and dicts; objects with a `state_dict`
            (schedulers, `trine.core.Serializable`) stand for their state. That of rank 0 is
            saved.
        async_save: copy everything first, and write it in the background. The next save or
            load waits for it.

    Returns:
        None; with `async_save` a future that is done when the checkpoint is, and whose
        `result()` raises what this function would. Ask for it before leaving the world.

    Raises:
        CheckpointError: on every rank, if it failed on one: naming the ranks, and why. The
            last checkpoint is as it was.
    """
    global _pending
    wait_for_pending_save()
    path = Path(path).absolute()
    ranks = Ranks()
    with tracing.span("checkpoint_collect", "io"):
        state, extra_file = _collected(ranks, path, model, optimizer, extra)
    if not async_save:
        _write(path, state, extra_file, ranks)
        return None
    with tracing.span("checkpoint_stage", "io"):
        state = _staged(ranks, path, state)
    # A thread that the interpreter waits for when it ends.
    executor = ThreadPoolExecutor(1, thread_name_prefix="saves a checkpoint")
    _pending = executor.submit(_write_in_background, path, state, extra_file, ranks)
    executor.shutdown(wait=False)
    return _pending


def wait_for_pending_save() -> None:
    """Return once no save is under way; how it ended is told by its future."""
    global _pending
    if _pending is not None:
        _pending.exception()
        _pending = None


def _collected(
    ranks: Ranks, path: Path, model: nn.Module, optimizer: Optimizer | None, extra: object
) -> tuple[dict[str, Any], bytes]:
    state: dict[str, Any] = {}
    extra_file = b""

    def collect() -> None:
        nonlocal extra_file
        state["model"] = model_values(model)
        require_loadable(state["model"])
        if optimizer is not None:
            state["optimizer"] = optimizer_values(model, optimizer)
        if ranks.rank == 0:
            extra_file = packed_extra(extra)

    ranks.on_all(f"collecting what to save to {path}", collect)
    return state, extra_file


def _staged(ranks: Ranks, path: Path, state: dict[str, Any]) -> dict[str, Any]:
    """A copy in host memory, so that training may change what it was made of."""
    copied: dict[str, Any] = {}

    def stage() -> None:
        stager = DefaultStager(StagingOptions(False, False, False, False))
        try:
            staged = stager.stage(state)
            assert isinstance(staged, dict)  # not a future: staging is not asynchronous
            copied.update(staged)
        finally:
            stager.close()

    ranks.on_all(f"copying what to save to {path}", stage)
    return copied


def _write_in_background(
    path: Path, state: dict[str, Any], extra_file: bytes, ranks: Ranks
) -> None:
    try:
        _write(path, state, extra_file, ranks)
    except CheckpointError as error:
        _log.error("Rank %d: the checkpoint in the background failed. %s", ranks.rank, error)
        raise


def _write(path: Path, state: dict[str, Any], extra_file: bytes, ranks: Ranks) -> None:
    with ExitStack() as held:
        folder = ranks.on_first(f"preparing to save {path}", lambda: prepare(path, held))
        _write_into(folder, path, state, extra_file, ranks)


def _write_into(
    folder: Path, path: Path, state: dict[str, Any], extra_file: bytes, ranks: Ranks
) -> None:
    start = time.perf_counter()
    if ranks.rank == 0:
        _log.info("Saving the checkpoint %s from %d ranks.", path, ranks.size)
    try:
        with tracing.span("checkpoint_write", "io"):
            _write_values(path, folder, state, ranks)
        with tracing.span("checkpoint_checksum", "io"):
            manifest = _describe(path, folder, extra_file, ranks)

        def finish() -> None:
            write_manifest(folder, manifest)
            sync(folder)
            replace(path, folder)

        with tracing.span("checkpoint_replace", "io"):
            ranks.on_first(f"putting {path} in place", finish)
    except CheckpointError:
        if ranks.rank == 0:
            with suppress(OSError):
                shutil.rmtree(folder)
        raise
    if ranks.rank == 0:
        seconds = time.perf_counter() - start
        _log.info("Saved %s: %.1f MB in %.1f s.", path, manifest.nbytes / 1e6, seconds)


def _write_values(path: Path, folder: Path, state: dict[str, Any], ranks: Ranks) -> None:
    with warnings.catch_warnings() if ranks.group is None else nullcontext():
        if ranks.group is None:  # as is meant
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            save(
                state,
                storage_writer=FileSystemWriter(folder),
                process_group=ranks.group,
                no_dist=ranks.group is None,
            )
        except CheckpointException as error:
            why = "\n".join(
                f"rank {rank}: {type(failure[0]).__name__}: {failure[0]}"
                for rank, failure in sorted(error.failures.items())
            )
            raise CheckpointError(f"While writing {path}: {why}") from error
        except Exception as error:  # the group is broken: a rank was killed
            raise CheckpointError(
                f"While writing {path}, rank {ranks.rank} lost touch with the others: "
                f"{type(error).__name__}: {error}"
            ) from error


def _describe(path: Path, folder: Path, extra_file: bytes, ranks: Ranks) -> Manifest:
    """Write the file of extra, and add up the bytes of all files, each rank those of some."""

    def files() -> list[str]:
        with (folder / EXTRA).open("wb") as stream:
            stream.write(extra_file)
            stream.flush()
            os.fsync(stream.fileno())
        return sorted(each.name for each in folder.iterdir())

    names = ranks.on_first(f"writing {path}", files)
    parts = ranks.on_all(
        f"reading {path} back",
        lambda: [entry_of(folder / name) for name in names[ranks.rank :: ranks.size]],
    )
    entries = sorted((entry for part in parts for entry in part), key=lambda each: each.name)
    return Manifest(tuple(entries), ranks.size)

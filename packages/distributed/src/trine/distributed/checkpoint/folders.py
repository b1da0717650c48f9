"""Where a checkpoint lies while it is written, replaced and looked for.

Note [The moments of a replacement]
    `path` is replaced in this order, each step durable before the next:

    1. `path.tmp-N` is written, whole, its manifest last.
    2. `path` is renamed to `path.old-N`, if there is one.
    3. `path.tmp-N` is renamed to `path`.
    4. `path.old-N` is removed.

    Killed before 2, `path` is the last one, and `path.tmp-N` is a left-over. Killed between 2
    and 3 there is no `path`; that `path.old-N` exists says that `path.tmp-N` is whole, so
    `find` takes it, and the next save finishes step 3. Killed after 3, `path` is the new one.
    A rename within one folder needs no room on the disk.

Note [One program at a time]
    What is taken for a left-over must not be what another program is writing. A save holds a
    lock on its folder, under whatever name, until it is over; the system takes the lock away
    when the program ends, killed or not. Where a file system has no locks on folders (NFS) all
    is as if nobody held one.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import shutil
import uuid
from contextlib import ExitStack
from pathlib import Path

from trine.distributed.checkpoint.ranks import CheckpointError

__all__ = ["MANIFEST", "find", "prepare", "replace", "sync"]

_log = logging.getLogger(__name__)

MANIFEST = "trine-checkpoint.json"
"""The file that is written last into a checkpoint, and says that it is whole."""


def prepare(path: Path, held: ExitStack) -> Path:
    """Make the folder to write into, and clear away what killed saves have left.

    Args:
        path: where the checkpoint shall lie in the end.
        held: gets the lock on the folder; see Note [One program at a time].

    Returns:
        A new, empty folder `path.tmp-N`.

    Raises:
        ValueError: if `path` is something else than a checkpoint, which would be lost, or if
            another program is saving to it.
    """
    if path.is_symlink() or (path.exists() and not path.is_dir()):
        raise ValueError(
            f"{path} is a file or a link, so no checkpoint can take its place. Give the path of a "
            "folder, or one that does not exist."
        )
    if path.is_dir() and any(path.iterdir()) and not (path / MANIFEST).is_file():
        raise ValueError(
            f"{path} holds something else than a checkpoint (it has no {MANIFEST}), and saving "
            "would replace it. Give a path that does not exist, such as a folder in it."
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    _require_free(path, path)
    for left_over in _beside(path, "tmp"):
        _require_free(left_over, path)
    if not (path / MANIFEST).is_file():
        survivor = _survivor(path)
        if survivor is not None:
            survivor.rename(path)
            sync(path.parent)
    for left_over in (*_beside(path, "tmp"), *_beside(path, "old")):
        _require_free(left_over, path)
        shutil.rmtree(left_over)
    made = path.with_name(f"{path.name}.tmp-{uuid.uuid4().hex[:12]}")
    made.mkdir()
    _hold(made, path, held)
    try:
        for other in _beside(path, "tmp"):  # began at the same time
            if other != made:
                _require_free(other, path)
    except ValueError:
        made.rmdir()
        raise
    return made


def replace(path: Path, written: Path) -> None:
    """Let a checkpoint that is whole and durable take the place of the last one."""
    old = path.with_name(_swapped(written.name, ".tmp-", ".old-"))
    replaces = (path / MANIFEST).is_file()
    if replaces:
        path.rename(old)
    try:
        if replaces:
            sync(path.parent)
        written.rename(path)
    except OSError:
        if replaces:
            old.rename(path)
        raise
    sync(path.parent)
    if replaces:
        try:
            shutil.rmtree(old)
        except OSError as error:  # the next save tries again; this one has succeeded
            _log.warning("%s could not be removed: %s", old, error)


def find(path: Path) -> Path:
    """The folder that holds the checkpoint `path` now.

    That is `path`, unless a kill has come between the two renames of a replacement.

    Raises:
        CheckpointError: if there is none.
    """
    if (path / MANIFEST).is_file():
        return path
    survivor = _survivor(path)
    if survivor is not None:
        return survivor
    if not path.exists():
        raise CheckpointError(f"There is no checkpoint at {path}.")
    raise CheckpointError(
        f"{path} is no checkpoint of save_checkpoint: it has no {MANIFEST}. Folders written by "
        "torch.distributed.checkpoint are loaded with its load()."
    )


def sync(folder: Path) -> None:
    """Make what was created in or renamed into a folder durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # file systems that need none
            raise
    finally:
        os.close(handle)


def _hold(folder: Path, path: Path, held: ExitStack) -> None:
    handle = os.open(folder, os.O_RDONLY)
    held.callback(os.close, handle)
    if not _lock(handle, fcntl.LOCK_EX):
        raise _busy(path)
    # By itself it would live on in processes that were forked meanwhile.
    held.callback(_lock, handle, fcntl.LOCK_UN)


def _require_free(folder: Path, path: Path) -> None:
    try:
        handle = os.open(folder, os.O_RDONLY)
    except FileNotFoundError:
        return
    try:
        if not _lock(handle, fcntl.LOCK_SH):
            raise _busy(path)
    finally:
        os.close(handle)


def _lock(handle: int, kind: int) -> bool:
    """Lock a folder; False if another program has."""
    try:
        fcntl.flock(handle, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # no locks here
        return True
    return True


def _busy(path: Path) -> ValueError:
    return ValueError(
        f"Another program is saving to {path}. Give each its own path, or wait until it has ended."
    )


def _survivor(path: Path) -> Path | None:
    """See Note [The moments of a replacement]."""
    for old in _beside(path, "old"):
        new = old.with_name(_swapped(old.name, ".old-", ".tmp-"))
        for candidate in (new, old):
            if (candidate / MANIFEST).is_file():
                return candidate
    return None


def _beside(path: Path, kind: str) -> list[Path]:
    pattern = re.compile(re.escape(f"{path.name}.{kind}-") + "[0-9a-f]{12}")
    if not path.parent.is_dir():
        return []
    return sorted(each for each in path.parent.iterdir() if pattern.fullmatch(each.name))


def _swapped(name: str, kind: str, other: str) -> str:
    # The last one: the checkpoint itself may be called anything.
    head, _, number = name.rpartition(kind)
    return f"{head}{other}{number}"

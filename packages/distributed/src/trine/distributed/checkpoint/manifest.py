"""The manifest of a checkpoint: which files it consists of, and what their bytes add up to.

Storage that loses or flips bytes does not say so, and neither does `torch.load`: a checksum
of each file is compared before anything of it is used.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from trine.distributed.checkpoint.folders import MANIFEST
from trine.distributed.checkpoint.ranks import CheckpointError

__all__ = [
    "FileEntry",
    "Manifest",
    "entry_of",
    "read_manifest",
    "replaced",
    "unreplaced",
    "verify",
    "write_manifest",
]

_FORMAT = 1
_BLOCK = 1 << 20


@dataclass(frozen=True)
class FileEntry:
    """One file of a checkpoint.

    Attributes:
        name: in the folder.
        nbytes: its size.
        crc32: of its contents.
    """

    name: str
    nbytes: int
    crc32: int


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint consists of.

    Attributes:
        files: all but the manifest itself.
        world_size: by how many ranks it was written; any number may read it.
    """

    files: tuple[FileEntry, ...]
    world_size: int

    @property
    def nbytes(self) -> int:
        """The size of all files together."""
        return sum(entry.nbytes for entry in self.files)


def entry_of(file: Path) -> FileEntry:
    """Read a file and add up its bytes."""
    crc = nbytes = 0
    with file.open("rb") as stream:
        while block := stream.read(_BLOCK):
            crc = zlib.crc32(block, crc)
            nbytes += len(block)
    return FileEntry(file.name, nbytes, crc)


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Declare a checkpoint whole; its files must be durable."""
    text = json.dumps({"format": _FORMAT, **asdict(manifest)}, indent=1)
    # In one rename, so that a manifest that is there is whole.
    unfinished = folder / f"{MANIFEST}.part"
    with unfinished.open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    unfinished.rename(folder / MANIFEST)


def read_manifest(folder: Path) -> Manifest:
    """What a checkpoint says that it consists of.

    Raises:
        CheckpointError: if that cannot be understood.
    """
    file = folder / MANIFEST
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        if found["format"] != _FORMAT:
            raise CheckpointError(
                f"{file} has the format {found['format']}; this version of trine-distributed "
                f"reads {_FORMAT}. Load it with the version that wrote it, or a newer one."
            )
        return Manifest(
            tuple(
                FileEntry(str(each["name"]), int(each["nbytes"]), int(each["crc32"]))
                for each in found["files"]
            ),
            int(found["world_size"]),
        )
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{file} is damaged: {error!r}.") from error


def verify(folder: Path, manifest: Manifest, part: int = 0, parts: int = 1) -> None:
    """Compare files with the manifest: all sizes, and the contents of this part of the files.

    Raises:
        CheckpointError: naming the file that differs.
    """
    for entry in manifest.files:
        file = folder / entry.name
        found = file.stat().st_size if file.is_file() else None
        if found != entry.nbytes:
            what = "is missing" if found is None else f"has {found} bytes"
            raise CheckpointError(f"{file} is damaged: it {what}, and {entry.nbytes} were written.")
    for entry in manifest.files[part::parts]:
        if entry_of(folder / entry.name) != entry:
            raise CheckpointError(
                f"{folder / entry.name} is damaged: its bytes are not those that were written."
            )


@contextmanager
def unreplaced(folder: Path, manifest: Manifest) -> Iterator[None]:
    """Refuse what was read partly from one checkpoint, and partly from one in its place.

    Raises:
        CheckpointError: at the end, if the manifest is another one then.
    """
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        failure = error
    try:
        same = read_manifest(folder) == manifest
    except (OSError, CheckpointError):
        same = False
    if not same:
        raise CheckpointError(replaced(folder)) from failure
    if failure is not None:
        raise failure


def replaced(folder: Path) -> str:
    """That a checkpoint was, for a message."""
    return (
        f"{folder} was replaced or removed while it was read. Load again; and do not load from a "
        "path to which another program saves."
    )

"""consolidate: a checkpoint as one safetensors file, without ranks and one tensor at a time.

The format (https://huggingface.co/docs/safetensors) is a length, a header in JSON and the bytes
of all tensors, so it is written here as the tensors come: the `safetensors` package wants
all of them in memory, and is not needed.
"""

from __future__ import annotations

import json
import logging
import os
import struct
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from trine.core import tracing
from trine.distributed.checkpoint.folders import find, sync
from trine.distributed.checkpoint.load import read_metadata, read_values
from trine.distributed.checkpoint.manifest import read_manifest, unreplaced, verify
from trine.distributed.checkpoint.ranks import CheckpointError

__all__ = ["consolidate"]

_log = logging.getLogger(__name__)

_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def consolidate(path: str | os.PathLike[str], out: str | os.PathLike[str]) -> None:
    """Write the model of a checkpoint as one safetensors file, in one process.

    Needs no ranks, no model and no process group, and memory for little more than the largest
    tensor. Tensors keep their dtypes and have the names that they have in the model's state
    dict, as `transformers` expects them. The checkpoint is verified first, and `out` appears
    when it is whole.

    Args:
        path: what `save_checkpoint` was given.
        out: the file to write or to replace.

    Raises:
        CheckpointError: if the checkpoint is damaged, or holds a tensor that the format cannot.
        OSError: if `out` cannot be written.
    """
    out = Path(out)
    folder = find(Path(path).absolute())
    with tracing.span("checkpoint_verify", "io"):
        manifest = read_manifest(folder)
        verify(folder, manifest)
    metadata = read_metadata(folder)
    entries = _entries(folder, metadata)
    with (
        tracing.span("checkpoint_consolidate", "io"),
        _replacing(out) as stream,
        unreplaced(folder, manifest),
    ):
        stream.write(_header(entries))
        for key, _, entry in entries:
            # One at a time: the next is read when this one is written and gone.
            values = {key: torch.empty(entry.size, dtype=entry.properties.dtype)}
            read_values(folder, metadata, values)
            stream.write(_bytes_of(values[key]))
    _log.info("Wrote %d tensors to %s.", len(entries), out)


_Entry = tuple[str, str, TensorStorageMetadata]


def _entries(folder: Path, metadata: Metadata) -> list[_Entry]:
    """Key, name and description of each tensor, in the order of the file."""
    entries: list[_Entry] = []
    for key, path in (metadata.planner_data or {}).items():
        if path[0] != "model":
            continue
        name, entry = path[1], metadata.state_dict_metadata[key]
        if not isinstance(entry, TensorStorageMetadata):
            _log.warning("%s is no tensor, so it is left out.", name)
            continue
        if entry.properties.dtype not in _DTYPES:
            raise CheckpointError(
                f"{name} in {folder} has the dtype {entry.properties.dtype}, which safetensors "
                f"cannot hold. It knows {', '.join(str(dtype) for dtype in _DTYPES)}."
            )
        entries.append((key, name, entry))
    # The widest first, as the format's own library does: then each lies aligned.
    return sorted(entries, key=lambda each: (-each[2].properties.dtype.itemsize, each[1]))


def _header(entries: list[_Entry]) -> bytes:
    described: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for _, name, entry in entries:
        end = offset + prod(entry.size) * entry.properties.dtype.itemsize
        described[name] = {
            "dtype": _DTYPES[entry.properties.dtype],
            "shape": list(entry.size),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _bytes_of(tensor: Tensor) -> memoryview:
    return tensor.reshape(-1).view(torch.uint8).numpy().data


@contextmanager
def _replacing(out: Path) -> Iterator[BinaryIO]:
    """A file that takes the place of `out` when it is whole, and is gone if it never is."""
    unfinished = out.with_name(f"{out.name}.tmp-{uuid.uuid4().hex[:12]}")
    try:
        with unfinished.open("wb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        unfinished.rename(out)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
    sync(out.absolute().parent)

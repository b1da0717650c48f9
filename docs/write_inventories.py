"""Write the inventories by which the documentation links to Python's and torch's.

Sphinx would download them. Ours hold only the names that our pages mention, so that a
build needs no network and a name that nobody checked fails it. Run this file after
adding a name; both inventories are written anew.
"""

from __future__ import annotations

import zlib
from pathlib import Path

FOLDER = Path(__file__).parent / "inventories"

# name: (role, page). An anchor that equals the name is written as "$".
PYTHON = {
    "None": ("py:data", "library/constants.html#$"),
    "BaseException": ("py:exception", "library/exceptions.html#$"),
    "RuntimeError": ("py:exception", "library/exceptions.html#$"),
    "NotImplementedError": ("py:exception", "library/exceptions.html#$"),
    "TypeError": ("py:exception", "library/exceptions.html#$"),
    "ValueError": ("py:exception", "library/exceptions.html#$"),
    "bool": ("py:class", "library/functions.html#$"),
    "bytes": ("py:class", "library/stdtypes.html#$"),
    "dict": ("py:class", "library/stdtypes.html#$"),
    "float": ("py:class", "library/functions.html#$"),
    "int": ("py:class", "library/functions.html#$"),
    "list": ("py:class", "library/stdtypes.html#$"),
    "object": ("py:class", "library/functions.html#$"),
    "set": ("py:class", "library/stdtypes.html#$"),
    "str": ("py:class", "library/stdtypes.html#$"),
    "tuple": ("py:class", "library/stdtypes.html#$"),
    "type": ("py:class", "library/functions.html#$"),
    "abc.ABC": ("py:class", "library/abc.html#$"),
    "collections.abc.Callable": ("py:class", "library/collections.abc.html#$"),
    "collections.abc.Iterable": ("py:class", "library/collections.abc.html#$"),
    "collections.abc.Iterator": ("py:class", "library/collections.abc.html#$"),
    "collections.abc.Mapping": ("py:class", "library/collections.abc.html#$"),
    "collections.abc.Sequence": ("py:class", "library/collections.abc.html#$"),
    "concurrent.futures._base.Future": (
        "py:class",
        "library/concurrent.futures.html#concurrent.futures.Future",
    ),
    "contextlib.AbstractContextManager": ("py:class", "library/contextlib.html#$"),
    "datetime.timedelta": ("py:class", "library/datetime.html#$"),
    "enum.StrEnum": ("py:class", "library/enum.html#$"),
    "os.PathLike": ("py:class", "library/os.html#$"),
    "pathlib.Path": ("py:class", "library/pathlib.html#$"),
    "time.perf_counter_ns": ("py:function", "library/time.html#$"),
    "typing.Any": ("py:data", "library/typing.html#$"),
    "typing.Literal": ("py:data", "library/typing.html#$"),
    "typing.Protocol": ("py:class", "library/typing.html#$"),
    "typing.Self": ("py:data", "library/typing.html#$"),
    "typing.TypeVar": ("py:class", "library/typing.html#$"),
}
TORCH = {
    "torch.Tensor": ("py:class", "tensors.html#$"),
    "torch.device": ("py:class", "tensor_attributes.html#$"),
    "torch.dtype": ("py:class", "tensor_attributes.html#$"),
    "torch.amp.grad_scaler.GradScaler": ("py:class", "amp.html#torch.amp.GradScaler"),
    "torch.distributed.device_mesh.DeviceMesh": ("py:class", "distributed.html#$"),
    "torch._C._distributed_c10d.ReduceOp.RedOpType": (
        "py:class",
        "distributed.html#torch.distributed.ReduceOp",
    ),
    "torch.distributed.distributed_c10d.ProcessGroup": ("py:class", "distributed.html#groups"),
    "torch.distributed.distributed_c10d.Work": (
        "py:class",
        "distributed.html#torch.distributed.Work",
    ),
    "torch.distributed.tensor.placement_types.Shard": (
        "py:class",
        "distributed.tensor.html#$",
    ),
    "torch.nn.Module": ("py:class", "generated/torch.nn.Module.html#$"),
    "torch.nn.modules.module.Module": (
        "py:class",
        "generated/torch.nn.Module.html#torch.nn.Module",
    ),
    "torch.nn.parameter.Parameter": (
        "py:class",
        "generated/torch.nn.parameter.Parameter.html#$",
    ),
    "torch.optim.optimizer.Optimizer": ("py:class", "optim.html#torch.optim.Optimizer"),
    "torch.utils.data.dataloader.DataLoader": ("py:class", "data.html#torch.utils.data.DataLoader"),
    "torch.profiler.profile": ("py:class", "profiler.html#$"),
}


def write_inventory(path: Path, project: str, names: dict[str, tuple[str, str]]) -> None:
    """Write one inventory in the format that Sphinx calls version 2.

    Args:
        path: the file; written anew.
        project: what the inventory says it belongs to.
        names: for each name its role and the address below the project's root.
    """
    # The reader insists on these four lines, word for word; the version is not used.
    head = (
        "# Sphinx inventory version 2\n"
        f"# Project: {project}\n"
        "# Version: 3\n"
        "# The remainder of this file is compressed using zlib.\n"
    )
    lines = [f"{name} {role} 1 {address} -\n" for name, (role, address) in sorted(names.items())]
    path.write_bytes(head.encode() + zlib.compress("".join(lines).encode(), 9))


if __name__ == "__main__":
    write_inventory(FOLDER / "python.inv", "Python", PYTHON)
    write_inventory(FOLDER / "torch.inv", "torch", TORCH)

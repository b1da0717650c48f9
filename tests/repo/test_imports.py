"""Rules over imports that import-linter cannot state: it sees torch as one module."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from tests.repo.tree import ROOT, files

# Our engine stands on c10d, DTensor and autograd. Torch's own FSDP is what the
# tests and benchmarks compare it with, so only they may touch it.
FORBIDDEN = ("torch.distributed.fsdp", "torch.distributed._composable")


def test_no_package_uses_the_fsdp_of_torch() -> None:
    sources = [path for path in files() if path.parts[0] == "packages" and path.suffix == ".py"]

    found = [
        f"{path}: {name}"
        for path in sources
        for name in names_used((ROOT / path).read_text(encoding="utf-8"))
        if is_forbidden(name)
    ]

    assert sources
    assert found == []


# Streams, events, memory and copies are asked of trine.core.Device.
DEVICES = ("torch.cuda", "torch.xpu", "torch.mps", "torch.accelerator", "torch.Stream")


def test_distributed_knows_no_kind_of_device() -> None:
    sources = [path for path in files() if path.parts[:2] == ("packages", "distributed")]

    found = [
        f"{path}: {name}"
        for path in sources
        if path.suffix == ".py"
        for name in names_used((ROOT / path).read_text(encoding="utf-8"))
        if any(name == each or name.startswith(f"{each}.") for each in DEVICES)
    ]

    assert sources
    assert found == []


@pytest.mark.parametrize(
    "code",
    [
        "import torch.distributed.fsdp",
        "import torch.distributed._composable.fsdp as f",
        "from torch.distributed.fsdp import fully_shard",
        "from torch.distributed import fsdp",
        "from torch.distributed._composable import fully_shard",
        "def f():\n    from torch.distributed.fsdp import FSDPModule",
        "import torch\ntorch.distributed.fsdp.fully_shard(m)",
        "import torch.distributed as dist\ndist.fsdp.fully_shard(m)",
    ],
)
def test_every_way_to_reach_it_would_be_noticed(code: str) -> None:
    assert any(is_forbidden(name) for name in names_used(code))


@pytest.mark.parametrize(
    "code",
    [
        "import torch.distributed as dist\ndist.all_reduce(t)",
        "from torch.distributed.tensor import DTensor",
        "from trine.distributed.fsdp import fully_shard",
        "# torch.distributed.fsdp has the same signature",
    ],
)
def test_lawful_imports_pass(code: str) -> None:
    assert not any(is_forbidden(name) for name in names_used(code))


def is_forbidden(name: str) -> bool:
    return any(name == module or name.startswith(f"{module}.") for module in FORBIDDEN)


def names_used(code: str) -> Iterator[str]:
    """Yield the full names of imported things and of attribute chains upon them."""
    aliases: dict[str, str] = {}
    tree = ast.parse(code)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name
                top = alias.name.partition(".")[0]
                aliases[alias.asname or top] = alias.name if alias.asname else top
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                yield f"{node.module}.{alias.name}"
                aliases[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            first, dot, rest = ast.unparse(node).partition(".")
            if first in aliases:
                yield aliases[first] + dot + rest

"""Python, torch and our packages: which they are, and whether they fit together."""

from __future__ import annotations

import importlib
import platform
import re
import shutil
import sys
from collections.abc import Iterator
from importlib.metadata import Distribution, PackageNotFoundError, distributions, version
from pathlib import Path

import torch
from torch.torch_version import TorchVersion

from trine.core.doctor.checks import Check

__all__ = ["check_packages", "check_python", "check_torch"]

_CORE = "trine-core"
_REQUIREMENT = re.compile(r"([A-Za-z0-9._-]+)\s*(?:\[[^]]*\])?\s*\(?([^()]*)\)?$")
_SPECIFIER = re.compile(r"(==|!=|<=|>=|<|>)\s*([\w.+!-]+)$")


def check_python() -> Iterator[Check]:
    """The interpreter, against what our packages ask for."""
    found = platform.python_version()
    details = {"version": found, "executable": sys.executable, "platform": platform.platform()}
    wanted = Distribution.from_name(_CORE).metadata["Requires-Python"] or ""
    where = f"{platform.python_implementation()} on {platform.system()} {platform.machine()}"
    if satisfies(found, wanted):
        yield Check("python", "ok", f"{found}, {where}", details=details)
    else:
        yield Check(
            "python",
            "error",
            f"{found}, {where}: {_CORE} asks for {wanted}",
            f"Make a virtual environment with a Python {wanted} and install there.",
            details,
        )


def check_torch() -> Iterator[Check]:
    """The build of torch, against the hardware that it could use."""
    found = str(torch.__version__)
    built_for = _built_for()
    details: dict[str, object] = {
        "version": found,
        "built_for": built_for,
        "distributed": torch.distributed.is_available(),
        "path": str(Path(torch.__file__).parent),
    }
    if not torch.distributed.is_available():
        yield Check(
            "torch",
            "error",
            f"{found} was built without torch.distributed",
            "Install an official build: pip install torch.",
            details,
        )
        return
    yield Check("torch", "ok", f"{found}, built for {built_for}", details=details)
    if built_for == "the CPU" and has_nvidia_driver():
        yield Check(
            "torch",
            "warning",
            f"{found} cannot use this machine's NVIDIA GPU: it was built for the CPU",
            "Install a CUDA build of torch (pytorch.org, Get Started) to train on the GPU.",
        )


def has_nvidia_driver() -> bool:
    """Whether a driver for NVIDIA GPUs is installed, whatever torch thinks of it."""
    return Path("/proc/driver/nvidia/version").exists() or shutil.which("nvidia-smi") is not None


def _built_for() -> str:
    if torch.version.cuda:
        return f"CUDA {torch.version.cuda}"
    if torch.version.hip:
        return f"ROCm {torch.version.hip}"
    accelerator = torch.accelerator.current_accelerator()
    return "the CPU" if accelerator is None else f"the CPU and {accelerator.type}"


def check_packages() -> Iterator[Check]:
    """Our packages, and all others that build on trine-core: the versions they ask for."""
    ours = _ours()
    details = {
        name: {"version": each.version, "location": str(each.locate_file(""))}
        for name, each in ours.items()
    }
    misfits = [misfit for each in ours.values() for misfit in _misfits(each)]
    listed = ", ".join(f"{name} {each.version}" for name, each in ours.items())
    if not misfits:
        yield Check("packages", "ok", f"{listed}: fit together", details=details)
    for summary, mend in misfits:
        yield Check("packages", "error", summary, mend, details)
    stray = getattr(importlib.import_module("trine"), "__file__", None)
    if stray is not None:
        yield Check(
            "packages",
            "error",
            f"{stray} makes trine an ordinary package, which hides parts of it",
            f"Remove {stray}; none of our packages installs it.",
        )


def _ours() -> dict[str, Distribution]:
    """trine-core, and every installed distribution that requires it, by name."""
    found: dict[str, Distribution] = {}
    for each in distributions():
        requires = {_normal(name) for name, _ in requirements(each)}
        name = _normal(each.metadata["Name"] or "")
        if name == _CORE or _CORE in requires:
            found.setdefault(name, each)  # of two, the first on the path is the one imported
    return dict(sorted(found.items()))


def _misfits(each: Distribution) -> Iterator[tuple[str, str]]:
    name = each.metadata["Name"]
    for required, wanted in requirements(each):
        mend = f"pip install --upgrade {name} '{required}{wanted}'"
        try:
            have = version(required)
        except PackageNotFoundError:
            yield f"{name} {each.version} needs {required}{wanted}, which is not installed", mend
            continue
        if not satisfies(have, wanted):
            yield f"{name} {each.version} needs {required}{wanted}, but {have} is installed", mend


def requirements(each: Distribution) -> Iterator[tuple[str, str]]:
    """Name and version specifier of what it always requires.

    Those of extras, and those for some platforms only, carry a marker and are left out.
    """
    for line in each.requires or ():
        match = _REQUIREMENT.match(line.strip())
        if ";" not in line and match is not None:
            yield match[1], match[2].replace(" ", "")


def satisfies(have: str, wanted: str) -> bool:
    """Whether a version meets a specifier such as `>=2.11,<3`.

    torch compares the versions, by the rules of Python packaging. Clauses of a form that
    our packages do not use (`~=`, `==2.*`) are taken as met.
    """
    release = TorchVersion(have)
    for clause in filter(None, (part.strip() for part in wanted.split(","))):
        match = _SPECIFIER.match(clause)
        if match is None:
            continue
        operator, other = match.groups()
        equal = release == other
        met = {
            "==": equal,
            "!=": not equal,  # TorchVersion compares texts with !=
            "<=": release <= other,
            ">=": release >= other,
            "<": release < other,
            ">": release > other,
        }[operator]
        if not met:
            return False
    return True


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()

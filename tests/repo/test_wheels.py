"""What is inside the wheels. `nox -s package` builds them and runs this file."""

from __future__ import annotations

import os
from email.message import Message
from email.parser import Parser
from pathlib import Path
from zipfile import ZipFile

import pytest

from tests.repo.tree import ROOT, project

FOLDER = os.environ.get("TRINE_WHEELS")

pytestmark = pytest.mark.skipif(FOLDER is None, reason="needs built wheels: nox -s package")


@pytest.fixture(scope="module")
def wheels() -> dict[str, ZipFile]:
    assert FOLDER
    found = sorted(Path(FOLDER).glob("trine_*.whl"))
    assert found, f"no wheels in {FOLDER}"
    return {wheel.name.split("-")[0].removeprefix("trine_"): ZipFile(wheel) for wheel in found}


def metadata(wheel: ZipFile) -> Message:
    (name,) = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
    return Parser().parsestr(wheel.read(name).decode())


def test_wheels_hold_every_source_file_and_no_other(wheels: dict[str, ZipFile]) -> None:
    for name, wheel in wheels.items():
        source = ROOT / "packages" / name / "src"
        expected = {
            path.relative_to(source).as_posix()
            for path in source.rglob("*")
            if path.is_file() and "__pycache__" not in path.parts
        }

        content = {entry for entry in wheel.namelist() if ".dist-info/" not in entry}

        assert content == expected
        assert f"trine/{name}/py.typed" in content
        assert "trine/__init__.py" not in content


def test_core_brings_torch_and_nothing_else(wheels: dict[str, ZipFile]) -> None:
    needs = metadata(wheels["core"]).get_all("Requires-Dist", [])

    assert [need.partition(">")[0] for need in needs] == ["torch"]


def test_wheels_say_the_version_and_license_of_their_package(wheels: dict[str, ZipFile]) -> None:
    for name, wheel in wheels.items():
        fields = metadata(wheel)

        assert fields["Name"] == f"trine-{name}"
        assert fields["Version"] == project(name)["version"]
        assert fields["License-Expression"] == "Apache-2.0"
        assert any(entry.endswith(".dist-info/licenses/LICENSE") for entry in wheel.namelist())

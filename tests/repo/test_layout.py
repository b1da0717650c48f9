from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.repo.tree import PACKAGES, ROOT, files

TOP_LEVEL = {
    ".ci",
    ".github",
    ".gitignore",
    "CONTRIBUTING.md",
    "LICENSE",
    "README.md",
    "RELEASING.md",
    "docs",
    "noxfile.py",
    "packages",
    "pyproject.toml",
    "tests",
}
FRAGMENT = re.compile(r"(\d+|\+[a-z0-9-]+)\.(feature|bugfix|doc|removal|misc)(\.\d+)?\.md")
# A path that leads into one person's machine.
MACHINE = re.compile(r"(?<![\w.}-])/(home|Users|root|work|opt)/\w")


def test_top_level_holds_what_the_architecture_names_and_nothing_else() -> None:
    assert {path.parts[0] for path in files()} == TOP_LEVEL


def test_no_package_claims_the_namespace() -> None:
    # One __init__.py in trine/ would hide the other two packages; a py.typed
    # there would be owned by several wheels at once.
    in_namespace = [path for path in files() if path.parts[2:4] == ("src", "trine")]

    shared = [path for path in in_namespace if len(path.parts) == 5]

    assert in_namespace
    assert shared == []


@pytest.mark.parametrize("package", PACKAGES)
def test_each_package_owns_one_folder_of_the_namespace(package: str) -> None:
    folders = [path.name for path in (ROOT / "packages" / package / "src" / "trine").iterdir()]

    assert [name for name in folders if name != "__pycache__"] == [package]


@pytest.mark.parametrize("package", PACKAGES)
def test_type_checkers_see_the_types_of_each_package(package: str) -> None:
    assert Path(f"packages/{package}/src/trine/{package}/py.typed") in files()


@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize("name", ["LICENSE", "README.md", "CHANGELOG.md", "pyproject.toml"])
def test_each_package_carries_what_its_users_read(package: str, name: str) -> None:
    assert Path(f"packages/{package}/{name}") in files()


@pytest.mark.parametrize("package", PACKAGES)
def test_each_package_has_the_license_of_the_repository(package: str) -> None:
    license_text = (ROOT / "packages" / package / "LICENSE").read_text(encoding="utf-8")

    assert license_text == (ROOT / "LICENSE").read_text(encoding="utf-8")


@pytest.mark.parametrize("package", PACKAGES)
def test_changelog_fragments_have_names_that_towncrier_reads(package: str) -> None:
    folder = ROOT / "packages" / package / "changelog.d"

    names = [path.name for path in folder.iterdir() if path.name != ".gitkeep"]

    assert [name for name in names if not FRAGMENT.fullmatch(name)] == []


@pytest.mark.parametrize("name", ["2.feature.md", "+faster-copy.bugfix.md", "2.doc.1.md"])
def test_fragment_names_in_use_are_accepted(name: str) -> None:
    assert FRAGMENT.fullmatch(name)


@pytest.mark.parametrize("name", ["feature.md", "2.md", "2.feature", "2.enhancement.md"])
def test_fragment_names_that_towncrier_would_drop_are_refused(name: str) -> None:
    assert not FRAGMENT.fullmatch(name)


def test_no_file_names_a_path_on_somebody_s_machine() -> None:
    found = []
    for path in files():
        try:
            text = (ROOT / path).read_text(encoding="utf-8")
        except UnicodeDecodeError:  # a picture, an inventory
            continue
        found += [f"{path}: {hit.group()}" for hit in MACHINE.finditer(text)]

    assert found == []


def test_a_path_on_somebody_s_machine_would_be_noticed() -> None:
    planted = "/".join(["open(", "home", "ada", "data.txt)"])

    assert MACHINE.search(planted)
    assert not MACHINE.search("https://example.org/home/ada and _fsdp/root/x")

from __future__ import annotations

import re

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from tests.repo.tree import PACKAGES, ROOT, project


def requirements(package: str) -> dict[str, Requirement]:
    parsed = map(Requirement, project(package)["dependencies"])
    return {requirement.name: requirement for requirement in parsed}


def test_core_needs_torch_and_nothing_else() -> None:
    assert set(requirements("core")) == {"torch"}


@pytest.mark.parametrize("package", ["distributed", "tools"])
def test_range_of_core_admits_the_core_of_this_tree(package: str) -> None:
    core = requirements(package)["trine-core"]

    assert Version(project("core")["version"]) in core.specifier


@pytest.mark.parametrize("package", ["distributed", "tools"])
def test_range_of_core_ends_before_a_release_that_may_break(package: str) -> None:
    core = requirements(package)["trine-core"]

    assert any(clause.operator == "<" for clause in core.specifier)


@pytest.mark.parametrize(
    ("package", "stranger"), [("distributed", "tools"), ("tools", "distributed")]
)
def test_distributed_and_tools_do_not_need_each_other(package: str, stranger: str) -> None:
    assert f"trine-{stranger}" not in requirements(package)


@pytest.mark.parametrize("key", ["requires-python", "license", "authors", "classifiers"])
def test_packages_agree_on(key: str) -> None:
    values = [project(package)[key] for package in PACKAGES]

    assert values == values[:1] * len(PACKAGES)


def test_packages_ask_for_the_same_torch() -> None:
    needs = [requirements(package).get("torch") for package in PACKAGES]

    assert len({need.specifier for need in needs if need}) == 1


def test_a_session_runs_the_oldest_torch_that_is_asked_for() -> None:
    noxfile = (ROOT / "noxfile.py").read_text(encoding="utf-8")
    (listed,) = re.findall(r"^OTHER_TORCHES = \((.*?)\)", noxfile, re.MULTILINE)

    oldest = min(Version(text) for text in re.findall(r'"(.*?)"', listed))

    assert str(requirements("core")["torch"].specifier) == f">={oldest.major}.{oldest.minor}"


@pytest.mark.parametrize("package", PACKAGES)
def test_version_is_one_that_an_index_accepts(package: str) -> None:
    text = project(package)["version"]

    assert str(Version(text)) == text

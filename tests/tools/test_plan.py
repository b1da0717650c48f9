"""`trine plan` with a planner that says what the test wants, and how its words are understood."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from torch import nn

from trine.core import planning
from trine.core.planning import Plan, PlanError, PlanRequest, UnitPlan, Usage
from trine.tools.analysis.advice import advice
from trine.tools.cli import main
from trine.tools.planning.arguments import batch_of, mesh_of, nbytes_of, reshard_of, units_of
from trine.tools.planning.model import build_on_meta
from trine.tools.reports.plan_table import print_plans

GIB = 2**30


class FakePlanner:
    """Takes eight GiB of shards over as many ranks; remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[nn.Module, PlanRequest]] = []

    def plan(self, model: nn.Module, request: PlanRequest) -> Plan:
        self.asked.append((model, request))
        usage = Usage(sharded=8 * GIB // request.shard, activations=GIB)
        unit = UnitPlan("blocks.0", 100, 50, usage, {"all_gather": 1024})
        units = (unit, replace(unit, unit="blocks.1"))
        at_rest = Usage(sharded=usage.sharded)
        sent = {"all_gather": 2048}
        return Plan(request, units, usage, "in forward of blocks.1", at_rest, Usage(), sent)


@pytest.fixture
def planner(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakePlanner:
    made = FakePlanner()
    entry = SimpleNamespace(name="fake", value="fake", load=lambda: made)
    monkeypatch.setattr(planning, "entry_points", lambda *, group: [entry])
    monkeypatch.chdir(tmp_path)
    Path("models_of_this_test.py").write_text(
        "from torch import nn\n"
        "def two(): return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))\n"
        "def nothing(): return None\n"
        "def broken(): raise KeyError('depth')\n"
        "made = two()\n"
        "def leaves(): raise SystemExit(3)\n"
        "number = 3\n"
    )
    return made


def run(*args: str) -> Result:
    return CliRunner().invoke(main, ["plan", *args], prog_name="trine")


TWO = "models_of_this_test:two"


def test_a_model_is_made_on_meta_and_planned_for_each_mesh(planner: FakePlanner) -> None:
    result = run(TWO, "--mesh", "shard=8", "--mesh", "replicate=2,shard=4", "--batch", "8x4")

    assert result.exit_code == 0, result.output
    model, first = planner.asked[0]
    assert all(param.is_meta for param in model.parameters())
    assert (first.shard, first.replicate) == (8, 1)
    assert first.inputs[0].shape == (8, 4)
    assert (planner.asked[1][1].shard, planner.asked[1][1].replicate) == (4, 2)
    lines = result.output.splitlines()
    assert lines[0] == f"{TWO}, fp32, adamw: 200 parameters in 2 units"
    assert lines[1] == "shard=8: 2.00 GiB per rank at most, in forward of blocks.1"
    assert [line.split() for line in lines if line.startswith("parameter shards")] == [
        ["parameter", "shards", "1.00", "GiB", "2.00", "GiB"]
    ]


def test_equal_units_share_a_line(planner: FakePlanner) -> None:
    result = run(TWO, "--mesh", "shard=8")

    assert "blocks.0 ... blocks.1 (2)" in result.output


@pytest.mark.parametrize(
    ("memory", "verdict"),
    [
        ("2GiB", "fits 2.00 GiB with 0 B to spare"),
        ("80GiB", "fits 80.0 GiB with 78.0 GiB to spare"),
        ("1536MiB", "does not fit 1.50 GiB: 512 MiB too much. Most of it is activations"),
    ],
)
def test_it_says_whether_a_rank_has_the_memory(
    planner: FakePlanner, memory: str, verdict: str
) -> None:
    result = run(TWO, "--mesh", "shard=8", "--memory", memory)

    assert verdict in result.output


def test_json_has_every_number_in_bytes(planner: FakePlanner) -> None:
    result = run(TWO, "--mesh", "shard=8", "--memory", "1GiB", "--precision", "amp_bf16", "--json")

    data = json.loads(result.output)
    assert (data["format"], data["version"]) == ("trine-plan", 1)
    (made,) = data["plans"]
    assert made["peak"]["total"] == 2 * GIB
    assert made["fits"] is False
    assert made["request"]["param_dtype"] == "bfloat16"
    assert made["request"]["reduce_dtype"] == "float32"
    assert made["units"][1]["sent"] == {"all_gather": 1024}


def test_a_plain_precision_is_that_of_the_parameters_themselves(planner: FakePlanner) -> None:
    run(TWO, "--mesh", "shard=8", "--precision", "bf16")

    assert {p.dtype for p in planner.asked[0][0].parameters()} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["models_of_this_test:made", "--mesh", "shard=8"], "is a model. Expected a function"),
        (["models_of_this_test:none", "--mesh", "shard=8"], "cannot be found. AttributeError"),
        (["models_of_this_test:number", "--mesh", "shard=8"], "is int, not a function"),
        (["models_of_this_test:nothing", "--mesh", "shard=8"], "makes NoneType; expected a torch"),
        (["models_of_this_test:broken", "--mesh", "shard=8"], "meta device. KeyError: 'depth'"),
        (["no_such_package.a:b", "--mesh", "shard=8"], "No module named 'no_such_package'"),
        (["models_of_this_test:leaves", "--mesh", "shard=8"], "meta device. SystemExit: 3"),
    ],
)
def test_a_model_that_cannot_be_made_is_said_in_one_sentence(
    planner: FakePlanner, args: list[str], message: str
) -> None:
    result = run(*args)

    assert result.exit_code == 1
    assert result.output.startswith("Error: ")
    assert message in result.output
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([TWO, "--mesh", "pipeline=8"], "Expected shard=8, or replicate=2,shard=4."),
        ([TWO, "--mesh", "shard=0"], "--mesh 'shard=0' is not understood"),
        (["models_of_this_test", "--mesh", "shard=8"], "Expected package.module:factory, where"),
        (["models_of_this_test.py:two", "--mesh", "shard=8"], "as import takes it, without .py"),
        ([TWO, "--mesh", "shard=8", "--batch", "8xtwo"], "--batch '8xtwo' is not understood"),
        ([TWO, "--mesh", "shard=8", "--memory", "much"], "Expected a size such as 80GiB."),
        ([TWO, "--mesh", "shard=8", "--memory", "80"], "--memory '80' is not understood."),
        ([TWO, "--mesh", f"shard={10**8}"], "has more ranks than 10,000,000"),
        ([TWO, "--mesh", "replicate=10000,shard=10000"], "has more ranks than 10,000,000"),
        ([TWO, "--mesh", f"shard=1{'0' * 5_000}"], "is not understood"),
        ([TWO, "--mesh", "shard=8", "--batch", f"{10**10}x{10**10}"], "larger than any tensor"),
        ([TWO, "--mesh", "shard=8", "--memory", f"{'9' * 400}GiB"], "Expected a size such as"),
        ([TWO, "--mesh", "shard=8", "--units", "9" * 400], "--units '999"),
    ],
)
def test_an_argument_that_is_not_understood_is_a_usage_error(
    planner: FakePlanner, args: list[str], message: str
) -> None:
    result = run(*args)

    assert result.exit_code == 2
    assert message in result.output
    assert "Traceback" not in result.output


def test_without_trine_distributed_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(planning, "entry_points", lambda *, group: [])

    result = run("torch.nn:Identity", "--mesh", "shard=8")

    assert result.exit_code == 1
    assert "Install trine-distributed" in result.output


@pytest.mark.parametrize(
    ("text", "units"),
    [
        (None, None),
        ("10M", 10_000_000),
        ("5000", 5000),
        ("Block, Embedding", ("Block", "Embedding")),
    ],
)
def test_units_are_classes_or_a_size(text: str | None, units: Any) -> None:
    assert units_of(text) == units


def test_words_of_sizes_shapes_and_resharding_are_understood() -> None:
    assert nbytes_of("80GiB") == 80 * GIB
    assert nbytes_of("1.5 GB") == 1_500_000_000
    assert mesh_of("shard=4, replicate=2") == {"replicate": 2, "shard": 4}
    assert batch_of("8x16:int64").dtype is torch.int64
    assert [reshard_of(each) for each in ("auto", "yes", "no", "4")] == [None, True, False, 4]
    with pytest.raises(PlanError, match="auto, yes, no, or a number"):
        reshard_of("maybe")
    with pytest.raises(PlanError, match="names of classes"):
        units_of("10 blocks")


def test_a_model_that_insists_on_a_device_is_moved_to_meta(tmp_path: Path) -> None:
    model = build_on_meta("tests.tools.test_plan:on_cpu")

    assert all(param.is_meta for param in model.parameters())


def on_cpu() -> nn.Module:
    return nn.Linear(2, 2, device="cpu")


def test_one_unit_is_not_many(planner: FakePlanner) -> None:
    plan = planner.plan(nn.Identity(), PlanRequest(shard=1))
    file = io.StringIO()

    print_plans([replace(plan, units=plan.units[:1])], "model", file=file)

    assert file.getvalue().startswith("model: 100 parameters in 1 unit\n")


@pytest.mark.parametrize(
    ("by_kind", "words"),
    [
        ({"sharded": 2, "gradients": 2, "optimizer": 2, "activations": 5}, "shard over more"),
        ({"activations": 5}, "smaller batch"),
        ({"unsharded": 5, "optimizer": 1}, "make units smaller"),
        ({"communication": 5}, "smaller dtype"),
        ({"replicated": 5}, "every rank holds whole"),
        ({}, "Nothing was counted"),
    ],
)
def test_advice_is_about_the_largest_part(by_kind: dict[str, float], words: str) -> None:
    assert words in advice(by_kind)

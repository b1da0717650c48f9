"""The programs on the pages do what the pages say, copied as a reader copies them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from trine.tools.cli import main as trine

ROOT = Path(__file__).parents[2]
# Plain torch may abort when the interpreter ends while threads of gloo are running.
END_NOW = "import os\n\nos._exit(0)\n"
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def program(page: str, number: int = 0) -> str:
    """One of the Python programs that a page shows."""
    text = (ROOT / page).read_text(encoding="utf-8")
    blocks: list[str] = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    return blocks[number]


def run(folder: Path, code: str, *launcher: str, file: str = "train.py") -> str:
    """Run a program from a file in `folder`, and return what it prints."""
    (folder / file).write_text(code, encoding="utf-8")
    ended = subprocess.run(
        [sys.executable, *launcher, file],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_the_script_of_the_tutorial_trains_and_shows_a_row_for_each_block(tmp_path: Path) -> None:
    script = program("docs/tutorials/shard-your-first-model.md")

    printed = run(tmp_path, script, *TORCHRUN)

    losses = [float(loss) for loss in re.findall(r"step \d+: loss ([\d.]+)", printed)]
    assert len(losses) == 3
    assert losses[-1] < losses[0]
    table = printed.partition("\nunit ")[2]
    assert re.findall(r"^([\w(]\S*) ", table, re.MULTILINE) == [*"0123", "total"]
    assert sorted(path.name for path in (tmp_path / "trine-run").iterdir()) == [
        "timeline.json",
        "trace-rank00000.trine",
        "trace-rank00001.trine",
    ]


def test_the_script_of_the_tutorial_also_runs_without_torchrun(tmp_path: Path) -> None:
    script = program("docs/tutorials/shard-your-first-model.md")

    printed = run(tmp_path, script)

    assert "step 29: loss" in printed


def test_a_parameters_life_is_as_the_page_tells_it(tmp_path: Path) -> None:
    page = "docs/explanation/a-parameters-life.md"
    shown = re.findall(r"```text\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)

    printed = run(tmp_path, program(page), *TORCHRUN, file="life.py")

    assert printed == "".join(shown)


@pytest.mark.timeout(300)  # two jobs, each of which starts two ranks
@pytest.mark.parametrize("trine_first", [False, True])
def test_either_engine_goes_on_from_what_the_other_has_saved(
    trine_first: bool, tmp_path: Path
) -> None:
    page = "docs/howto/coming-from-torch-fsdp2.md"
    shown = re.findall(r"```text\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)
    on_torch = program(page) + END_NOW
    changed = program(page, 1)
    theirs = changed.replace("from trine", "from torch")
    assert theirs in on_torch
    on_trine = on_torch.replace(theirs, changed)
    programs = (on_trine, on_torch) if trine_first else (on_torch, on_trine)

    printed = [run(tmp_path, code, *TORCHRUN) for code in programs]

    assert printed == shown


@pytest.mark.timeout(300)  # two jobs, each of which starts two ranks
@pytest.mark.parametrize(
    "order", [("torch", "wrapped"), ("wrapped", "fully_shard"), ("fully_shard", "torch")]
)
def test_wrapped_and_unwrapped_models_go_on_from_what_the_other_has_saved(
    order: tuple[str, str], tmp_path: Path
) -> None:
    page = "docs/howto/from-fullyshardeddataparallel-to-fully_shard.md"
    shown = re.findall(r"```text\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)
    on_torch, changed, sharded = (program(page, number) for number in range(3))
    theirs = changed.replace("from trine", "from torch")
    assert theirs in on_torch
    programs = {
        "torch": on_torch + END_NOW,
        "wrapped": on_torch.replace(theirs, changed),
        "fully_shard": sharded,
    }

    printed = [run(tmp_path, programs[name], *TORCHRUN) for name in order]

    number = r"\d+\.\d+"
    for seen, expected in zip(printed, shown, strict=True):
        assert re.sub(number, "", seen) == re.sub(number, "", expected)
        # One in the last digit: not every CPU rounds products of bf16 in the same way.
        assert [float(each) for each in re.findall(number, seen)] == pytest.approx(
            [float(each) for each in re.findall(number, expected)], abs=0.011
        )


def test_the_test_of_the_how_to_guide_passes(tmp_path: Path) -> None:
    code = program("docs/howto/test-on-several-ranks.md")

    printed = run(tmp_path, code, "-m", "pytest", file="test_mean_over_ranks.py")

    assert "1 passed" in printed


def test_the_script_of_the_how_to_guide_goes_on_where_it_was_on_other_ranks(tmp_path: Path) -> None:
    script = program("docs/howto/save-and-load.md")

    first = run(tmp_path, script, *TORCHRUN)
    second = run(tmp_path, script)

    assert "There is no checkpoint at" in first
    assert "saved step 19\n" in first
    assert "going on with step 20\n" in second
    assert "saved step 39\n" in second
    assert [each.name for each in (tmp_path / "run").iterdir()] == ["last"]


def test_the_ranks_of_the_readme_add_up(tmp_path: Path) -> None:
    code = program("packages/distributed/README.md", 2)

    printed = run(tmp_path, code)

    assert printed == "[3.0, 3.0, 3.0]\n"
    assert "# [3.0, 3.0, 3.0]" in code


@pytest.mark.parametrize(
    "page", ["README.md", "packages/distributed/README.md", "packages/tools/README.md"]
)
def test_the_example_of_a_readme_runs(page: str, tmp_path: Path) -> None:
    printed = run(tmp_path, program(page))

    assert printed == ""


def test_the_two_kinds_of_parallelism_print_what_the_page_says(tmp_path: Path) -> None:
    page = "docs/howto/combine-with-tensor-parallelism.md"

    printed = run(tmp_path, program(page))

    assert printed in (ROOT / page).read_text(encoding="utf-8")


def test_mismatches_are_told_as_the_page_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = "docs/howto/find-a-mismatch.md"
    text = (ROOT / page).read_text(encoding="utf-8")

    for number, debug in enumerate(("0", "1", "0", "0")):
        monkeypatch.setenv("TRINE_DEBUG", debug)
        printed = run(tmp_path, program(page, number))

        assert f"```text\n{printed}```" in text


def test_the_script_for_every_launcher_runs_under_torchrun(tmp_path: Path) -> None:
    printed = run(tmp_path, program("docs/howto/run-on-an-mpi-cluster.md"), *TORCHRUN)

    assert printed == "2 ranks over gloo, on cpu\n"


def test_the_memory_of_the_page_belongs_to_the_block_that_keeps_too_much(tmp_path: Path) -> None:
    page = "docs/howto/find-whose-memory.md"

    run(tmp_path, program(page))

    shown = CliRunner().invoke(trine, ["trace", "memory", str(tmp_path / "run")])
    said = re.findall(r"the largest part is [^(]*", shown.output)
    assert said == re.findall(r"the largest part is [^(]*", (ROOT / page).read_text("utf-8"))
    assert "the activations of 2, " in said[0]


def test_the_plans_of_the_page_are_what_the_command_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = "docs/howto/plan-a-run.md"
    (tmp_path / "models.py").write_text(program(page), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    shown = re.findall(
        r"```console\n\$ trine (.*?)\n(.*?)```", (ROOT / page).read_text("utf-8"), re.DOTALL
    )

    assert len(shown) == 2
    for command, printed in shown:
        said = CliRunner().invoke(trine, command.split()).output
        # Sizes may move a little when the engine learns to do with less.
        assert re.sub(NUMBER, "#", said).split() == re.sub(NUMBER, "#", printed).split()
        assert sizes(said) == pytest.approx(sizes(printed), rel=0.1)


NUMBER = r"\d+(?:\.\d+)?"


def sizes(text: str) -> list[float]:
    """The sizes in a text, in bytes."""
    powers = {"": 0, "Ki": 10, "Mi": 20, "Gi": 30}
    found = re.findall(rf"({NUMBER}) (|Ki|Mi|Gi)B\b", text)
    return [float(number) * 2.0 ** powers[unit] for number, unit in found]


def verdict(folder: Path, *command: str) -> dict[str, Any]:
    """What a command of `trine trace` says as JSON."""
    ended = subprocess.run(
        [sys.executable, "-m", "trine.tools", "trace", *command, "--json"],
        cwd=folder,
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr
    found: dict[str, Any] = json.loads(ended.stdout)
    return found


@pytest.mark.timeout(300)  # a job of two ranks, then three commands
def test_the_three_faults_of_the_tutorial_are_found_and_named(tmp_path: Path) -> None:
    run(tmp_path, program("docs/tutorials/find-the-wait.md"), *TORCHRUN)

    late = verdict(tmp_path, "stragglers", "find-the-wait")
    summary = verdict(tmp_path, "summary", "find-the-wait")
    memory = verdict(tmp_path, "memory", "find-the-wait")

    found = [(each["rank"], each["phase"]) for each in late["ranks"] if each["stands_out"]]
    assert found == [(1, "load batch")]
    exposed_ns = {unit["unit"]: unit["exposed_ns"] for unit in summary["units"]}
    assert max(exposed_ns, key=lambda unit: exposed_ns[unit]) == "head"
    largest = memory["largest"][0]
    assert (largest["kind"], largest["unit"]) == ("activations", "attention")


def record(folder: Path, page: str, *options: str) -> str:
    """Record a page's program as the page does, and return what is said at the end."""
    (folder / "train.py").write_text(program(page), encoding="utf-8")
    command = ["-m", "trine.tools", "trace", "run", *options, "--", sys.executable, *TORCHRUN]
    ended = subprocess.run(
        [sys.executable, *command, "train.py"],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    return ended.stderr.splitlines()[-1]


def test_a_program_that_knows_nothing_of_us_is_recorded_as_the_page_says(tmp_path: Path) -> None:
    page = "docs/howto/record-a-run.md"

    said = record(tmp_path, page, "--steps", "10-29")

    assert f"{said}\n" in (ROOT / page).read_text(encoding="utf-8")
    shown = CliRunner().invoke(trine, ["trace", "summary", str(tmp_path / "trine-trace")])
    assert shown.output.startswith("2 ranks, 20 steps\n")


def test_the_rank_with_fewer_batches_is_named_as_the_page_says(tmp_path: Path) -> None:
    page = "docs/howto/when-a-job-hangs.md"

    said = record(tmp_path, page, "--out", "run")

    assert f"{said}\n" in (ROOT / page).read_text(encoding="utf-8")
    shown = CliRunner().invoke(trine, ["trace", "hang", str(tmp_path / "run")])
    (named,) = re.findall(r"^Rank 1 did not come .*$", shown.output, re.MULTILINE)
    assert f"{named}\n" in (ROOT / page).read_text(encoding="utf-8")

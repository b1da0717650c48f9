"""The command `trine`: what it prints, how it fails, and what other packages add to it."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner, Result

from tests.tools.events import comm, event, step, write_rank_file
from trine.core import TrineError
from trine.tools import __version__
from trine.tools.cli import app, main


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    """The folder of a run of two ranks."""
    for rank in range(2):
        write_rank_file(
            tmp_path / "run",
            comm("all_gather", "blocks.0", 10, 20, nbytes=2048),
            event("wait all_gather", 15, 20, category="comm", unit="blocks.0"),
            step(0, 100),
            rank=rank,
            world_size=2,
        )
    return tmp_path / "run"


def trine(*args: str | Path) -> Result:
    return CliRunner().invoke(main, [str(arg) for arg in args], prog_name="trine")


def install(monkeypatch: pytest.MonkeyPatch, **targets: object) -> None:
    """Make the metadata list these commands and no others; an exception cannot be loaded."""

    def load(target: object) -> object:
        if isinstance(target, Exception):
            raise target
        return target

    entries = [
        SimpleNamespace(name=name, value=f"other.{name}:main", load=lambda t=target: load(t))
        for name, target in targets.items()
    ]

    def entry_points(*, group: str) -> list[SimpleNamespace]:
        assert group == "trine.commands"
        return entries

    monkeypatch.setattr(app, "entry_points", entry_points)


def test_the_version_is_that_of_the_distribution() -> None:
    result = trine("--version")

    assert result.output == f"trine (trine-tools) {__version__}\n"


def test_the_module_runs_as_the_command_does() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "trine.tools", "--version"], capture_output=True, text=True
    )

    assert done.stdout == f"trine (trine-tools) {__version__}\n"
    assert done.returncode == 0


def test_looking_at_the_version_does_not_wait_for_torch() -> None:
    program = "import sys, trine.tools.cli; print('torch' in sys.modules)"

    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)

    assert done.stdout == "False\n"


def test_summary_prints_a_table(run_folder: Path) -> None:
    result = trine("trace", "summary", run_folder)

    assert result.exit_code == 0
    assert result.output.startswith("2 ranks, 1 step\n")
    assert "blocks.0" in result.output


def test_summary_as_json_has_nanoseconds_and_bytes(run_folder: Path) -> None:
    result = trine("trace", "summary", run_folder, "--json")

    data = json.loads(result.output)
    assert (data["format"], data["version"]) == ("trine-summary", 2)
    assert data["ranks"] == [0, 1]
    assert data["steps"]["mean_ns"] == 100_000
    assert data["sent_nbytes"] == [2048, 2048]
    assert data["units"] == [
        {
            "unit": "blocks.0",
            "collectives": {
                "all_gather": {
                    "count": 1.0,
                    "time_ns": 10_000.0,
                    "nbytes": 2048.0,
                    "exposed_ns": 5_000.0,
                    "wait_ns": 0.0,
                    "hidden_ns": 5_000.0,
                }
            },
            "exposed_ns": 5_000.0,
            "exposed_ns_max": 5_000.0,
            "exposed_share": 0.05,
            "wait_ns": 0.0,
            "hidden_ns": 5_000.0,
        }
    ]


def test_merge_writes_the_timeline_and_nothing_else(run_folder: Path, tmp_path: Path) -> None:
    before = sorted(tmp_path.rglob("*"))
    out = tmp_path / "all.json"

    result = trine("trace", "merge", run_folder, "--out", out)

    assert result.exit_code == 0
    assert result.output == f"{out}: ranks 2, 6 events\n"
    assert sorted(tmp_path.rglob("*")) == sorted([*before, out])
    assert {e["pid"] for e in json.loads(out.read_text())["traceEvents"]} == {0, 1}


def test_export_to_chrome_is_what_merge_writes(run_folder: Path, tmp_path: Path) -> None:
    merged, exported = tmp_path / "merged.json", tmp_path / "exported.json"

    trine("trace", "merge", run_folder, "--out", merged)
    result = trine("trace", "export", run_folder, "--format", "chrome", "--out", exported)

    assert result.output == f"{exported}: ranks 2, 6 events\n"
    assert exported.read_bytes() == merged.read_bytes()


def test_export_to_perfetto_writes_protobuf(run_folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "timeline.pftrace"

    result = trine("trace", "export", run_folder, "--format", "perfetto", "--out", out)

    assert result.output == f"{out}: ranks 2, 6 events\n"
    assert b"rank 0" in out.read_bytes()


def test_export_wants_to_be_told_the_format(run_folder: Path, tmp_path: Path) -> None:
    result = trine("trace", "export", run_folder, "--out", tmp_path / "timeline")

    assert result.exit_code == 2
    assert "Missing option '--format'" in result.stderr


@pytest.mark.parametrize("command", [["summary"], ["merge", "--out", "timeline.json"]])
def test_a_path_that_does_not_exist_is_a_usage_error(tmp_path: Path, command: list[str]) -> None:
    result = trine("trace", *command, tmp_path / "missing")

    assert result.exit_code == 2
    assert "missing' does not exist. Expected the folder of a run" in result.stderr
    assert result.stdout == ""


def test_a_baseline_that_does_not_exist_is_called_one(run_folder: Path) -> None:
    result = trine("trace", "check", run_folder, "--baseline", "missing.json")

    assert result.exit_code == 2
    assert (
        "--baseline: 'missing.json' does not exist. Expected what `trine trace summary --json` "
        "wrote, or a run's folder." in result.stderr
    )


@pytest.mark.parametrize(("given", "fault"), [("run", "is a recording"), ("no", "does not exist")])
def test_what_is_no_trace_of_the_profiler_is_not_merged(
    run_folder: Path, given: str, fault: str
) -> None:
    profiler = run_folder if given == "run" else run_folder / given
    out = run_folder.parent / "merged.json"

    result = trine("trace", "merge", run_folder, "--profiler", profiler, "--out", out)

    assert result.exit_code == 2
    assert f"{fault}. Expected a trace of torch.profiler, or a folder" in result.stderr
    assert not out.exists()


def test_torch_without_numpy_is_nothing_to_warn_of() -> None:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        trine("trace", "sinks")
        warnings.warn("Failed to initialize NumPy: No module named 'numpy'", stacklevel=1)
        warnings.warn("another", stacklevel=1)

    assert [str(each.message) for each in seen] == ["another"]


@pytest.mark.parametrize("command", [["summary"], ["check", "--baseline", "."], ["hang"]])
def test_a_path_longer_than_any_can_be_is_a_usage_error(command: list[str]) -> None:
    result = trine("trace", *command, "a" * 5_000)

    assert result.exit_code == 2
    assert "does not exist. Expected the folder of a run" in result.stderr


@pytest.mark.parametrize("command", [["report"], ["merge"], ["export", "--format", "perfetto"]])
def test_a_name_longer_than_any_can_be_cannot_be_written(
    run_folder: Path, tmp_path: Path, command: list[str]
) -> None:
    result = trine("trace", *command, run_folder, "--out", tmp_path / ("a" * 300))

    assert result.exit_code == 1
    assert "cannot be written to" in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("command", ["report", "merge"])
def test_the_name_of_what_was_written_cannot_steer_the_terminal(
    run_folder: Path, tmp_path: Path, command: str
) -> None:
    result = trine("trace", command, run_folder, "--out", tmp_path / "a\u202eb")

    assert result.exit_code == 0
    assert r"a\u202eb: " in result.output


@pytest.mark.parametrize("command", ["hang", "check"])
def test_a_command_that_answers_by_its_status_has_another_where_nothing_can_be_read(
    run_folder: Path, tmp_path: Path, command: str
) -> None:
    (tmp_path / "empty").mkdir()
    more: list[str | Path] = ["--baseline", run_folder] if command == "check" else []

    result = trine("trace", command, tmp_path / "empty", *more)

    assert result.exit_code == 2
    assert "holds no traces" in result.stderr


@pytest.mark.parametrize("command", ["summary", "merge"])
def test_a_damaged_trace_is_one_line_and_status_1(
    run_folder: Path, tmp_path: Path, command: str
) -> None:
    damaged = run_folder / "trace-rank00001.trine"
    damaged.write_bytes(damaged.read_bytes().replace(b'"record":"end"', b'"record": end'))
    more: list[str | Path] = ["--out", tmp_path / "out.json"] if command == "merge" else []

    result = trine("trace", command, run_folder, *more)

    assert result.exit_code == 1
    assert result.stderr.startswith(f"Error: {damaged} cannot be read, record ")
    assert ": it is not JSON" in result.stderr
    assert result.stderr.count("\n") == 1
    assert not (tmp_path / "out.json").exists()


def test_merge_into_a_missing_folder_is_a_usage_error(run_folder: Path, tmp_path: Path) -> None:
    result = trine("trace", "merge", run_folder, "--out", tmp_path / "missing" / "out.json")

    assert result.exit_code == 2
    assert "its folder does not exist. Make it first." in result.stderr
    assert not (tmp_path / "missing").exists()


@pytest.mark.parametrize(
    "command", [["summary", ""], ["merge", "", "--out", "t.json"], ["merge", ".", "--out", ""]]
)
def test_an_empty_path_is_not_the_current_folder(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    monkeypatch.chdir(run_folder)

    result = trine("trace", *command)

    assert result.exit_code == 2
    assert "a path is expected, and it is empty" in result.output


def test_an_unknown_command_is_a_usage_error() -> None:
    result = trine("dance")

    assert result.exit_code == 2
    assert "No such command 'dance'" in result.stderr


def test_a_command_of_another_package_gets_its_arguments_untouched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    received: list[Sequence[str] | None] = []

    def demo(argv: Sequence[str] | None = None) -> int:
        """Train something small.

        More than a line.
        """
        received.append(argv)
        return 7

    install(monkeypatch, demo=demo)

    result = trine("demo", "--help", "-x", "--ranks", "2", "--", "text")

    assert received == [["--help", "-x", "--ranks", "2", "--", "text"]]
    assert result.exit_code == 7
    assert "demo   Train something small.\n" in trine("--help").output


def test_a_command_of_another_package_may_exit_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    def demo(argv: Sequence[str] | None = None) -> int:
        raise SystemExit(130)

    install(monkeypatch, demo=demo)

    assert trine("demo").exit_code == 130


def test_an_expected_error_of_another_package_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def demo(argv: Sequence[str] | None = None) -> int:
        raise TrineError("rank 1 failed")

    install(monkeypatch, demo=demo)

    result = trine("demo")

    assert result.exit_code == 1
    assert result.stderr == "Error: rank 1 failed\n"


@pytest.mark.parametrize("broken", [ImportError("no\nmodule"), "text, not a function"])
def test_a_broken_package_costs_one_line_and_no_other_command(
    monkeypatch: pytest.MonkeyPatch, broken: object
) -> None:
    install(monkeypatch, broken=broken)

    called = trine("broken", "--some", "argument")
    helped = trine("--help")

    assert called.exit_code == 1
    assert called.stderr.startswith("Error: The command 'broken' (other.broken:main) cannot be")
    assert called.stderr.count("\n") == 1
    assert helped.exit_code == 0
    assert "(cannot be loaded: " in helped.output
    assert "trace " in helped.output


def test_a_command_of_another_package_cannot_replace_ours(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install(monkeypatch, trace=lambda argv: 99)

    assert trine("trace", "--help").exit_code == 0

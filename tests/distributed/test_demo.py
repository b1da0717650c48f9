"""The demo as its user meets it: what it prints, writes and refuses."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import pty
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict_loader import load

from tests.distributed.programs import living_processes, running
from trine.core import Precision, TrineError
from trine.distributed.demo import cli, main
from trine.distributed.demo.model import GPT, GPTConfig
from trine.distributed.demo.progress import Progress
from trine.distributed.demo.settings import Outcome, Settings
from trine.distributed.demo.text import Text
from trine.distributed.demo.train import train
from trine.distributed.process_groups import destroy_process_group

DEMO = [sys.executable, "-m", "trine.distributed.demo"]
SMALL = partial(
    Settings, sample=4, batch=2, model=GPTConfig(width=16, depth=1, heads=2, context=16)
)
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
BESIDE = Path(sys.executable).with_name("mpiexec")
MPIEXEC = [str(BESIDE) if BESIDE.exists() else "mpiexec", "-n", "2", sys.executable]
OVER_MPI = pytest.mark.skipif(
    os.environ.get("TRINE_TEST_BACKEND") != "mpi", reason="needs mpi4py and an MPI library"
)


@pytest.fixture(autouse=True)
def unlaunched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model and a sample that take no time, for tests that look at neither."""
    monkeypatch.setattr(cli, "Settings", SMALL)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    file = tmp_path / "text.txt"
    file.write_bytes(Path(__file__).read_bytes())
    return file


@dataclass(frozen=True)
class Run:
    folder: Path
    status: int
    report: str


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, backend: str) -> Run:
    """A run of two steps on two ranks, for the tests that look at what it left."""
    folder = tmp_path_factory.mktemp("demo")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), pytest.MonkeyPatch.context() as patch:
        patch.setattr(cli, "Settings", partial(Settings, sample=16))
        options = ["--text", __file__, "--steps", "2", "--check", "--out", str(folder / "out")]
        status = main([*options, "--backend", backend])
    return Run(folder / "out", status, printed.getvalue())


def test_a_run_ends_with_its_loss_its_cost_and_where_its_files_are(finished: Run) -> None:
    shown = dict(re.findall(r"^([a-z]+(?: [a-z]+)?)  +(.+)$", finished.report, re.MULTILINE))

    assert finished.status == 0
    assert re.match(r"5\.\d+ -> \d\.\d+ nats per byte", shown["loss"])
    assert shown["check"].startswith("all 2 losses equal those of the unsharded model to 0.001")
    assert re.match(r"[\d,]+ tokens/s", shown["speed"])
    assert re.match(r"rank 0: [\d,.]+ MiB, rank 1: [\d,.]+ MiB", shown["peak memory"])
    assert re.match(r"rank 0: [\d,.]+ MiB, rank 1: [\d,.]+ MiB", shown["bytes sent"])
    assert "timeline" in shown
    assert shown["checkpoint"] == str(finished.folder / "checkpoint")
    assert "What it makes of 'def ' after 2 steps:" in finished.report


def test_the_bytes_counted_are_those_that_sharding_has_to_move(finished: Run) -> None:
    sent = json.loads((finished.folder / "demo.json").read_text())["sent_nbytes"]

    model = GPT(GPTConfig())
    in_blocks = 4 * sum(p.numel() for p in model.blocks.parameters())
    in_all = 4 * sum(p.numel() for p in model.parameters())
    # Of two ranks each sends half: of blocks for forward, backward and gradients, of the
    # root, which stays gathered in between, for forward and gradients. Two steps.
    least = 2 * (3 * in_blocks + 2 * (in_all - in_blocks)) // 2
    assert sent == [pytest.approx(least, rel=1e-4)] * 2  # shards start at aligned addresses


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_the_checkpoint_holds_the_whole_trained_model(finished: Run) -> None:
    torch.manual_seed(0)
    model = GPT(GPTConfig())
    untrained = {name: value.clone() for name, value in model.state_dict().items()}
    moments = {name: {"exp_avg": torch.zeros_like(v)} for name, v in model.named_parameters()}
    state: dict[str, Any] = {"model": model.state_dict(), "optimizer": moments, "step": 0}

    load(state, checkpoint_id=finished.folder / "checkpoint", no_dist=True)

    assert state["step"] == 2
    for name, value in untrained.items():
        assert not torch.equal(state["model"][name], value), name
        assert state["optimizer"][name]["exp_avg"].abs().sum() > 0, name
    assert not (finished.folder / "checkpoint.unfinished").exists()


@pytest.mark.usefixtures("small")
def test_a_second_run_replaces_what_the_first_one_wrote(tmp_path: Path, text: Path) -> None:
    out = tmp_path / "out"

    for ranks, shards in (("2", 2), ("1", 1)):
        options = ["--text", str(text), "--steps", "1", "--out", str(out), "--ranks", ranks]
        assert main(options) == 0

        assert len(list((out / "checkpoint").glob("*.distcp"))) == shards


def losses(folder: Path) -> list[float]:
    found: list[float] = json.loads((folder / "demo.json").read_text())["losses"]
    return found


@pytest.mark.parametrize("launcher", [TORCHRUN, pytest.param(MPIEXEC, marks=OVER_MPI)])
def test_under_a_launcher_the_demo_joins_the_ranks_that_are_there(
    tmp_path: Path, text: Path, small: None, launcher: list[str]
) -> None:
    options = ["--text", str(text), "--steps", "3"]
    (tmp_path / "short_demo.py").write_text(
        "import functools, sys; from trine.distributed.demo import cli, model\n"
        "small = model.GPTConfig(width=16, depth=1, heads=2, context=16)\n"
        "cli.Settings = functools.partial(cli.Settings, sample=4, batch=2, model=small)\n"
        "sys.exit(cli.main())\n"
    )

    done = subprocess.run(
        [*launcher, "short_demo.py", *options, "--check", "--out", "out"],
        capture_output=True,
        text=True,
        timeout=110,
        cwd=tmp_path,
        env=os.environ
        | {"OMP_NUM_THREADS": "1", "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe"},
    )

    assert done.returncode == 0, done.stderr
    title = f"across 2 ranks ({'gloo' if launcher is TORCHRUN else 'mpi'}, fp32)"
    assert done.stdout.count(title) == 1  # rank 0 only
    assert "all 3 losses equal" in done.stdout
    assert main([*options, "--backend", "gloo", "--out", str(tmp_path / "gloo")]) == 0
    assert losses(tmp_path / "out") == losses(tmp_path / "gloo")  # to the last bit


@OVER_MPI
def test_losses_over_mpi_are_those_over_gloo(tmp_path: Path, text: Path, small: None) -> None:
    for backend in ("gloo", "mpi"):
        options = ["--text", str(text), "--steps", "5", "--backend", backend]
        assert main([*options, "--out", str(tmp_path / backend)]) == 0

    assert losses(tmp_path / "mpi") == losses(tmp_path / "gloo")


@contextlib.contextmanager
def training(folder: Path, text: Path) -> Iterator[subprocess.Popen[str]]:
    """A demo that trains for longer than any test lasts, after its first line."""
    command = [*DEMO, "--text", str(text), "--steps", "100000", "--out", "out"]
    with running(command, folder, env={"OMP_NUM_THREADS": "1"}) as demo:
        assert demo.stdout is not None
        assert demo.stdout.readline().startswith("Training a GPT")
        yield demo


def test_ctrl_c_ends_the_demo_and_all_of_its_processes(tmp_path: Path, text: Path) -> None:
    with training(tmp_path, text) as demo:
        assert demo.stdout is not None
        while not demo.stdout.readline().startswith("step     1"):
            assert demo.poll() is None

        os.killpg(demo.pid, signal.SIGINT)
        demo.wait(timeout=5)
        _, errors = demo.communicate(timeout=5)  # ends when nobody holds its output any more

        assert demo.returncode == 130
        assert errors.strip() == "Stopped."
        assert living_processes(demo.pid) == []


def test_a_reader_that_has_seen_enough_ends_the_demo_quietly(tmp_path: Path, text: Path) -> None:
    with training(tmp_path, text) as demo:
        assert demo.stdout is not None
        assert demo.stderr is not None

        demo.stdout.close()  # as `| head -1` does
        errors = demo.stderr.read()  # ends when nobody holds it any more

        assert demo.wait(timeout=5) == 128 + signal.SIGPIPE
        assert errors == ""
        assert living_processes(demo.pid) == []


def test_a_full_disk_behind_standard_output_is_told_in_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with Path("/dev/full").open("w") as full:
        monkeypatch.setattr(sys, "stdout", full)

        status = main(["--text", __file__, "--out", str(tmp_path / "out")])

    assert status == 1
    assert capsys.readouterr().err == (
        "error: Standard output cannot be written: No space left on device.\n"
    )


def test_a_disk_without_room_for_the_checkpoint_is_noticed_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    needed = 3 * 4 * sum(p.numel() for p in GPT(GPTConfig()).parameters())
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(total=2**30, free=2**20))

    status = main(["--text", __file__, "--out", str(tmp_path / "out")])

    printed = capsys.readouterr()
    assert status == 2
    assert f"has room for 1 MiB, but the checkpoint takes {needed / 2**20:.0f} MiB" in printed.err
    assert printed.err.count("\n") == 1
    assert printed.out == ""


@pytest.mark.usefixtures("small")
def test_a_checkpoint_that_cannot_be_written_is_told_in_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--text", __file__, "--steps", "1", "--out", str(tmp_path)]
    (tmp_path / "demo.json").touch()  # the folder is the demo's own
    (tmp_path / "checkpoint").touch()  # and a file is where its checkpoint should go

    status = main(options)

    errors = capsys.readouterr().err
    assert status == 1
    assert errors.startswith(
        f"error: Rank 0 stopped. The checkpoint cannot be written to {tmp_path}"
    )
    assert ": Not a directory. It takes 0.1 MiB, and " in errors
    assert errors.count("\n") == 1
    assert not (tmp_path / "checkpoint.unfinished").exists()


def test_a_checkpoint_that_finds_no_room_leaves_none_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = SMALL(None, 1, "gloo", Precision.FP32, tmp_path, False, 0)
    monkeypatch.setattr(
        "trine.distributed.demo.train.read_text", lambda *_, **__: Text("x", torch.ones(99).byte())
    )
    monkeypatch.setattr("trine.distributed.demo.train.find_recorder", lambda: None)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**12, before[1]))

        with pytest.raises(TrineError, match=r"The checkpoint cannot be written to .* It takes"):
            train(settings)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        destroy_process_group()

    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--text", "missing.txt"], "There is no missing.txt."),
        (["--text", ""], "argument --text: a path is expected, and it is empty"),
        (["--text", "empty.txt"], "empty.txt is empty"),
        (["--text", "pipe"], "pipe is neither a file nor a folder."),
        (["--text", os.devnull], f"{os.devnull} is neither a file nor a folder."),
        (["--ranks", "100000"], "100000 ranks were asked for, but this machine"),
        (["--ranks", "two"], "argument --ranks: invalid int value: 'two'"),
        (["--backend", "glue"], "Unknown backend 'glue'. Backends that work here: "),
        (["--backend", "fake"], "The backend 'fake' moves no data between ranks"),
        (["--precision", "fp7"], "Unknown precision 'fp7'. Choose one of: fp32, amp_bf16, bf16."),
        (["--precision", "fp16"], "The demo does not scale losses, which fp16 needs"),
        (["--out", ""], "argument --out: a path is expected, and it is empty"),
        (["--out", f"{os.devnull}/out"], f"--out {os.devnull}/out cannot be written"),
        (["--steps", "0"], "--steps 0: expected at least 1."),
        (["--seed", "-1"], "--seed -1: expected a number from 0"),
    ],
)
def test_a_mistake_is_answered_with_one_sentence_and_status_2(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    told: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.txt").touch()
    os.mkfifo(tmp_path / "pipe")

    status = main(options)

    printed = capsys.readouterr()
    assert status == 2
    assert printed.err.startswith(f"error: {told}")
    assert printed.err.count("\n") == 1
    assert printed.out == ""


def test_files_that_are_not_the_demos_are_left_alone(
    tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status = main(["--text", str(text), "--out", str(tmp_path)])  # text.txt lies there

    assert status == 2
    assert "holds files that are not from an earlier run" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [text]


def test_half_a_launcher_is_a_mistake(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "0")

    assert main([]) == 2
    assert "sets RANK but not WORLD_SIZE" in capsys.readouterr().err


def test_a_port_that_is_taken_is_answered_in_one_sentence(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("", 0)) as other:
        port = other.getsockname()[1]
        launcher = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
        for name, value in (launcher | {"MASTER_PORT": str(port)}).items():
            monkeypatch.setenv(name, value)

        status = main(["--text", str(text), "--out", str(tmp_path / "out")])

    printed = capsys.readouterr().err
    assert status == 1
    assert printed.startswith(f"error: Port {port} (MASTER_PORT) is taken")
    assert printed.count("\n") == 1


OUTCOME = Outcome(
    losses=[5.5, 4.0],
    reference_losses=[5.5, 4.0],
    parameters=10,
    train_s=1.0,
    tokens=100,
    sent_nbytes=2**20,
    peak_nbytes=2**28,
    sample=b"def \xff\n",
)


def test_losses_that_differ_from_the_unsharded_ones_give_status_1(
    tmp_path: Path,
    text: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    wrong = replace(OUTCOME, reference_losses=[5.5, 4.5])
    monkeypatch.setattr(cli, "find_recorder", lambda: None)
    options = ["--text", str(text), "--out", str(tmp_path / "out"), "--steps", "2", "--check"]

    for outcome, expected in ((OUTCOME, 0), (wrong, 1)):
        monkeypatch.setattr(cli, "run_on_ranks", lambda *_, outcome=outcome, **__: [outcome] * 2)
        assert main(options) == expected

    assert "CHECK FAILED" in capsys.readouterr().out


def test_without_a_recorder_the_report_says_what_to_install(
    tmp_path: Path,
    text: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(cli, "find_recorder", lambda: None)
    monkeypatch.setattr(cli, "run_on_ranks", lambda *_, **__: [OUTCOME])

    main(["--text", str(text), "--out", str(tmp_path / "out"), "--steps", "2"])

    out = capsys.readouterr().out
    assert "install trine-tools" in out
    assert "    def \N{REPLACEMENT CHARACTER}\n" in out
    assert re.search(r"^speed +100 tokens/s", out, re.MULTILINE)


def test_progress_is_some_plain_lines_where_there_is_no_terminal() -> None:
    stream = io.StringIO()
    progress = Progress(100, stream)

    for step in range(1, 101):
        progress.show(step, 2.0, 1000.0)
    progress.close()

    lines = stream.getvalue().splitlines()
    assert lines[0] == "step     1 of 100   loss 2.000   1,000 tokens/s"
    assert lines[-1].startswith("step   100 of 100")
    assert len(lines) == 21


class FullDisk(io.StringIO):
    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_progress_that_cannot_be_written_is_an_error_that_says_so() -> None:
    progress = Progress(1, FullDisk())

    with pytest.raises(TrineError, match="standard output: No space left on device"):
        progress.show(1, 2.0, 1000.0)


def test_progress_is_one_line_on_a_terminal() -> None:
    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "w") as stream:
        progress = Progress(2, stream)
        progress.show(1, 2.0, 1000.0)
        progress.show(2, 1.5, 1000.0)
        progress.close()
        received = b""
        while b"\n" not in received:  # what was written arrives in as many pieces as it likes
            received += os.read(ours, 2**16)
    os.close(ours)
    shown = received.decode()

    assert shown.count("\n") == 1
    assert shown.count("\r\x1b") == 0
    assert "1/2   loss 2.000" in shown
    assert "2/2   loss 1.500" in shown
    assert "░" not in shown.split("\r")[2]  # full at the end


def test_a_terminal_without_unicode_is_written_to_all_the_same(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli, "run_on_ranks", lambda *_, **__: [OUTCOME])
    monkeypatch.setattr(cli, "find_recorder", lambda: None)
    written = io.BytesIO()
    terminal = io.TextIOWrapper(written, encoding="ascii")
    terminal.isatty = lambda: True  # type: ignore[method-assign]  # for the progress bar

    with contextlib.redirect_stdout(terminal):
        Progress(1, terminal).show(1, 2.0, 1000.0)
        main(["--text", str(text), "--out", str(tmp_path / "out"), "--steps", "2"])
    terminal.flush()

    assert "####" in written.getvalue().decode("ascii")
    assert "    def ?\n" in written.getvalue().decode("ascii")

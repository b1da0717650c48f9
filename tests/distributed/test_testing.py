"""run_on_ranks: results when all goes well, the cause first when it does not, nobody left."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from tests.distributed.programs import living_processes, running
from trine.core import TrineError
from trine.distributed.testing import RanksFailed, most_ranks

RunOnRanks = Callable[..., list[Any]]


@dataclass(frozen=True)
class Pair:
    """A class of a test module, which ranks cannot import by name."""

    left: int
    right: torch.Tensor


def rank_and_sum(number: float) -> tuple[int, float]:
    total = torch.tensor(number * (dist.get_rank() + 1))
    dist.all_reduce(total)
    return dist.get_rank(), total.item()


def swap(pair: Pair) -> Pair:
    return Pair(int(pair.right.item()), torch.tensor(pair.left))


def environment(name: str) -> tuple[str | None, int]:
    return os.environ.get(name), torch.get_num_threads()


def fail_on_rank_1_while_others_wait() -> None:
    if dist.get_rank() == 1:
        raise ValueError("the cause")
    dist.barrier()


def end_on_rank_1(how: str) -> None:
    if dist.get_rank() == 1:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        elif how == "sys.exit":
            sys.exit(0)
        os._exit(int(how))
    dist.barrier()


def wait_for_ever_on_rank_1() -> None:
    if dist.get_rank() == 1:
        wait_where_the_report_must_point()


def wait_where_the_report_must_point() -> None:
    signal.pause()


def return_what_cannot_travel() -> object:
    return lambda: None


class Unreadable:
    """Pickles, but not back."""

    def __reduce__(self) -> tuple[object, ...]:
        return int, ("not a number",)


def return_on_rank_1_what_cannot_be_read() -> object:
    return Unreadable() if dist.get_rank() == 1 else None


def lose_what_stands_in_for_rank_1() -> None:
    if dist.get_rank() == 1:
        for descriptor in os.listdir("/proc/self/fd"):  # noqa: PTH208  # names, which close soon
            with suppress(OSError), socket.socket(fileno=os.dup(int(descriptor))) as connection:
                peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
                (pid, _, _) = struct.unpack("3i", peer)
                if "_stand_in" in Path(f"/proc/{pid}/cmdline").read_text():
                    os.kill(pid, signal.SIGKILL)
    signal.pause()


def print_to_a_full_disk() -> None:
    sys.stdout = Path("/dev/full").open("w")  # noqa: SIM115  # as long as the rank lives
    print("lost")


def fail_with(error: Exception) -> None:
    raise error


def shared_memory_with_a_name() -> list[str]:
    # Not of Open MPI, whose mpiexec removes what a rank left.
    mapped = re.findall(
        r" (/dev/shm/\S*mpich\S*)$", Path("/proc/self/maps").read_text(), re.MULTILINE
    )
    return [name for name in mapped if Path(name).exists()]


@dataclass(frozen=True)
class Times:
    connected_at: float
    begun_at: float


@dataclass
class ConnectsLate:
    """Makes one rank slow from the moment it is unpickled, which is before ranks connect."""

    rank: int
    connected_at: float = 0.0

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        connect = distributed_c10d._new_process_group_helper

        def connect_late(*args: Any, **kwargs: Any) -> Any:
            made = connect(*args, **kwargs)
            if os.environ["RANK"] == str(self.rank):
                time.sleep(0.5)
            self.connected_at = time.monotonic()
            return made

        distributed_c10d._new_process_group_helper = connect_late


def when_connected_and_when_begun(late: ConnectsLate) -> Times:
    return Times(late.connected_at, begun_at=time.monotonic())


def test_each_rank_returns_its_own_result_in_the_order_of_ranks(run_on_ranks: RunOnRanks) -> None:
    results = run_on_ranks(rank_and_sum, 3, 0.5)

    assert results == [(0, 3.0), (1, 3.0), (2, 3.0)]  # 0.5 + 1.0 + 1.5


def test_arguments_and_results_may_be_of_classes_of_the_test_module(
    run_on_ranks: RunOnRanks,
) -> None:
    (result,) = run_on_ranks(swap, 1, Pair(3, torch.tensor(4)))

    assert (result.left, int(result.right)) == (4, 3)


def test_a_body_is_found_in_its_file_if_its_module_cannot_be_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_on_ranks: RunOnRanks
) -> None:
    file = tmp_path / "body.py"
    file.write_text("class Answer(int): ...\n\ndef answer(to): return Answer(to)\n")
    spec = importlib.util.spec_from_file_location("nowhere.to_be.found", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    for name in ("nowhere", "nowhere.to_be"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "nowhere.to_be.found", module)
    spec.loader.exec_module(module)

    results = run_on_ranks(module.answer, 2, module.Answer(42))

    assert results == [module.Answer(42)] * 2
    assert type(results[0]) is module.Answer


def test_ranks_see_the_environment_of_the_call_and_use_one_thread(
    monkeypatch: pytest.MonkeyPatch, run_on_ranks: RunOnRanks
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    for value in ("first", "second"):  # a fork server remembers the environment of its start
        monkeypatch.setenv("TRINE_TEST_VALUE", value)

        assert run_on_ranks(environment, 1, "TRINE_TEST_VALUE") == [(value, 1)]


def test_ranks_use_as_many_threads_as_they_are_told(
    monkeypatch: pytest.MonkeyPatch, run_on_ranks: RunOnRanks
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "2")

    assert run_on_ranks(environment, 1, "OMP_NUM_THREADS") == [("2", 2)]


def test_the_first_failure_is_read_before_those_that_follow_from_it(
    run_on_ranks: RunOnRanks,
) -> None:
    with pytest.raises(RanksFailed) as caught:
        run_on_ranks(fail_on_rank_1_while_others_wait, 3)

    message = str(caught.value)
    assert message.startswith("Rank 1 of 3 failed: ValueError: the cause\n\nTraceback")
    assert 'raise ValueError("the cause")' in caught.value.traceback
    assert caught.value.rank == 1
    assert sorted(caught.value.others) == [0, 2]


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("killed", "was killed by SIGKILL (out of memory, perhaps)."),
        ("0", "ended with exit code 0 before its body returned; see what it printed."),
        ("7", "ended with exit code 7 before its body returned; see what it printed."),
        ("sys.exit", "failed: SystemExit: 0"),
    ],
)
def test_a_rank_that_ends_without_a_result_is_named_first(
    how: str, told: str, run_on_ranks: RunOnRanks
) -> None:
    with pytest.raises(RanksFailed) as caught:
        run_on_ranks(end_on_rank_1, 2, how)

    assert str(caught.value).startswith(f"Rank 1 of 2 {told}")


@pytest.mark.skipif(
    os.environ.get("TRINE_TEST_BACKEND") != "mpi", reason="only mpiexec watches a stand-in"
)
def test_ranks_end_with_what_mpiexec_watches_in_their_place(run_on_ranks: RunOnRanks) -> None:
    with pytest.raises(RanksFailed) as caught:
        run_on_ranks(lose_what_stands_in_for_rank_1, 2)

    assert caught.value.reason == "was stopped by mpiexec, as when another rank has ended."


def test_a_result_that_cannot_travel_is_a_failure_of_that_rank(run_on_ranks: RunOnRanks) -> None:
    with pytest.raises(RanksFailed, match=r"Rank 0 of 1 failed: .*pickle"):
        run_on_ranks(return_what_cannot_travel, 1)


def test_a_result_that_does_not_arrive_whole_is_a_failure_of_that_rank(
    run_on_ranks: RunOnRanks,
) -> None:
    with pytest.raises(RanksFailed) as caught:
        run_on_ranks(return_on_rank_1_what_cannot_be_read, 3)

    assert str(caught.value).startswith(
        "Rank 1 of 3 returned what cannot be unpickled in the launching process: ValueError: "
    )
    assert caught.value.others == {0: "finished.", 2: "finished."}


def test_output_that_cannot_be_written_is_a_failure_of_that_rank(run_on_ranks: RunOnRanks) -> None:
    with pytest.raises(RanksFailed, match=r"Rank 0 of 1 failed: OSError: .*No space left"):
        run_on_ranks(print_to_a_full_disk, 1)


def test_an_error_of_ours_is_handed_on_without_its_traceback(run_on_ranks: RunOnRanks) -> None:
    with pytest.raises(RanksFailed) as ours:
        run_on_ranks(fail_with, 1, TrineError("what to do"))
    with pytest.raises(RanksFailed) as foreign:
        run_on_ranks(fail_with, 1, RuntimeError("what happened"))

    assert ours.value.explanation == "what to do"
    assert foreign.value.explanation == ""


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_rank_holds_no_shared_memory_that_would_outlive_it(
    world_size: int, run_on_ranks: RunOnRanks
) -> None:
    assert run_on_ranks(shared_memory_with_a_name, world_size) == [[]] * world_size


@pytest.mark.only_gloo("over MPI, ranks that leave wait for each other")
def test_no_body_begins_before_every_rank_is_connected(run_on_ranks: RunOnRanks) -> None:
    first, second = run_on_ranks(when_connected_and_when_begun, 2, ConnectsLate(rank=1))

    # Else the body of rank 0 may end, and rank 0 leave, before rank 1 has reached it.
    assert first.begun_at >= second.connected_at


def test_at_the_time_limit_every_unfinished_rank_says_where_it_stands(
    run_on_ranks: RunOnRanks,
) -> None:
    run_on_ranks(swap, 1, Pair(0, torch.tensor(0)))  # from here on, ranks start in no time

    with pytest.raises(RanksFailed) as caught:
        run_on_ranks(wait_for_ever_on_rank_1, 2, timeout_s=2.5)

    assert str(caught.value).startswith("Rank 1 of 2 had not finished after 2.5 s.")
    assert "wait_where_the_report_must_point" in caught.value.traceback
    assert caught.value.others == {0: "finished."}


def test_a_body_that_no_other_process_can_find_is_refused(run_on_ranks: RunOnRanks) -> None:
    def nested() -> None: ...

    for body in (nested, lambda: None, torch.nn.Linear(1, 1).forward):
        with pytest.raises(ValueError, match="top level of a module"):
            run_on_ranks(body, 1)
    with pytest.raises(TypeError, match="must be a function, got int"):
        run_on_ranks(3, 1)


@pytest.mark.parametrize("world_size", [0, -1, 10**6])
def test_a_number_of_ranks_that_this_machine_cannot_run_is_refused(
    world_size: int, run_on_ranks: RunOnRanks
) -> None:
    with pytest.raises(
        ValueError, match=rf"{world_size} ranks were asked for.* 1 to \d+ with (gloo|mpi)"
    ):
        run_on_ranks(rank_and_sum, world_size, 1.0)

    assert most_ranks() >= 1


PROGRAM = """
    import os, signal, sys, time
    from trine.distributed import _launch
    from trine.distributed.testing import run_on_ranks

    _launch._PRELOAD[1:] = []  # torch's compiler takes seconds to import, and is not needed

    def body():
        sys.stdout.write(f"{os.getpid()} ")
        sys.stdout.flush()
        while True:
            signal.pause()

    if __name__ == "__main__":
        backend = os.environ.get("TRINE_TEST_BACKEND", "gloo")
        run_on_ranks(body, 3, timeout_s=None, backend=backend)
"""

PROGRAM_THAT_STARTS_SLOWLY = """
    import os
    from trine.distributed import _launch
    from trine.distributed.testing import most_ranks, run_on_ranks

    if __name__ == "__main__":
        _launch._PRELOAD[:] = ["slow"]  # what the fork server imports
        backend = os.environ.get("TRINE_TEST_BACKEND", "gloo")
        run_on_ranks(most_ranks, 2, backend=backend)
"""


@contextmanager
def started(
    program: str, folder: Path, *, ignore_interrupts: bool = False
) -> Iterator[subprocess.Popen[str]]:
    """Run a script whose temporary files go into its folder."""
    (folder / "program.py").write_text(textwrap.dedent(program))
    command = [sys.executable, "program.py"]
    env = {"TMPDIR": str(folder), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    with running(command, folder, env=env, ignore_interrupts=ignore_interrupts) as running_program:
        yield running_program


def ranks_of(program: subprocess.Popen[str], count: int) -> list[int]:
    """The process ids that the ranks print, each followed by a blank, as soon as all have."""
    assert program.stdout is not None
    text = ""
    while len(re.findall(r"\d+ ", text)) < count:
        char = program.stdout.read(1)
        assert char, f"ended early: {text!r}"
        text += char
    return [int(number) for number in text.split()]


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def gone_within(pids: list[int], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while any(map(alive, pids)):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


@pytest.mark.parametrize("to_whole_terminal", [True, False])
def test_ctrl_c_stops_every_rank_and_leaves_no_file(
    tmp_path: Path, to_whole_terminal: bool
) -> None:
    with started(PROGRAM, tmp_path) as program:
        pids = ranks_of(program, 3)

        if to_whole_terminal:
            os.killpg(program.pid, signal.SIGINT)
        else:
            program.send_signal(signal.SIGINT)
        _, errors = program.communicate(timeout=30)

        assert program.returncode == -signal.SIGINT
        assert errors.count("KeyboardInterrupt") == 1  # the launching process's own, no rank's
        assert gone_within(pids, 0.5)
    assert [path.name for path in tmp_path.iterdir()] == ["program.py"]


def test_ctrl_c_does_not_wait_for_ranks_that_are_being_started(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(
        "import time; print('importing', flush=True); time.sleep(60)\n"
    )
    with started(PROGRAM_THAT_STARTS_SLOWLY, tmp_path) as program:
        assert program.stdout is not None
        assert program.stdout.readline() == "importing\n"

        os.killpg(program.pid, signal.SIGINT)
        _, errors = program.communicate(timeout=30)  # until every holder of its output is gone

        assert program.returncode == -signal.SIGINT
        assert errors.count("Traceback") == 1
        assert living_processes(program.pid) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["program.py", "slow.py"]


def test_ranks_that_ignore_ctrl_c_end_when_the_launching_process_is_killed(tmp_path: Path) -> None:
    with started(PROGRAM, tmp_path, ignore_interrupts=True) as program:
        pids = ranks_of(program, 3)

        os.killpg(program.pid, signal.SIGINT)
        assert not gone_within([program.pid], 0.2)
        assert all(map(alive, pids))
        program.terminate()
        program.communicate(timeout=30)  # until every holder of its output is gone

        assert gone_within(pids, 5)


def test_a_long_name_of_the_temporary_folder_is_no_obstacle(tmp_path: Path) -> None:
    folder = tmp_path / ("long" * 30)  # beyond what the path of a socket may have
    folder.mkdir()

    finite = PROGRAM.replace("while True", "if False").replace("(body, 3,", "(body, 1,")
    with started(finite, folder) as program:
        output, errors = program.communicate(timeout=100)

    assert program.returncode == 0, errors
    assert len(output.split()) == 1


def test_a_script_without_a_main_guard_is_told_so(tmp_path: Path) -> None:
    unguarded = PROGRAM.replace('if __name__ == "__main__":', "if True:")

    with started(unguarded, tmp_path) as program:
        _, errors = program.communicate(timeout=60)

    assert 'Put the launch under `if __name__ == "__main__":`' in errors

"""The probes, called in this process: what they say. How they end is in the tests of children."""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import threading
from collections.abc import Callable
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from trine.core.doctor import probes


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Callable[[], list[dict[str, object]]]:
    """What the probe printed, one object a line."""
    return lambda: [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def module(name: str, **names: object) -> ModuleType:
    made = ModuleType(name)
    made.__dict__.update(names)
    return made


def test_one_rank_alone_adds_up_and_leaves_no_group(
    said: Callable[[], list[dict[str, object]]],
) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]  # torch's stubs miss it

    probes.all_reduce("gloo", "0", "1", str(store.port), "30")

    (facts,) = said()
    assert isinstance(facts["seconds"], float)
    assert not dist.is_initialized()


def test_a_sum_that_is_wrong_raises_with_both_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TCPStore", "init_process_group", "all_reduce"):
        monkeypatch.setattr(dist, name, lambda *args, **kwargs: None)

    with pytest.raises(ValueError, match="the sum was 2, expected 3"):
        probes.all_reduce("gloo", "1", "2", "29500", "30")


def test_a_rank_of_nccl_computes_on_the_gpu_of_its_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made_on: list[torch.device] = []

    def full(shape: tuple[int], value: float, device: torch.device) -> None:
        made_on.append(device)
        raise RuntimeError("no further")

    monkeypatch.setattr(dist, "TCPStore", lambda *args, **kwargs: None)
    monkeypatch.setattr(dist, "init_process_group", lambda *args, **kwargs: None)
    monkeypatch.setattr(torch.cuda, "set_device", made_on.append)
    monkeypatch.setattr(torch, "full", full)

    with pytest.raises(RuntimeError, match="no further"):
        probes.all_reduce("nccl", "1", "2", "29500", "30")

    assert made_on == [torch.device("cuda", 1)] * 2


class Devices:
    """The part of torch that `accelerators` asks, with devices of a kind that runs on the CPU."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, count: int, tools: object) -> None:
        kind = SimpleNamespace(type="cpu")
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: kind)
        monkeypatch.setattr(torch.accelerator, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)
        monkeypatch.setattr(torch, "get_device_module", lambda name: tools)
        monkeypatch.setattr(torch, "device", lambda name, index: name)


def test_without_an_accelerator_nothing_is_said(
    monkeypatch: pytest.MonkeyPatch, said: Callable[[], list[dict[str, object]]]
) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: None)

    probes.accelerators()

    assert said() == []


def test_a_device_says_what_it_is_as_far_as_its_tools_know(
    monkeypatch: pytest.MonkeyPatch, said: Callable[[], list[dict[str, object]]]
) -> None:
    tools = SimpleNamespace(get_device_name=lambda i: f"GPU {i}", mem_get_info=lambda i: (5, 9))
    Devices(monkeypatch, 1, tools)
    probes.accelerators()
    Devices(monkeypatch, 1, SimpleNamespace())
    probes.accelerators()

    full, bare = said()
    assert full == {"name": "cpu", "model": "GPU 0", "free_bytes": 5, "memory_bytes": 9}
    assert bare == {"name": "cpu"}


def test_a_device_that_raises_or_computes_nonsense_says_so(
    monkeypatch: pytest.MonkeyPatch, said: Callable[[], list[dict[str, object]]]
) -> None:
    def out_of_memory(index: int) -> str:
        raise RuntimeError("out of memory\nframe #0")

    Devices(monkeypatch, 1, SimpleNamespace(get_device_name=out_of_memory))
    probes.accelerators()
    Devices(monkeypatch, 1, SimpleNamespace())
    monkeypatch.setattr(torch, "ones", torch.zeros)
    probes.accelerators()

    assert [facts["error"] for facts in said()] == [
        "out of memory",
        "a product of matrices came out wrong",
    ]


@pytest.mark.parametrize(
    ("tools", "reason"),
    [
        (SimpleNamespace(), "torch finds no cpu device"),
        (SimpleNamespace(init=lambda: None), "torch finds no cpu device"),
        (SimpleNamespace(init=lambda: 1 // 0), "integer division or modulo by zero"),
    ],
)
def test_a_kind_without_a_usable_device_gives_the_reason(
    monkeypatch: pytest.MonkeyPatch,
    said: Callable[[], list[dict[str, object]]],
    tools: object,
    reason: str,
) -> None:
    Devices(monkeypatch, 0, tools)

    probes.accelerators()

    assert said() == [{"kind": "cpu", "unavailable": reason}]


@pytest.mark.parametrize(("rank", "lines"), [(0, [{"ranks": 2, "total": 3}]), (1, [])])
def test_of_the_ranks_under_mpiexec_the_first_speaks(
    monkeypatch: pytest.MonkeyPatch,
    said: Callable[[], list[dict[str, object]]],
    rank: int,
    lines: list[dict[str, object]],
) -> None:
    world = SimpleNamespace(
        Get_rank=lambda: rank, Get_size=lambda: 2, allreduce=lambda value: 3 if value else 0
    )
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", module("mpi4py.MPI", COMM_WORLD=world))
    monkeypatch.setitem(sys.modules, "mpi4py", module("mpi4py"))

    probes.mpi_rank()

    assert said() == lines


def test_the_mpi_library_is_named_without_being_started(
    monkeypatch: pytest.MonkeyPatch, said: Callable[[], list[dict[str, object]]]
) -> None:
    settings = SimpleNamespace(initialize=True)
    library = module("mpi4py.MPI", get_vendor=lambda: ("Open MPI", (5, 0, 1)))
    monkeypatch.setitem(sys.modules, "mpi4py", module("mpi4py", rc=settings, __version__="4"))
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", library)

    probes.mpi_library()

    assert said() == [{"vendor": "Open MPI", "version": "5.0.1", "mpi4py": "4"}]
    assert settings.initialize is False


class Ended(Exception):
    """Stands for the end of the process."""


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Run `main` without its watchdogs; note what they were asked."""
    noted: list[object] = []

    def leave(status: int) -> None:
        noted.append(status)
        raise Ended

    monkeypatch.setattr(
        faulthandler, "dump_traceback_later", lambda seconds, exit: noted.append((seconds, exit))
    )
    monkeypatch.setattr(threading.Thread, "start", lambda self: noted.append(self.daemon))
    monkeypatch.setattr(os, "_exit", leave)
    return noted


def test_every_probe_is_bounded_in_time_and_ends_with_the_doctor(
    monkeypatch: pytest.MonkeyPatch, ends: list[object]
) -> None:
    given: list[tuple[str, ...]] = []
    monkeypatch.setitem(probes.PROBES, "all_reduce", lambda *args: given.append(args))
    monkeypatch.setitem(probes.PROBES, "mpi_rank", lambda *args: given.append(args))

    probes.main("all_reduce", "7", "gloo", "0")
    probes.main("mpi_rank", "8")

    assert given == [("gloo", "0"), ()]
    # Under mpiexec stdin is not the doctor's, so only the time bounds.
    assert ends == [(7.0, True), True, (8.0, True)]


def test_a_probe_that_raises_says_why_and_ends_at_once(
    monkeypatch: pytest.MonkeyPatch,
    ends: list[object],
    said: Callable[[], list[dict[str, object]]],
) -> None:
    def fail() -> None:
        raise OSError("no driver\nframe #0")

    monkeypatch.setitem(probes.PROBES, "accelerators", fail)

    with pytest.raises(Ended):
        probes.main("accelerators", "7")

    assert said() == [{"error": "OSError: no driver"}]
    assert ends[-1] == 1


def test_the_end_of_stdin_is_the_end_of_a_probe(
    monkeypatch: pytest.MonkeyPatch, ends: list[object]
) -> None:
    reader, writer = os.pipe()
    read = os.read
    monkeypatch.setattr(os, "read", lambda descriptor, count: read(reader, count))
    os.close(writer)

    with pytest.raises(Ended):
        probes.end_with_the_doctor()
    os.close(reader)

    assert ends == [1]

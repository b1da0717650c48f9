"""Clocks compared by ping-pong: right within the stated error, and nobody held up."""

from __future__ import annotations

import json
import multiprocessing
import socket
from pathlib import Path
from time import monotonic, perf_counter_ns, sleep

import pytest

from trine.tools.recording import clock_exchange
from trine.tools.recording.clock_exchange import ClockClient, ClockServer, reading_from
from trine.tools.tracing import ClockReading

SHIFT_NS = 7_000_000_000

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


def ask(folder: Path, answers: multiprocessing.Queue[list[ClockReading]]) -> None:
    """As a rank whose clock is seven seconds ahead."""
    clock_exchange.perf_counter_ns = lambda: perf_counter_ns() + SHIFT_NS  # type: ignore[attr-defined]
    readings: list[ClockReading] = []
    client = ClockClient(folder, readings.append)
    deadline = monotonic() + 60
    while not readings and monotonic() < deadline:
        sleep(0.001)
    client.close(60)
    answers.put(readings)


def test_what_one_question_tells() -> None:
    # Rank 0 is 1,000 ahead; the question takes 30, the answer 50, and 7 pass between.
    reading = reading_from(100, 1_130, 1_137, 187)

    assert reading == ClockReading(at_ns=143, offset_ns=990, error_ns=40)
    assert abs(reading.offset_ns - 1_000) <= reading.error_ns


def test_readings_at_the_start_and_the_end_are_right_within_their_error(tmp_path: Path) -> None:
    fork = multiprocessing.get_context("fork")
    answers: multiprocessing.Queue[list[ClockReading]] = fork.Queue()
    server = ClockServer(tmp_path)
    ranks = [fork.Process(target=ask, args=(tmp_path, answers)) for _ in range(2)]
    for rank in ranks:
        rank.start()

    readings = [answers.get(timeout=60) for _ in ranks]
    server.close(60)

    for rank in ranks:
        rank.join(60)
        assert rank.exitcode == 0
    for first, last in readings:
        assert first.at_ns < last.at_ns
        for reading in (first, last):
            assert abs(reading.offset_ns + SHIFT_NS) <= reading.error_ns
            assert reading.error_ns < 5_000_000  # a few us where the machine has nothing else to do
    assert not list(tmp_path.iterdir())


def test_an_answer_that_came_too_late_does_not_cost_the_last_reading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clock_exchange, "_BURST_S", 0.0)  # all answers but the first are late
    server = ClockServer(tmp_path)
    readings: list[ClockReading] = []
    client = ClockClient(tmp_path, readings.append)
    deadline = monotonic() + 60
    while not readings and monotonic() < deadline:
        sleep(0.001)

    client.close(60)
    server.close(60)

    assert len(readings) == 2


def test_a_rank_whose_rank_0_never_comes_is_not_held_up(tmp_path: Path) -> None:
    readings: list[ClockReading] = []
    client = ClockClient(tmp_path, readings.append)

    start = monotonic()
    client.close(60)

    assert monotonic() - start < 10
    assert readings == []


@pytest.mark.parametrize("content", ["", "[]", '{"hosts": 3}', '{"hosts": ["x"], "port": "y"}'])
def test_a_damaged_file_is_no_place_to_ask(tmp_path: Path, content: str) -> None:
    (tmp_path / ".trine-clock").write_text(content)

    client = ClockClient(tmp_path, lambda _: pytest.fail("a reading of nothing"), patience_s=0.01)

    client._thread.join(60)
    assert not client._thread.is_alive()


def test_a_port_that_is_somebody_elses_by_now_gives_no_reading(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        place = {"hosts": ["127.0.0.1"], "port": other.getsockname()[1], "token": "t" * 32}
        (tmp_path / ".trine-clock").write_text(json.dumps(place))
        client = ClockClient(tmp_path, lambda _: pytest.fail("a reading of nothing"), 0.05)
        connection, _ = other.accept()
        with connection:
            connection.recv(100)
            connection.sendall(b"HTTP/1.1 400 Bad Request")

            client.close(60)


def test_strangers_learn_nothing(tmp_path: Path) -> None:
    server = ClockServer(tmp_path)
    port = json.loads((tmp_path / ".trine-clock").read_text())["port"]

    with socket.create_connection(("127.0.0.1", port)) as stranger:
        stranger.sendall(b"x" * 32)
        assert stranger.recv(100) == b""

    server.close(1)

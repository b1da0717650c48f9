"""What the demo reads: a file, a folder, or Python's library, always in the same order."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from trine.distributed.demo.text import Text, Windows, read_text


def make_socket(name: str) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(name)  # in the current folder: the path of a socket must be short


def content(text: Text) -> bytes:
    return bytes(text.data.tolist())


def test_a_file_is_read_as_the_bytes_it_holds(tmp_path: Path) -> None:
    file = tmp_path / "latin.txt"
    file.write_bytes(b"d\xe9j\xe0 " * 3)  # not UTF-8, and still text

    assert content(read_text(file, at_least=10)) == b"d\xe9j\xe0 " * 3


def test_a_folder_is_read_in_the_order_of_names_without_hidden_and_binary_files(
    tmp_path: Path,
) -> None:
    for name, data in {
        "b.txt": b"2",
        "a.txt": b"1",
        "tests/c.txt": b"3",
        ".hidden": b"no",
        ".git/config": b"no",
        "image.png": b"\x89PNG\0",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(data)

    assert content(read_text(tmp_path, at_least=1)) == b"123"


def test_without_a_path_the_library_of_this_python_is_read() -> None:
    text = read_text(None, at_least=1)

    assert len(text.data) > 5_000_000
    assert Path(pytest.__file__).read_bytes() not in content(text)  # no installed packages


@pytest.mark.parametrize(
    ("data", "told"),
    [(b"", r"is empty, but training needs at least 9"), (b"12345678", r"holds 8 bytes of text")],
)
def test_too_short_a_text_is_refused(tmp_path: Path, data: bytes, told: str) -> None:
    file = tmp_path / "short.txt"
    file.write_bytes(data)

    with pytest.raises(ValueError, match=told):
        read_text(file, at_least=9)


@pytest.mark.parametrize("make", [os.mkfifo, make_socket])
def test_what_is_neither_a_file_nor_a_folder_is_refused_and_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[str], None]
) -> None:
    monkeypatch.chdir(tmp_path)
    make("special")
    Path("text.txt").write_text("text")

    with pytest.raises(ValueError, match="special is neither a file nor a folder"):
        read_text(Path("special"), at_least=1)
    assert content(read_text(tmp_path, at_least=1)) == b"text"  # in a folder it is passed over


def test_a_missing_path_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"There is no .*nothing\.txt"):
        read_text(tmp_path / "nothing.txt", at_least=1)


def test_windows_lie_inside_the_text_and_reach_both_its_ends() -> None:
    text = Text("digits", torch.arange(10, dtype=torch.uint8))

    windows = Windows(text, batch=200, length=8, seed=0).draw()

    assert windows.dtype == torch.int64
    assert windows.shape == (200, 8)
    assert torch.equal(windows - windows[:, :1], torch.arange(8).expand(200, 8))
    assert set(windows[:, 0].tolist()) == {0, 1, 2}


def test_the_same_seed_draws_the_same_windows_and_another_draws_others() -> None:
    text = Text("noise", torch.randint(256, (10_000,), dtype=torch.uint8))

    first, again, other = (Windows(text, batch=4, length=9, seed=s).draw() for s in (1, 1, 2))

    assert torch.equal(first, again)
    assert not torch.equal(first, other)

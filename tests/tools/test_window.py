"""Which steps a schedule records, written out."""

from __future__ import annotations

import pytest

from trine.tools import Window


def letters(window: Window, steps: int) -> str:
    return "".join(window.phase(step)[0] for step in range(steps))


@pytest.mark.parametrize(
    ("window", "expected"),
    [
        (Window(), "riiiiiiiii"),
        (Window(record=3), "rrriiiiiii"),
        (Window(skip=4), "iiiiriiiii"),
        (Window(wait=2, warmup=1, record=2), "iiwrriiiii"),
        (Window(wait=1, warmup=1, record=2, repeat=2), "iwrriwrrii"),
        (Window(skip=2, warmup=1, record=1, repeat=0), "iiwrwrwrwr"),
        (Window(repeat=0), "rrrrrrrrrr"),
    ],
)
def test_a_window_waits_warms_up_and_records(window: Window, expected: str) -> None:
    assert letters(window, 10) == expected


@pytest.mark.parametrize("name", ["skip", "wait", "warmup", "repeat"])
def test_a_negative_number_of_steps_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} is -1; it counts from 0"):
        Window(**{name: -1})


def test_a_window_that_records_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="record is 0; a window records at least one step"):
        Window(record=0)

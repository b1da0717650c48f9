"""Meetings of ranks, each a thread here, over one store in memory."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore  # torch.distributed does not re-export it

from trine.distributed._fsdp import meeting
from trine.distributed._fsdp.errors import CommError, RanksDisagree, rank_list
from trine.distributed._fsdp.meeting import Meetings


def on_ranks(world_size: int, body: Callable[[int, Meetings], object], store: Any = None) -> Any:
    """What `body(rank, meetings)` returns or raises on each rank."""
    store = HashStore() if store is None else store

    def rank_of(rank: int) -> object:
        try:
            return body(rank, Meetings(store, rank, limit_s=60.0))
        except (RanksDisagree, CommError) as error:
            return error

    with ThreadPoolExecutor(world_size) as ranks:
        return list(ranks.map(rank_of, range(world_size)))


def test_ranks_that_mean_the_same_meet_as_often_as_they_like() -> None:
    def body(rank: int, meetings: Meetings) -> None:
        for step in range(50):
            meetings.meet((0, 1, 2), f"step {step}", mend="")
            if rank:
                pair = (1, 2) if rank == 1 else (2, 1)
                meetings.meet(pair, f"step {step}", detail="the same", mend="")

    assert on_ranks(3, body) == [None] * 3


def test_what_is_over_is_forgotten_in_the_store() -> None:
    store = HashStore()

    def body(rank: int, meetings: Meetings) -> None:
        for _ in range(20):
            meetings.meet((0, 1), "step", mend="")

    on_ranks(2, body, store)

    # Of each rank where it is; of the last meeting three values.
    assert store.num_keys() == 5


def test_all_get_the_same_report_also_one_that_comes_late() -> None:
    second_came = HashStore()

    def body(rank: int, meetings: Meetings) -> None:
        if rank == 2:
            second_came.get("first two differ")  # waits for it
        if rank == 1:
            second_came.set("first two differ", "")
        meetings.meet((0, 1, 2), "gather" if rank != 1 else "reduce", mend="Do the same.")

    errors = on_ranks(3, body)

    assert {type(error) for error in errors} == {RanksDisagree}
    assert {str(error) for error in errors} == {
        "Ranks are about to do different things (number 0 among ranks 0-2):\n"
        "  ranks 0, 2: gather\n  rank 1: reduce\nDo the same."
    }


def test_details_that_differ_are_put_into_words_by_the_caller() -> None:
    def body(rank: int, meetings: Meetings) -> None:
        meetings.meet(
            (0, 1),
            "compare",
            detail=f"of {rank}",
            compare=lambda details: " / ".join(details[rank] for rank in sorted(details)),
            mend="Mend it.",
        )

    assert [str(error) for error in on_ranks(2, body)] == ["of 0 / of 1\nMend it."] * 2


def test_ranks_that_wait_for_each_other_at_two_places_are_found_out() -> None:
    def body(rank: int, meetings: Meetings) -> None:
        meetings.meet((0, 1, 2) if rank != 1 else (0, 1), "gather", mend="")

    errors = on_ranks(3, body)

    assert {type(error) for error in errors} == {RanksDisagree}
    assert "rank 1: was last at: gather, among ranks 0, 1" in str(errors[2])
    assert "rank 0: was last at: gather, among ranks 0-2" in str(errors[1])


def test_a_rank_that_does_not_come_is_named_with_where_it_was() -> None:
    def body(rank: int, meetings: Meetings) -> None:
        meetings.meet((0, 1), "first", mend="")
        if rank == 0:
            meetings.meet((0, 1), "second", limit_s=0.2, mend="Come.")

    error, gone = on_ranks(2, body)

    assert gone is None
    assert type(error) is CommError
    assert str(error) == (
        "Rank 1 did not come within 0.2 s to second (number 1 among ranks 0, 1):\n"
        "  rank 0: second\n  rank 1: was last at: first, 1 meeting before\nCome."
    )


def test_a_long_wait_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(meeting, "_PATIENCE_S", 0.1)

    with caplog.at_level(logging.WARNING), pytest.raises(CommError):
        Meetings(HashStore(), 0, limit_s=0.5).meet((0, 1), "the first forward", mend="")

    assert [record.getMessage() for record in caplog.records] == [
        "Rank 0 has waited 0.1 s, of 0.5, for others to come to the first forward:\n"
        "  rank 1: has not met any other rank yet"
    ]


def test_a_store_that_is_gone_is_told() -> None:
    class Gone(HashStore):
        def set(self, key: str, value: str) -> None:
            raise dist.DistNetworkError("failed to recv, got 0 bytes")

    with pytest.raises(CommError, match=r"gather: rank 3 cannot reach the store .*got 0 bytes"):
        Meetings(Gone(), 3, limit_s=1.0).meet((0, 3), "gather", mend="")


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        ([1], "rank 1"),
        ([0, 1], "ranks 0, 1"),
        ([3, 0, 1, 2, 6], "ranks 0-3, 6"),
    ],
)
def test_ranks_are_listed_in_short(ranks: list[int], words: str) -> None:
    assert rank_list(ranks) == words

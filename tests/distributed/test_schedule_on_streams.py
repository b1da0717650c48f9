"""What the schedule alone decides, on a model of time: what can run beside what. No torch.

Units here have a stream of their own for collectives, as those of nccl do, and compute on the
main one.
"""

from __future__ import annotations

from itertools import count

import pytest

from tests.distributed.stream_model import Mark, StreamModel, Timeline
from trine.distributed._fsdp.schedule import Schedule, UnitSettings

UNITS = 5


class StreamUnit:
    """Queues the work of a parameter group: one gather, one reduction at a time."""

    def __init__(self, name: str, model: StreamModel, comm: Timeline) -> None:
        self.name = name
        self._model = model
        self._comm = comm
        self._gathered: Mark | None = None
        self._reduced: Mark | None = None

    def _collective(self, label: str) -> Mark:
        started, done = Mark(), Mark()
        self._model.record(self._model.main, started)
        self._model.wait(self._comm, started)
        self._model.work(f"{label} {self.name}", self._comm)
        self._model.record(self._comm, done)
        return done

    def unshard(self) -> None:
        if self._gathered is None:
            self._gathered = self._collective("gather")

    def wait_for_unshard(self) -> None:
        self.unshard()
        assert self._gathered is not None
        self._model.wait(self._model.main, self._gathered)

    def reshard(self) -> None:
        self._gathered = None

    def reshard_until_backward(self) -> None:
        self._gathered = None

    def reduce_grads(self) -> None:
        self._reduced = self._collective("reduce")

    def keep_grads(self) -> None:
        raise NotImplementedError

    def take_up_grads(self) -> bool:
        return False

    def finish_reduce(self) -> bool:
        assert self._reduced is not None
        self._model.wait(self._model.main, self._reduced)
        return True

    def reset(self) -> None:
        raise NotImplementedError


def two_steps(*, prefetch: int = 1, open_reductions: int = 1) -> StreamModel:
    """In the first the order is learned; `find` finds the work of the second."""
    model, numbers = StreamModel(), count()
    schedule = Schedule(prefetch=prefetch, open_reductions=open_reductions)
    # A communicator for each, so that what is seen is the order of the schedule and not theirs.
    units = [StreamUnit(str(i), model, Timeline(f"comm {next(numbers)}")) for i in range(UNITS)]
    for unit in units:
        schedule.add(unit, UnitSettings())
    for _ in range(2):
        schedule.begin_forward()
        for unit in units:
            schedule.pre_forward(unit)
            model.work(f"forward of {unit.name}")
            schedule.post_forward(unit, grads_wanted=True)
        schedule.end_forward()
        for unit in reversed(units):
            schedule.pre_backward(unit)
            model.work(f"backward of {unit.name}")
            schedule.post_backward(unit)
        schedule.end_backward()
    return model


@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_as_many_gathers_run_beside_a_unit_as_are_made_ahead(prefetch: int) -> None:
    model = two_steps(prefetch=prefetch)

    for unit in range(UNITS):
        for ahead in range(1, 4):
            expected = ahead <= prefetch
            if unit + ahead < UNITS:
                gather, computing = f"gather {unit + ahead}", f"forward of {unit}"
                # The last gather of each is that for backward.
                assert model.find(gather, -2).beside(model.find(computing)) is expected
            if unit - ahead >= 0:
                gather, computing = f"gather {unit - ahead}", f"backward of {unit}"
                assert model.find(gather).beside(model.find(computing)) is expected


@pytest.mark.parametrize("open_reductions", [1, 2])
def test_a_reduction_runs_beside_as_many_units_as_may_be_open(open_reductions: int) -> None:
    model = two_steps(open_reductions=open_reductions)

    for unit in range(UNITS):
        for later in range(1, 4):
            if unit - later >= 0:
                reduction = model.find(f"reduce {unit}")
                computing = model.find(f"backward of {unit - later}")
                assert reduction.beside(computing) is (later <= open_reductions)


def test_every_reduction_has_ended_before_what_follows_backward() -> None:
    model = two_steps()

    optimizer_step = model.work("step")

    assert all(model.find(f"reduce {unit}").before(optimizer_step) for unit in range(UNITS))

"""The schedule decides the order of calls; a FakeUnit writes them down. No torch, no ranks."""

from __future__ import annotations

import pytest

from trine.distributed._fsdp.schedule import Phase, Schedule, UnitSettings


class FakeUnit:
    """Writes its calls into a list of its own and one that all units of a test share.

    Its reduction takes `collectives` collectives, one after the other.
    """

    collectives = 1
    keeps = False
    _steps_left = 0

    def __init__(self, name: str, journal: list[str]) -> None:
        self.name = name
        self.calls: list[str] = []
        self._journal = journal

    def _note(self, call: str) -> None:
        self.calls.append(call)
        self._journal.append(f"{self.name}.{call}")

    def unshard(self) -> None:
        self._note("unshard")

    def wait_for_unshard(self) -> None:
        self._note("wait_for_unshard")

    def reshard(self) -> None:
        self._note("reshard")

    def reshard_until_backward(self) -> None:
        self._note("reshard_until_backward")

    def reduce_grads(self) -> None:
        self._note("reduce_grads")
        self.keeps = False
        self._steps_left = self.collectives

    def keep_grads(self) -> None:
        self._note("keep_grads")
        self.keeps = True

    def take_up_grads(self) -> bool:
        return self.keeps

    def finish_reduce(self) -> bool:
        self._note("finish_reduce")
        self._steps_left -= 1
        return self._steps_left <= 0

    def reset(self) -> None:
        self._note("reset")


class Tree:
    """A root and its blocks under one schedule, and the events of a plain iteration."""

    def __init__(self, *blocks: str) -> None:
        self.journal: list[str] = []
        self.schedule = Schedule()
        self.root = FakeUnit("root", self.journal)
        self.settings = UnitSettings()
        self.schedule.add(self.root, UnitSettings(), is_root=True)
        self.blocks = [FakeUnit(name, self.journal) for name in blocks]
        for block in self.blocks:
            self.schedule.add(block, self.settings, is_root=False)

    def forward(self, *, grads_wanted: bool = True) -> None:
        self.schedule.begin_forward()
        self.schedule.pre_forward(self.root)
        for block in self.blocks:
            self.schedule.pre_forward(block)
            self.schedule.post_forward(block, grads_wanted=grads_wanted)
        self.schedule.post_forward(self.root, grads_wanted=grads_wanted)

    def backward(self) -> None:
        self.schedule.pre_backward(self.root)
        for block in reversed(self.blocks):
            self.schedule.pre_backward(block)
            self.schedule.post_backward(block)
        self.schedule.end_backward()

    def forget(self) -> None:
        self.journal.clear()
        for unit in (self.root, *self.blocks):
            unit.calls.clear()


def reductions(journal: list[str]) -> list[str]:
    return [entry for entry in journal if entry.endswith("reduce_grads")]


def test_a_block_is_freed_after_its_forward_and_the_root_is_not() -> None:
    tree = Tree("a")

    tree.forward()

    assert tree.blocks[0].calls == ["unshard", "wait_for_unshard", "reshard_until_backward"]
    assert tree.root.calls == ["unshard", "wait_for_unshard"]


def test_without_gradients_the_root_is_freed_too() -> None:
    tree = Tree("a")

    tree.forward(grads_wanted=False)

    assert tree.root.calls[-1] == "reshard"
    assert tree.schedule.phase_of(tree.root) is Phase.IDLE


def test_a_block_told_to_stay_whole_is_not_freed_after_forward() -> None:
    tree = Tree("a")
    tree.settings.reshard_after_forward = False

    tree.forward()

    assert tree.blocks[0].calls == ["unshard", "wait_for_unshard"]


def test_a_block_without_a_backward_to_come_is_freed_altogether() -> None:
    tree = Tree("a", "b")

    tree.forward(grads_wanted=False)

    assert [unit.calls[-1] for unit in (tree.root, *tree.blocks)] == ["reshard"] * 3


def test_a_block_that_is_not_gathered_for_its_backward_is_freed_altogether() -> None:
    tree = Tree("embedding")
    tree.settings.gathers_in_backward = False

    tree.forward()

    assert tree.blocks[0].calls[-1] == "reshard"


def test_a_block_with_two_backwards_is_freed_until_the_second_and_then_altogether() -> None:
    tree = Tree("shared")
    schedule, (shared,) = tree.schedule, tree.blocks
    schedule.begin_forward()
    schedule.pre_forward(tree.root)
    for _ in range(2):
        schedule.pre_forward(shared)
        schedule.post_forward(shared, grads_wanted=True)
    schedule.post_forward(tree.root, grads_wanted=True)
    schedule.pre_backward(tree.root)
    tree.forget()

    for _ in range(2):
        schedule.pre_backward(shared)
        schedule.post_backward(shared)

    frees = [call for call in shared.calls if call.startswith("reshard")]
    assert frees == ["reshard_until_backward", "reshard"]


def test_the_second_forward_gathers_the_next_block_before_a_block_computes() -> None:
    tree = Tree("a", "b")
    tree.forward()
    tree.backward()
    tree.forget()

    tree.schedule.begin_forward()
    tree.schedule.pre_forward(tree.root)
    tree.schedule.pre_forward(tree.blocks[0])

    assert tree.blocks[0].calls == ["unshard", "unshard", "wait_for_unshard"]
    assert tree.blocks[1].calls == ["unshard"]  # started, not waited for


def test_the_first_forward_prefetches_nothing_because_the_order_is_not_known() -> None:
    tree = Tree("a", "b")

    tree.schedule.begin_forward()
    tree.schedule.pre_forward(tree.root)
    tree.schedule.pre_forward(tree.blocks[0])

    assert tree.blocks[1].calls == []


def test_a_forward_that_leaves_the_known_order_stops_prefetching() -> None:
    tree = Tree("a", "b", "c")
    tree.forward()
    tree.backward()
    tree.forget()
    schedule, (_, b, c) = tree.schedule, tree.blocks

    schedule.begin_forward()
    schedule.pre_forward(tree.root)
    schedule.pre_forward(b)  # a is skipped this time

    assert c.calls == []


def test_backward_prefetches_the_block_that_ran_before() -> None:
    tree = Tree("a", "b")
    tree.forward()
    tree.forget()

    tree.schedule.pre_backward(tree.blocks[1])

    assert tree.blocks[1].calls == ["unshard", "wait_for_unshard"]
    assert tree.blocks[0].calls == ["unshard"]  # started, not waited for


def test_the_backward_of_the_root_prefetches_the_last_block() -> None:
    tree = Tree("a", "b")
    tree.forward()
    tree.forget()

    tree.schedule.pre_backward(tree.root)

    assert tree.blocks[1].calls == ["unshard"]
    assert tree.blocks[0].calls == []


def test_backward_prefetches_nothing_that_has_no_backward_to_come() -> None:
    tree = Tree("frozen", "b")
    schedule, (frozen, b) = tree.schedule, tree.blocks
    schedule.begin_forward()
    schedule.pre_forward(frozen)
    schedule.post_forward(frozen, grads_wanted=False)
    schedule.pre_forward(b)
    schedule.post_forward(b, grads_wanted=True)
    tree.forget()

    schedule.pre_backward(b)

    assert frozen.calls == []


def test_only_the_first_pre_backward_begins_a_backward() -> None:
    tree = Tree("a")
    tree.forward()

    assert tree.schedule.pre_backward(tree.root) is True
    assert tree.schedule.pre_backward(tree.blocks[0]) is False


def test_every_block_reduces_once_in_reverse_order_and_the_root_last() -> None:
    tree = Tree("a", "b", "c")
    tree.forward()
    tree.forget()

    tree.backward()

    assert reductions(tree.journal) == [
        "c.reduce_grads",
        "b.reduce_grads",
        "a.reduce_grads",
        "root.reduce_grads",
    ]


def test_a_reduction_overlaps_the_next_backward_and_no_more_than_one_is_open() -> None:
    tree = Tree("a", "b", "c")
    tree.forward()
    tree.forget()

    tree.backward()

    journal = [e for e in tree.journal if e.endswith(("reduce_grads", "finish_reduce"))]
    assert journal == [
        "c.reduce_grads",
        "c.finish_reduce",  # after the backward of b
        "b.reduce_grads",
        "b.finish_reduce",
        "a.reduce_grads",
        "a.finish_reduce",
        "root.reduce_grads",
        "root.finish_reduce",
    ]


def test_a_reduction_of_two_collectives_goes_on_as_later_ones_start() -> None:
    tree = Tree("a", "b", "c")
    for unit in (tree.root, *tree.blocks):
        unit.collectives = 2
    tree.forward()
    tree.forget()

    tree.backward()

    journal = [e for e in tree.journal if e.endswith(("reduce_grads", "finish_reduce"))]
    assert journal == [
        "c.reduce_grads",
        "c.finish_reduce",  # its first collective is over, the second starts
        "b.reduce_grads",
        "c.finish_reduce",
        "b.finish_reduce",
        "a.reduce_grads",
        "b.finish_reduce",
        "a.finish_reduce",
        "root.reduce_grads",
        "a.finish_reduce",
        "root.finish_reduce",
        "root.finish_reduce",
    ]


def test_a_unit_of_two_modules_is_gathered_for_the_first_and_freed_after_both() -> None:
    tree = Tree()
    pair = FakeUnit("pair", tree.journal)
    tree.schedule.add(pair, UnitSettings(), parts=2)
    schedule = tree.schedule
    schedule.begin_forward()

    assert schedule.pre_forward(pair, 0) is True
    schedule.post_forward(pair, 0, grads_wanted=True)
    assert pair.calls == ["unshard", "wait_for_unshard"]
    assert schedule.pre_forward(pair, 1) is False
    schedule.post_forward(pair, 1, grads_wanted=True)

    assert pair.calls.count("reshard_until_backward") == 1
    assert schedule.phase_of(pair) is Phase.AWAITS_BACKWARD


def test_a_unit_of_which_one_module_ran_is_freed_when_the_root_has_computed() -> None:
    tree = Tree()
    pair = FakeUnit("pair", tree.journal)
    tree.schedule.add(pair, UnitSettings(), parts=2)
    schedule = tree.schedule
    schedule.begin_forward()
    schedule.pre_forward(pair, 0)
    schedule.post_forward(pair, 0, grads_wanted=True)

    schedule.end_forward()

    assert pair.calls[-1] == "reshard_until_backward"
    assert schedule.phase_of(pair) is Phase.AWAITS_BACKWARD


def test_a_block_whose_backward_never_came_is_reduced_at_the_end_like_on_other_ranks() -> None:
    tree = Tree("a", "unused")
    tree.forward()
    tree.forget()
    schedule, (a, unused) = tree.schedule, tree.blocks

    schedule.pre_backward(tree.root)
    schedule.pre_backward(a)
    schedule.post_backward(a)
    schedule.end_backward()

    assert unused.calls.count("reduce_grads") == 1
    assert unused.calls.count("finish_reduce") == 1
    assert unused.calls[-1] == "reshard"


def test_without_gradient_sync_gradients_are_kept_and_parameters_freed() -> None:
    tree = Tree("a")
    tree.settings.reduces = False
    tree.forward()
    tree.forget()

    tree.backward()

    assert "keep_grads" in tree.blocks[0].calls
    assert "reshard" in tree.blocks[0].calls
    assert reductions(tree.journal) == ["root.reduce_grads"]


def test_what_a_block_kept_is_reduced_by_a_later_backward_that_does_not_reach_it() -> None:
    tree = Tree("a", "skipped")
    tree.settings.reduces = False
    tree.forward()
    tree.backward()
    tree.forget()
    schedule, (a, skipped) = tree.schedule, tree.blocks

    tree.settings.reduces = True
    for _ in range(2):
        schedule.begin_forward()
        for unit in (tree.root, a):
            schedule.pre_forward(unit)
            schedule.post_forward(unit, grads_wanted=True)
        schedule.pre_backward(tree.root)
        schedule.pre_backward(a)
        schedule.post_backward(a)
        schedule.end_backward()

    assert a.calls.count("reduce_grads") == 2
    assert skipped.calls.count("reduce_grads") == 1
    assert skipped.calls.count("finish_reduce") == 1


def test_a_recomputed_forward_gathers_and_leaves_the_block_whole_for_its_backward() -> None:
    tree = Tree("a")
    tree.forward()
    schedule, (a,) = tree.schedule, tree.blocks
    schedule.pre_backward(tree.root)
    schedule.pre_backward(a)
    tree.forget()

    schedule.pre_forward(a)
    schedule.post_forward(a, grads_wanted=True)

    assert a.calls == ["unshard", "wait_for_unshard"]
    assert schedule.phase_of(a) is Phase.BACKWARD


def test_a_module_used_twice_reduces_after_each_of_its_backwards() -> None:
    tree = Tree("shared")
    schedule, (shared,) = tree.schedule, tree.blocks
    schedule.begin_forward()
    schedule.pre_forward(tree.root)
    for _ in range(2):
        schedule.pre_forward(shared)
        schedule.post_forward(shared, grads_wanted=True)
    schedule.post_forward(tree.root, grads_wanted=True)
    schedule.pre_backward(tree.root)
    tree.forget()

    for _ in range(2):
        schedule.pre_backward(shared)
        schedule.post_backward(shared)
    schedule.end_backward()

    assert shared.calls.count("reduce_grads") == 2
    assert shared.calls.count("finish_reduce") == 2
    # The first reduction is over before the second begins: a unit has one at a time.
    first_finish = shared.calls.index("finish_reduce")
    assert first_finish < [i for i, c in enumerate(shared.calls) if c == "reduce_grads"][1]


def test_after_an_exception_in_backward_everything_is_dropped_and_idle() -> None:
    tree = Tree("a", "b")
    tree.forward()
    schedule = tree.schedule
    schedule.pre_backward(tree.root)
    schedule.pre_backward(tree.blocks[1])
    schedule.post_backward(tree.blocks[1])

    schedule.reset()

    assert not schedule.in_backward
    for unit in (tree.root, *tree.blocks):
        assert unit.calls[-1] == "reset"
        assert schedule.phase_of(unit) is Phase.IDLE


def test_a_forward_that_raised_frees_the_root_too() -> None:
    tree = Tree("a")
    tree.schedule.begin_forward()
    tree.schedule.pre_forward(tree.root)

    tree.schedule.forward_failed(tree.root)

    assert tree.root.calls == ["unshard", "wait_for_unshard", "reshard"]
    assert tree.schedule.phase_of(tree.root) is Phase.IDLE


def test_a_recomputation_that_stops_early_leaves_the_block_whole() -> None:
    tree = Tree("a")
    tree.forward()
    schedule, (a,) = tree.schedule, tree.blocks
    schedule.pre_backward(a)
    tree.forget()

    schedule.pre_forward(a)
    schedule.forward_failed(a)

    assert a.calls == ["unshard", "wait_for_unshard"]
    assert schedule.phase_of(a) is Phase.BACKWARD


def test_an_iteration_after_a_broken_one_goes_as_if_nothing_had_happened() -> None:
    tree = Tree("a", "b")
    tree.forward()
    tree.backward()
    tree.schedule.begin_forward()
    tree.schedule.pre_forward(tree.root)
    tree.schedule.pre_forward(tree.blocks[0])  # raises here in the user's code
    tree.forget()

    tree.forward()
    tree.backward()

    assert len(reductions(tree.journal)) == 3
    assert all(tree.schedule.phase_of(u) is Phase.IDLE for u in (tree.root, *tree.blocks))


@pytest.mark.parametrize("grads_wanted", [True, False])
def test_reshard_all_frees_every_unit(grads_wanted: bool) -> None:
    tree = Tree("a", "b")
    tree.forward(grads_wanted=grads_wanted)
    tree.forget()

    tree.schedule.reshard_all()

    assert [unit.calls for unit in (tree.root, *tree.blocks)] == [["reshard"]] * 3


def test_idle_memory_is_freed_where_forward_turns_into_backward_and_at_the_end() -> None:
    tree = Tree("a")
    freed: list[Phase] = []
    tree.schedule.free_idle = lambda: freed.append(tree.schedule.phase_of(tree.root))

    tree.forward()
    tree.schedule.end_forward()
    after_forward = list(freed)
    tree.backward()

    assert after_forward == [Phase.AWAITS_BACKWARD]
    assert freed[-1] is Phase.IDLE


@pytest.mark.parametrize("late", [False, True], ids=["ahead", "ahead late"])
def test_idle_memory_is_freed_when_backward_has_nothing_more_to_gather(late: bool) -> None:
    tree = Tree("a", "b")
    tree.settings.ahead_late = late
    tree.forward()
    tree.forget()
    tree.schedule.free_idle = lambda: tree.journal.append("free_idle")

    tree.backward()

    gathers = [place for place, call in enumerate(tree.journal) if call.endswith(".unshard")]
    frees = [place for place, call in enumerate(tree.journal) if call == "free_idle"]
    last_reduction = tree.journal.index("a.reduce_grads")
    assert len(frees) == 2  # here and at the end
    assert gathers[-1] < frees[0]
    assert late or frees[0] < last_reduction

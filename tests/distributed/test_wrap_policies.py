"""Which modules get a wrapper of their own: policies of ours, judged by what torch's choose."""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed.fsdp.wrap as torch_wrap
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from trine.distributed._fsdp import torch_internals
from trine.distributed._wrapper.auto_wrap import Apart, auto_wrap
from trine.distributed.fsdp import wrap as our_wrap
from trine.distributed.fsdp.wrap import (
    CustomPolicy,
    ModuleWrapPolicy,
    always_wrap_policy,
    enable_wrap,
    lambda_auto_wrap_policy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
    wrap,
)


class Wrapper(nn.Module):
    def __init__(self, module: nn.Module, **kwargs: Any) -> None:
        super().__init__()
        self.inside = module
        self.kwargs = kwargs

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inside(x)
        return y


class Block(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(self.up(self.norm(x)))
        return y


class Model(nn.Module):
    """Blocks in a list, blocks in a list of lists, and what stands before and after them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 4)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.experts = nn.ModuleList(
            nn.ModuleList(nn.Linear(4, 4) for _ in range(2)) for _ in range(2)
        )
        self.branches = nn.ModuleDict({"left": Block(), "right": nn.Sequential(Block(), Block())})
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 16)


def transformer() -> nn.Module:
    return nn.Sequential(
        nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16), 2, enable_nested_tensor=False),
        nn.TransformerDecoder(nn.TransformerDecoderLayer(8, 2, 16), 1),
    )


def sequential() -> nn.Module:
    return nn.Sequential(
        nn.Linear(8, 8),
        nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Sequential(nn.Linear(16, 4))),
        nn.Linear(4, 1, bias=False),
    )


TREES: Mapping[str, Callable[[], nn.Module]] = {
    "model": Model,
    "sequential": sequential,
    "transformer": transformer,
}


def wrapped(model: nn.Module) -> dict[str, dict[str, Any]]:
    """The names of all wrapped modules as they were before, and what their wrappers were given."""
    return {
        ".".join(part for part in name.split(".") if part != "inside"): module.kwargs
        for name, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, Wrapper)
    }


def wrapped_by_us(
    model: nn.Module,
    policy: object,
    ignored_modules: set[nn.Module] = frozenset(),  # type: ignore[assignment]  # never changed
    ignored_params: set[nn.Parameter] = frozenset(),  # type: ignore[assignment]
) -> dict[str, dict[str, Any]]:
    auto_wrap(
        model,
        policy,
        lambda module, overrides: Wrapper(module, **overrides),
        ignored_modules,
        ignored_params,
        lambda module: isinstance(module, Wrapper),
    )
    return wrapped(model)


def wrapped_by_torch(
    model: nn.Module,
    policy: Any,
    ignored_modules: set[nn.Module] = frozenset(),  # type: ignore[assignment]
    ignored_params: set[nn.Parameter] = frozenset(),  # type: ignore[assignment]
) -> dict[str, dict[str, Any]]:
    if isinstance(policy, torch_wrap._Policy):
        chosen = policy._run_policy(model, ignored_modules, {})
        torch_wrap._post_order_apply(model, torch_wrap._construct_wrap_fn(model, chosen, Wrapper))
    else:
        torch_wrap._recursive_wrap(
            model, policy, Wrapper, ignored_modules, ignored_params, only_wrap_children=True
        )
    return wrapped(model)


def linear_without_bias(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) and module.bias is None


def with_arguments(module: nn.Module) -> bool | dict[str, Any]:
    if isinstance(module, nn.Linear):
        return {"width": module.in_features} if module.in_features == module.out_features else {}
    return isinstance(module, Block)


LAYERS = {Block, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer}

# Each made from the module `wrap` of ours, or of torch.
POLICIES: Mapping[str, Callable[[Any], Any]] = {
    "classes": lambda of: of.ModuleWrapPolicy(LAYERS),
    "nested classes": lambda of: of.ModuleWrapPolicy([*LAYERS, nn.LayerNorm, nn.Linear]),
    "transformer": lambda of: partial(
        of.transformer_auto_wrap_policy, transformer_layer_cls=LAYERS | {nn.Linear}
    ),
    "function": lambda of: partial(of.lambda_auto_wrap_policy, lambda_fn=linear_without_bias),
    "arguments": lambda of: of.CustomPolicy(with_arguments),
    "either": lambda of: partial(
        of._or_policy,
        policies=[
            of.ModuleWrapPolicy({nn.Embedding}),
            partial(of.size_based_auto_wrap_policy, min_num_params=80),
        ],
    ),
    **{
        f"at least {numel}": partial(
            lambda of, least: partial(of.size_based_auto_wrap_policy, min_num_params=least),
            least=numel,
        )
        for numel in (1, 50, 100, 250, 10**6)
    },
    "leaves and exclusions": lambda of: partial(
        of.size_based_auto_wrap_policy,
        min_num_params=1,
        force_leaf_modules={Block},
        exclude_wrap_modules={nn.ModuleList, nn.ModuleDict, nn.Sequential},
    ),
}


@pytest.mark.filterwarnings("ignore:auto_wrap_policy")  # some choose nothing in some trees
@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("whose", ["ours", "torch's"])
def test_the_same_modules_are_wrapped_as_by_torch(tree: str, name: str, whose: str) -> None:
    expected = wrapped_by_torch(TREES[tree](), POLICIES[name](torch_wrap))

    given = POLICIES[name](our_wrap if whose == "ours" else torch_wrap)
    found = wrapped_by_us(TREES[tree](), given)

    # Attention takes the weight of its projection without calling it, so a wrapper fails there.
    assert found == {
        name: kwargs for name, kwargs in expected.items() if not name.endswith("attn.out_proj")
    }


def wrapped_but_for_some(wrap_in: Any, policy: object) -> dict[str, dict[str, Any]]:
    model = Model()
    ignored = nn.ModuleList([model.blocks[1], model.branches, model.head])
    return wrap_in(  # type: ignore[no-any-return]
        model,
        policy,
        {module for module in ignored.modules() if module is not ignored},
        {*ignored.parameters(), *model.embed.parameters()},
    )


@pytest.mark.parametrize("name", ["classes", "arguments", "at least 50", "either"])
def test_the_same_modules_are_ignored_as_by_torch(name: str) -> None:
    expected = wrapped_but_for_some(wrapped_by_torch, POLICIES[name](torch_wrap))

    found = wrapped_but_for_some(wrapped_by_us, POLICIES[name](our_wrap))

    assert found == expected
    assert "blocks.0" in found
    assert "blocks.1" not in found


leaves = st.one_of(
    st.builds(nn.Linear, st.integers(1, 4), st.integers(1, 4), bias=st.booleans()),
    st.builds(nn.MultiheadAttention, st.just(2), st.just(1)),
    st.builds(nn.ReLU),
)
containers = st.sampled_from(
    [
        nn.ModuleList,
        lambda children: nn.Sequential(*children),
        lambda children: nn.ModuleDict({f"m{i}": child for i, child in enumerate(children)}),
    ]
)
models = st.recursive(
    leaves,
    lambda below: st.builds(
        lambda make, children: make(children), containers, st.lists(below, min_size=1, max_size=3)
    ),
    max_leaves=12,
)


@given(model=st.builds(nn.Sequential, models, models), least=st.integers(0, 40))
@settings(max_examples=100, deadline=None)
def test_any_tree_is_wrapped_by_size_as_by_torch(model: nn.Module, least: int) -> None:
    expected = wrapped_by_torch(
        copy.deepcopy(model),
        partial(torch_wrap.size_based_auto_wrap_policy, min_num_params=least),
    )

    found = wrapped_by_us(model, partial(size_based_auto_wrap_policy, min_num_params=least))

    assert found == expected


def test_everything_with_a_forward_is_wrapped_by_always_wrap_policy_from_the_inside_out() -> None:
    model = Model()
    everything = {
        name
        for name, module in model.named_modules()
        if name and not isinstance(module, (nn.ModuleList, nn.ModuleDict))
    }

    found = wrapped_by_us(model, always_wrap_policy)

    assert set(found) == everything
    assert isinstance(model.blocks, nn.ModuleList)  # a wrapper of it would do nothing
    assert isinstance(model.blocks[0], Wrapper)
    assert isinstance(model.blocks[0].inside, Block)
    assert isinstance(model.blocks[0].inside.up, Wrapper)


def test_a_wrapped_model_computes_what_it_did() -> None:
    model = sequential()
    x = torch.randn(3, 8)
    before = model(x)

    wrapped_by_us(model, ModuleWrapPolicy({nn.Linear}))

    assert len(wrapped(model)) == 4
    assert torch.equal(model(x), before)


class Shared(nn.Module):
    """One block in two places, one of them twice in one parent."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(Block(), nn.Linear(4, 4))
        self.second = nn.ModuleList([self.first[0], nn.Linear(4, 4), self.first[0]])


@pytest.mark.parametrize(
    "policy",
    [ModuleWrapPolicy({Block}), partial(size_based_auto_wrap_policy, min_num_params=50)],
    ids=["classes", "size"],
)
def test_a_shared_module_is_wrapped_once_and_replaced_everywhere(policy: object) -> None:
    model = Shared()
    block = model.first[0]

    wrapped_by_us(model, policy)

    wrapper = model.first[0]
    assert isinstance(wrapper, Wrapper)
    assert wrapper.inside is block
    assert model.second[0] is wrapper
    assert model.second[2] is wrapper


def test_parameters_of_a_shared_module_are_counted_once() -> None:
    model = Shared()
    chosen = model.second[1]
    asked = {}

    def policy(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
        if not recurse:
            asked[module] = nonwrapped_numel
        return recurse or module is chosen

    wrapped_by_us(model, policy)

    block = 8 + (4 * 8 + 8) + (8 * 4 + 4)
    assert asked[model.first[0]] == block
    assert asked[model.first] == block + 20
    assert asked[model.second] == block  # twice there, as one


def test_what_is_wrapped_or_ignored_is_not_counted_for_the_module_around_it() -> None:
    done, chosen, ignored, other = (nn.Linear(2, 2) for _ in range(4))
    inner = nn.Sequential(Wrapper(done), chosen, ignored, other)
    asked: list[int] = []

    def policy(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
        if module is inner:
            asked.append(nonwrapped_numel)
        return recurse or module is chosen

    wrapped_by_us(nn.Sequential(inner), policy, ignored_params=set(ignored.parameters()))

    # Each has 6 elements. On the way down all but those of two, on the way up of three.
    assert asked == [12, 6]


def test_what_is_wrapped_already_is_left_alone_with_all_that_is_in_it() -> None:
    model = Model()
    by_hand = Wrapper(model.blocks[0], by="hand")
    model.blocks[0] = by_hand

    found = wrapped_by_us(model, ModuleWrapPolicy({Block, nn.Linear}))

    assert model.blocks[0] is by_hand
    assert found["blocks.0"] == {"by": "hand"}
    assert "blocks.0.up" not in found
    assert "blocks.1.up" in found


def test_a_module_around_one_that_is_wrapped_already_is_wrapped() -> None:
    model = nn.Sequential(nn.Sequential(Wrapper(nn.Linear(2, 2)), nn.Linear(2, 2)))

    found = wrapped_by_us(model, CustomPolicy(lambda module: isinstance(module, nn.Sequential)))

    assert set(found) == {"0", "0.0"}


def test_choosing_a_module_that_is_wrapped_in_another_place_is_refused_before_anything() -> None:
    model = nn.ModuleDict({"free": nn.Linear(2, 2), "plain": Block(), "done": nn.Identity()})
    model["done"] = Wrapper(model["plain"])

    with pytest.raises(ValueError, match=r"chose plain \(Block\), but .* another place, done\."):
        wrapped_by_us(model, ModuleWrapPolicy({Block, nn.Linear}))

    assert set(wrapped(model)) == {"done"}


def test_what_is_below_an_ignored_module_is_left_alone_though_it_is_not_named() -> None:
    model = Model()

    found = wrapped_by_us(model, ModuleWrapPolicy({Block}), ignored_modules={model.branches})

    assert set(found) == {"blocks.0", "blocks.1", "blocks.2"}


def test_a_policy_sees_the_model_as_it_was_made() -> None:
    model = Model()
    asked = []

    def no_wrapper_in(module: nn.Module) -> bool:
        asked.append(not any(isinstance(below, Wrapper) for below in module.modules()))
        return isinstance(module, (Block, nn.Linear))

    wrapped_by_us(model, partial(lambda_auto_wrap_policy, lambda_fn=no_wrapper_in))

    assert asked
    assert all(asked)


def test_of_a_compiled_module_that_is_chosen_the_compiled_one_is_wrapped() -> None:
    block = Block()
    compiled = torch.compile(block, backend="eager")
    assert isinstance(compiled, nn.Module)
    model = nn.Sequential(compiled, Block())

    found = wrapped_by_us(model, CustomPolicy(lambda each: each is block and {"width": 4}))

    assert found == {"0": {"width": 4}}
    assert model[0].inside is compiled


def test_in_a_compiled_model_what_it_was_made_from_is_not_wrapped_once_more() -> None:
    model = nn.Sequential(Block(), Block())
    compiled = torch.compile(model, backend="eager")
    assert isinstance(compiled, nn.Module)

    found = wrapped_by_us(
        compiled, Apart(ModuleWrapPolicy({Block, nn.Sequential}), (nn.Sequential,), {})
    )

    assert set(found) == {"_orig_mod.0", "_orig_mod.1"}


def test_the_compiled_one_is_not_known_where_torch_names_it_otherwise() -> None:
    compiled = torch.compile(Block(), backend="eager")
    assert isinstance(compiled, nn.Module)
    compiled.__class__ = type("OtherModule", (type(compiled).__bases__[0],), {})

    assert torch_internals.compiled_from(compiled) is None


class OwnAttention(nn.MultiheadAttention):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        y: Tensor = self.out_proj(x)
        return y


def test_what_attention_uses_without_calling_it_is_not_wrapped() -> None:
    model = nn.Sequential(nn.MultiheadAttention(4, 2), OwnAttention(4, 2), nn.Linear(4, 4))

    found = wrapped_by_us(model, ModuleWrapPolicy({nn.Linear}))

    assert set(found) == {"1.out_proj", "2"}


# --- modules of some classes apart


def test_classes_apart_are_wrapped_with_their_arguments_beside_what_a_policy_chooses() -> None:
    policy = Apart(ModuleWrapPolicy({Block}), (nn.LayerNorm, nn.BatchNorm1d), {"dtype": None})

    found = wrapped_by_us(Model(), policy)

    blocks = ["blocks.0", "blocks.1", "blocks.2"]
    blocks += ["branches.left", "branches.right.0", "branches.right.1"]
    assert found == {
        **{block: {} for block in blocks},
        **{f"{block}.norm": {"dtype": None} for block in blocks},
        "norm": {"dtype": None},
    }


def test_classes_apart_are_found_where_a_policy_does_not_look() -> None:
    policy = Apart(
        partial(size_based_auto_wrap_policy, min_num_params=10**6), (nn.LayerNorm,), {"a": 1}
    )

    found = wrapped_by_us(Model(), policy)

    assert "blocks.0.norm" in found
    assert all(kwargs == {"a": 1} for kwargs in found.values())


def test_classes_apart_are_not_counted_for_what_is_around_them() -> None:
    size = 8 + (4 * 8 + 8) + (8 * 4 + 4)
    model = nn.Sequential(Block(), nn.Sequential(Block(), nn.Linear(1, 8, bias=False)))
    least = partial(size_based_auto_wrap_policy, min_num_params=size)

    found = wrapped_by_us(model, Apart(least, (nn.LayerNorm,), {}))

    # Without its norm the block is 8 too small, and the one with a Linear of 8 is just enough.
    assert set(found) == {"0.norm", "1", "1.0.norm"}


def test_arguments_of_classes_apart_come_before_those_of_a_custom_policy() -> None:
    policy = Apart(
        CustomPolicy(lambda module: {"dtype": "half", "width": 4}),
        (nn.BatchNorm1d,),
        {"dtype": None},
    )
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))

    found = wrapped_by_us(model, policy)

    assert found == {"0": {"dtype": "half", "width": 4}, "1": {"dtype": None, "width": 4}}


def test_classes_apart_need_no_policy() -> None:
    found = wrapped_by_us(Model(), Apart(None, (nn.BatchNorm1d,), {"dtype": None}))

    assert found == {"norm": {"dtype": None}}


def test_the_root_is_not_replaced_though_it_is_of_a_class_apart() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2)))

    found = wrapped_by_us(model, Apart(None, (nn.Sequential,), {}))

    assert set(found) == {"0"}


def test_classes_apart_that_are_ignored_are_left_alone() -> None:
    model = Model()

    found = wrapped_by_us(model, Apart(None, (nn.BatchNorm1d,), {}), ignored_modules={model.norm})

    assert found == {}


# --- what cannot be wrapped


@pytest.mark.parametrize(
    "policy",
    [
        ModuleWrapPolicy({nn.ModuleList}),
        CustomPolicy(lambda module: isinstance(module, nn.ModuleList)),
        partial(transformer_auto_wrap_policy, transformer_layer_cls={nn.ModuleList}),
    ],
    ids=["classes", "function", "transformer"],
)
def test_a_container_that_is_chosen_is_refused_with_what_to_choose(policy: object) -> None:
    model = Model()

    with pytest.raises(
        ValueError,
        match=r"chose blocks \(ModuleList\), which has no forward .* what is in it \(Block\)",
    ):
        wrapped_by_us(model, policy)

    assert wrapped(model) == {}


def test_a_list_of_parameters_that_is_chosen_is_refused_with_what_to_choose() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    model.scales = nn.ParameterList([nn.Parameter(torch.ones(3))])

    with pytest.raises(ValueError, match=r"scales \(ParameterList\).* the module that uses it"):
        wrapped_by_us(model, always_wrap_policy)


def test_a_container_that_is_chosen_for_its_size_is_left_to_the_module_around_it() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    model.scales = nn.ParameterList([nn.Parameter(torch.ones(3))])

    found = wrapped_by_us(model, partial(size_based_auto_wrap_policy, min_num_params=3))

    assert set(found) == {"0"}


class ListWithForward(nn.ModuleList):
    def forward(self, x: Tensor) -> Tensor:
        for module in self:
            x = module(x)
        return x


def test_a_container_with_a_forward_is_wrapped() -> None:
    model = nn.Sequential(ListWithForward([nn.Linear(2, 2)]))

    found = wrapped_by_us(model, ModuleWrapPolicy({ListWithForward}))

    assert set(found) == {"0"}


# --- policies that choose nothing


@pytest.mark.parametrize("of", [our_wrap, torch_wrap], ids=["ours", "torch's"])
@pytest.mark.parametrize(
    "make",
    [
        lambda of: of.ModuleWrapPolicy({nn.TransformerEncoderLayer}),
        lambda of: of.CustomPolicy(lambda module: False),
        lambda of: partial(
            of.transformer_auto_wrap_policy, transformer_layer_cls={nn.TransformerEncoderLayer}
        ),
        lambda of: partial(
            of._or_policy,
            policies=[of.ModuleWrapPolicy({nn.Conv1d}), of.ModuleWrapPolicy({nn.Conv2d})],
        ),
    ],
    ids=["classes", "function", "transformer", "either"],
)
def test_a_policy_that_fits_no_module_warns_with_the_classes_that_are_there(
    of: Any, make: Callable[[Any], object]
) -> None:
    with pytest.warns(UserWarning, match="chose no module of Model") as caught:
        found = wrapped_by_us(Model(), make(of))

    assert found == {}
    assert "Linear (17), torch.nn.modules.normalization.LayerNorm (6), " in str(caught[0].message)
    assert f"{__name__}.Block (6)" in str(caught[0].message)


def test_the_warning_names_the_class_that_was_asked_for() -> None:
    with pytest.warns(UserWarning, match=r"ModuleWrapPolicy\(\{torch\.nn\..*\.Conv1d\}\)"):
        wrapped_by_us(Model(), ModuleWrapPolicy({nn.Conv1d}))


def test_the_warning_points_at_the_line_that_makes_the_wrapper() -> None:
    class AutoWrapper(Wrapper):
        def __init__(self, module: nn.Module, policy: object) -> None:
            super().__init__(module)
            auto_wrap(module, policy, lambda each, _: Wrapper(each), set(), set(), lambda _: False)

    with pytest.warns(UserWarning, match="chose no module") as caught:
        AutoWrapper(sequential(), ModuleWrapPolicy({Block}))

    assert caught[0].filename == __file__


@pytest.mark.parametrize(
    ("model", "policy"),
    [
        (Block(), ModuleWrapPolicy({Block})),
        (Model(), partial(size_based_auto_wrap_policy, min_num_params=10**9)),
        (nn.Linear(2, 2), ModuleWrapPolicy({Block})),
        (nn.Sequential(Wrapper(Block())), ModuleWrapPolicy({Block})),
        (nn.Sequential(nn.ReLU()), ModuleWrapPolicy({Block})),
        (Model(), ModuleWrapPolicy({Block, nn.Conv1d})),
    ],
    ids=["the root fits", "too small", "a leaf", "wrapped already", "no parameters", "one of two"],
)
def test_a_policy_that_could_choose_or_has_nothing_to_choose_does_not_warn(
    model: nn.Module, policy: object
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")

        wrapped_by_us(model, policy)


# --- what is no policy


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ({Block}, r"auto_wrap_policy must be a policy, got .* \(set\).*ModuleWrapPolicy\("),
        (Block, r"auto_wrap_policy must be a policy, got .*Block"),
        (ModuleWrapPolicy, r"auto_wrap_policy must be a policy, got .*ModuleWrapPolicy"),
        ("transformer", r"auto_wrap_policy must be a policy, got 'transformer' \(str\)"),
        (
            transformer_auto_wrap_policy,
            r"missing a required argument: 'transformer_layer_cls'.*par",
        ),
        (lambda module: True, r"does not take that .*CustomPolicy\(function\)"),
        (lambda m, recurse, nonwrapped_numel: True, r"missing a required argument: 'm'"),
    ],
)
def test_what_is_no_policy_is_refused_with_one(policy: object, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        wrapped_by_us(Model(), policy)


@pytest.mark.parametrize("answer", ["yes", None, 1, [Block]])
@pytest.mark.parametrize("of", [our_wrap, torch_wrap], ids=["ours", "torch's"])
def test_another_answer_of_a_custom_policys_function_is_refused_with_the_name(
    of: Any, answer: Any
) -> None:
    policy = of.CustomPolicy(lambda module: answer if isinstance(module, nn.LayerNorm) else False)

    with pytest.raises(ValueError, match=r"returned .* for blocks\.0\.norm \(LayerNorm\)\. Exp"):
        wrapped_by_us(Model(), policy)


def test_an_exception_in_a_policy_says_about_which_module_it_was_asked() -> None:
    model = Model()

    def fails(module: nn.Module) -> bool:
        if module is model.branches["left"]:
            raise KeyError("oops")
        return isinstance(module, Block)

    with pytest.raises(KeyError, match="oops") as caught:
        wrapped_by_us(model, CustomPolicy(fails))

    assert caught.value.__notes__ == ["auto_wrap_policy was asked about branches.left (Block)."]
    assert wrapped(model) == {}


def test_an_exception_of_the_wrapper_says_which_module_was_wrapped_and_how() -> None:
    def takes_no_arguments(module: nn.Module, overrides: dict[str, Any]) -> nn.Module:
        raise TypeError(f"unexpected {list(overrides)}")

    policy = CustomPolicy(lambda module: {"sharding": 1} if isinstance(module, Block) else False)

    with pytest.raises(TypeError, match="unexpected") as caught:
        auto_wrap(Model(), policy, takes_no_arguments, set(), set(), lambda _: False)

    assert caught.value.__notes__ == [
        "auto_wrap_policy wrapped blocks.0 (Block) with {'sharding': 1}."
    ]


@pytest.mark.parametrize("classes", [Block, "Block", None, {"Block"}, [Block()]])
def test_what_are_no_classes_is_refused(classes: Any) -> None:
    with pytest.raises(TypeError, match=r"module_classes .*module classes, got"):
        ModuleWrapPolicy(classes)
    with pytest.raises(TypeError, match=r"transformer_layer_cls .*module classes, got"):
        transformer_auto_wrap_policy(Block(), False, 0, classes)
    if classes is not None:
        with pytest.raises(TypeError, match=r"exclude_wrap_modules .*module classes, got"):
            size_based_auto_wrap_policy(Block(), False, 10**9, exclude_wrap_modules=classes)


@pytest.mark.parametrize("function", [None, {Block}, Block])
def test_a_custom_policy_of_no_function_is_refused(function: Any) -> None:
    with pytest.raises(TypeError, match="lambda_fn must be a function of a module, got"):
        CustomPolicy(function)


def test_torchs_custom_policy_is_refused_where_torch_names_its_function_otherwise() -> None:
    policy = torch_wrap.CustomPolicy(lambda module: True)
    del policy._lambda_fn

    assert torch_internals.function_of_policy(policy) is None
    with pytest.raises(TypeError, match=r"must be a policy, got .*CustomPolicy"):
        wrapped_by_us(Model(), policy)


# --- names and signatures


def test_the_names_are_torchs() -> None:
    assert set(our_wrap.__all__) == set(torch_wrap.__all__)


def parameters_of(function: Callable[..., Any]) -> list[tuple[str, str, object]]:
    return [
        (each.name, each.kind.name, each.default)
        for each in inspect.signature(function).parameters.values()
    ]


@pytest.mark.parametrize("name", [*torch_wrap.__all__, "_or_policy"])
def test_all_take_what_torchs_take(name: str) -> None:
    ours, theirs = getattr(our_wrap, name), getattr(torch_wrap, name)

    assert parameters_of(ours) == parameters_of(theirs)


def test_a_policy_of_classes_can_be_asked_as_torchs() -> None:
    ours, theirs = ModuleWrapPolicy({Block}), torch_wrap.ModuleWrapPolicy({Block})

    for module in (Block(), nn.Linear(2, 2)):
        for recurse in (True, False):
            assert ours(module, recurse, 7) == theirs(module, recurse, 7)


def test_what_the_size_policy_spares_is_an_attribute_and_torchs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ours, theirs = (vars(of.size_based_auto_wrap_policy) for of in (our_wrap, torch_wrap))

    assert ours == theirs

    monkeypatch.setitem(ours, "EXCLUDE_WRAP_MODULES", {Block})
    monkeypatch.setitem(ours, "FORCE_LEAF_MODULES", {nn.Linear})

    assert not size_based_auto_wrap_policy(Block(), False, 10**9)
    assert not size_based_auto_wrap_policy(nn.Linear(2, 2), True, 10**9)
    assert size_based_auto_wrap_policy(nn.MultiheadAttention(2, 1), True, 10**9)


# --- by hand


def test_wrap_wraps_only_inside_enable_wrap() -> None:
    module = nn.Linear(2, 2)

    outside = wrap(module, width=3)
    with enable_wrap(wrapper_cls=Wrapper, depth=1):
        inside = wrap(module)
    after = wrap(module)

    assert outside is after is module
    assert isinstance(inside, Wrapper)
    assert inside.inside is module
    assert inside.kwargs == {"depth": 1}


def test_arguments_of_wrap_come_before_those_of_enable_wrap() -> None:
    with enable_wrap(wrapper_cls=Wrapper, depth=1, width=2):
        found = wrap(nn.Linear(2, 2), width=3)

    assert isinstance(found, Wrapper)
    assert found.kwargs == {"depth": 1, "width": 3}


def test_the_innermost_enable_wrap_holds_until_it_ends_also_with_an_exception() -> None:
    def arguments() -> object:
        return getattr(wrap(nn.Linear(2, 2)), "kwargs", "not wrapped")

    with enable_wrap(wrapper_cls=Wrapper, outer=True):
        with enable_wrap(wrapper_cls=Wrapper, inner=True):
            within = arguments()
        between = arguments()
        with pytest.raises(KeyError), enable_wrap(wrapper_cls=Wrapper, failing=True):
            raise KeyError
        after_exception = arguments()

    assert within == {"inner": True}
    assert between == after_exception == {"outer": True}
    assert arguments() == "not wrapped"


def test_enable_wrap_of_no_class_is_refused() -> None:
    with (
        pytest.raises(TypeError, match="wrapper_cls must be a class that wraps a module, got None"),
        enable_wrap(wrapper_cls=None),
    ):
        pass

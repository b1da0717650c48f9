"""Precision: names in, dtypes out."""

from __future__ import annotations

import pytest
import torch

from trine.core import Precision


@pytest.mark.parametrize("name", ["bf16", "BF16", "Bf16"])
def test_a_precision_is_found_by_name_in_any_case(name: str) -> None:
    assert Precision.parse(name) is Precision.BF16


@pytest.mark.parametrize("member", list(Precision))
def test_a_member_its_value_and_its_printed_form_all_parse_to_itself(member: Precision) -> None:
    assert Precision.parse(member) is member
    assert Precision.parse(member.value) is member
    assert Precision.parse(str(member)) is member
    assert f"{member}" == member.value


def test_an_unknown_name_is_refused_with_the_names_there_are() -> None:
    with pytest.raises(ValueError, match="Unknown precision 'fp12'") as caught:
        Precision.parse("fp12")

    for member in Precision:
        assert member.value in str(caught.value)


def test_something_that_is_no_name_is_refused_the_same_way() -> None:
    with pytest.raises(ValueError, match="Unknown precision None"):
        Precision.parse(None)  # type: ignore[arg-type]  # the mistake under test


@pytest.mark.parametrize(
    ("name", "compute", "reduce"),
    [
        ("fp32", torch.float32, torch.float32),
        ("amp_fp16", torch.float16, torch.float32),
        ("amp_bf16", torch.bfloat16, torch.float32),
        ("fp16", torch.float16, torch.float16),
        ("bf16", torch.bfloat16, torch.bfloat16),
        ("amp_fp8", torch.bfloat16, torch.float32),
    ],
)
def test_each_precision_computes_and_reduces_in_its_dtypes(
    name: str, compute: torch.dtype, reduce: torch.dtype
) -> None:
    precision = Precision.parse(name)

    assert precision.compute_dtype is compute
    assert precision.reduce_dtype is reduce


@pytest.mark.parametrize("name", ["amp", "AMP", " amp "])
def test_amp_alone_means_what_it_meant_when_there_was_one(name: str) -> None:
    assert Precision(name) is Precision.AMP_FP16
    assert Precision.__members__["AMP"] is Precision.AMP_FP16


def test_the_old_name_is_not_a_further_member() -> None:
    assert len(list(Precision)) == 6


@pytest.mark.parametrize("member", list(Precision))
def test_amp_keeps_parameters_in_fp32_and_the_plain_ones_in_their_own(member: Precision) -> None:
    plain = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}

    assert member.param_dtype is plain.get(member.value, torch.float32)
    assert member.is_amp == (member.value not in plain)


@pytest.mark.parametrize(
    ("name", "param", "reduce"),
    [
        ("fp32", None, None),
        ("amp_fp16", torch.float16, torch.float32),
        ("amp_bf16", torch.bfloat16, torch.float32),
        ("fp16", torch.float16, torch.float16),
        ("bf16", torch.bfloat16, torch.bfloat16),
        ("amp_fp8", torch.bfloat16, torch.float32),
    ],
)
def test_the_policy_of_a_precision_suits_torchs_own_fsdp(
    name: str, param: torch.dtype | None, reduce: torch.dtype | None
) -> None:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    policy = MixedPrecisionPolicy(**Precision(name).fsdp_policy_args())

    assert (policy.param_dtype, policy.reduce_dtype) == (param, reduce)
    assert policy.output_dtype is None

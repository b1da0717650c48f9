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

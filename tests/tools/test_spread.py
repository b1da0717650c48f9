"""Medians and how sure they are."""

from __future__ import annotations

import random
import statistics

import pytest
import torch

from trine.tools.analysis.spread import Spread


def test_the_median_and_the_deviation_ignore_an_outlier() -> None:
    spread = Spread.of([10, 12, 11, 9, 5_000])

    assert spread == Spread(median=11, mad=1, count=5)


def test_tensors_are_taken_as_lists_are() -> None:
    assert Spread.of(torch.tensor([4, 6])) == Spread.of([4, 6]) == Spread(5, 1, 2)


def test_nothing_has_no_error() -> None:
    assert Spread.of([]) == Spread(0, 0, 0)
    assert Spread.of([]).error == 0


def test_the_error_is_how_far_medians_of_such_samples_scatter() -> None:
    chance = random.Random(1)
    samples = [[chance.gauss(100, 10) for _ in range(101)] for _ in range(2_000)]

    scatter = statistics.pstdev(statistics.median(sample) for sample in samples)

    # 10 * sqrt(pi / 2 / 101) = 1.25; 2,000 samples tell it within 2 %.
    assert scatter == pytest.approx(1.247, rel=0.05)
    errors = [Spread.of(sample).error for sample in samples]
    assert statistics.fmean(errors) == pytest.approx(scatter, rel=0.05)

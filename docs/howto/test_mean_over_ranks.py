"""The example of the how-to guide: a collective, tested on three ranks."""

import torch
import torch.distributed as dist

from trine.distributed.testing import run_on_ranks


def mean_over_ranks(values: list[float]) -> float:
    """The mean of what every rank put in; `values` has one number per rank."""
    mine = torch.tensor(values[dist.get_rank()])
    dist.all_reduce(mine)
    return mine.item() / dist.get_world_size()


def test_every_rank_gets_the_mean() -> None:
    values = [1.0, 2.0, 6.0]

    results = run_on_ranks(mean_over_ranks, 3, values)

    assert results == [3.0, 3.0, 3.0]

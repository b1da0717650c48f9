"""What the tests of trine-distributed share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from trine.distributed import testing


@pytest.fixture
def run_on_ranks() -> Callable[..., list[Any]]:
    """Run a body on several ranks; see `trine.distributed.testing.run_on_ranks`."""
    return testing.run_on_ranks

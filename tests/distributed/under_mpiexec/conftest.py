"""These tests are run by every rank of a job, and do nothing elsewhere."""

from __future__ import annotations

from tests.matrix.mpi_job import in_step, job, pytest_configure, pytest_runtest_logreport

__all__ = ["in_step", "job", "pytest_configure", "pytest_runtest_logreport"]

"""Tracing and profiling."""

"""FSDP engine."""

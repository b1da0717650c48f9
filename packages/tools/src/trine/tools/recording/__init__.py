"""Choose what to record of a run, and have every rank record it.

Importing this package imports none of its parts: the command must not wait for torch.
"""

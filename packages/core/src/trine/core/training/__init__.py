"""Loops that drive a handler: training with validation, and evaluation."""

from trine.core.training.evaluator import Evaluator
from trine.core.training.trainer import Trainer

__all__ = ["Evaluator", "Trainer"]

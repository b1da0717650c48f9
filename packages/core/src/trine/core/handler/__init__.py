"""What a training step is, and when runtimes are called; free of any loop."""

from trine.core.handler.base import BaseHandler
from trine.core.handler.block_logic import CodeBlockLogic
from trine.core.handler.closure_logic import ClosureLogic
from trine.core.handler.code_block import CodeBlock, forward, update_parameters
from trine.core.handler.handler import Handler
from trine.core.handler.logic import BaseLogic, Logic

# The name in pytorch-pfn-extras.
ClousureLogic = ClosureLogic  # codespell:ignore clousure

__all__ = [
    "BaseHandler",
    "BaseLogic",
    "ClosureLogic",
    "CodeBlock",
    "CodeBlockLogic",
    "Handler",
    "Logic",
    "forward",
    "update_parameters",
]

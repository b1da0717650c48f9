"""The second front door of the engine: a module that wraps a module."""

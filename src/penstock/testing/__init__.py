"""Checks that a handler, a source or a sink of your own keeps its contract. Run them in your tests: they raise
AssertionError."""

from penstock.testing.handlers import check_handler
from penstock.testing.sinks import check_sink
from penstock.testing.sources import check_source

__all__ = ["check_handler", "check_sink", "check_source"]

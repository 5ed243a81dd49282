"""Checks that a handler, a source, a sink or an engine of your own keeps its contract. Run them in your tests: they raise
AssertionError."""

from penstock.testing.engines import check_engine
from penstock.testing.handlers import check_handler
from penstock.testing.sinks import check_sink
from penstock.testing.sources import check_source

__all__ = ["check_engine", "check_handler", "check_sink", "check_source"]

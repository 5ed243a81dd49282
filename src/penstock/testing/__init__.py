"""Checks that a handler, a source, a sink or an engine of your own keeps its contract: in your tests, they raise
AssertionError. And a model that fails as you say."""

from penstock.testing.engines import check_engine
from penstock.testing.faults import FaultyModelHandler
from penstock.testing.handlers import check_handler
from penstock.testing.sinks import check_sink
from penstock.testing.sources import check_source

__all__ = ["FaultyModelHandler", "check_engine", "check_handler", "check_sink", "check_source"]

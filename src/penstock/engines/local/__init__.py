"""The embedded engine: one machine, in the user's process or over worker processes."""

from penstock.engines.local.engine import LocalEngine

__all__ = ["LocalEngine"]

"""The places to run a pipeline. They share the run, the steps of a bundle, and the inference session."""

from penstock.engines.local import LocalEngine

__all__ = ["LocalEngine"]

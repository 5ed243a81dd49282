"""Runs pipelines on a Ray cluster: bundles run in actors, whatever node Ray puts them on."""

from penstock.engines.ray.engine import RayEngine

__all__ = ["RayEngine"]

"""What Beam's RunInference puts before the names of its metrics.

a model that changes     <name of the version>_num_inferences, and so on
a model for each key     num_inferences of all, and <first key>-_num_inferences of each;
                         when it has changed, <first key>-<id of the version>-_num_inferences
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeAlias

from penstock.beam.versions import VersionNames
from penstock.inference.spec import InferenceSpec
from penstock.models.place import Surroundings
from penstock.observe.metrics import Distribution, MetricKey, Metrics
from penstock.observe.refreshes import METRICS

INFERENCES = "num_inferences"
OF_STEP = frozenset(METRICS.values())  # count versions, and are of none
Rows: TypeAlias = Mapping[tuple[str, str | None], int]  # that were answered, by the name and the id of the model
Naming: TypeAlias = Callable[[Metrics, Rows], Metrics]


def naming_of(spec: InferenceSpec, step: str, around: Surroundings, handler: Any) -> Naming | None:
    """How the metrics of a step's bundles are called; None: just as they are. handler: asked for override_metrics()."""
    overrides = getattr(handler, "override_metrics", None)
    if overrides is not None and overrides(spec.metrics_namespace):
        return lambda metrics, rows: Metrics()
    if not spec.counts_models:
        return None
    versions = VersionNames(spec, step, around)
    return partial(_of_each_model if spec.by_key is not None else _of_versions, versions)


def _of_versions(versions: VersionNames, metrics: Metrics, rows: Rows) -> Metrics:
    """Rows count for the version that has answered them; all else of a bundle for the one that has answered most."""
    versions.look()
    most = max(rows, key=rows.__getitem__) if rows else None
    name = versions.newest("") if most is None else versions.of(*most)
    made = Metrics({}, {_prefixed(key, name): seen for key, seen in metrics.distributions.items()})
    for key, count in metrics.counters.items():
        if key.name != INFERENCES:
            made.count(key if key.name in OF_STEP else _prefixed(key, name), count)
            continue
        for model, answered in rows.items():
            made.count(_prefixed(key, versions.of(*model)), answered)
    return made


def _of_each_model(versions: VersionNames, metrics: Metrics, rows: Rows) -> Metrics:
    """All models together as always; and beside it, of each, its rows and its loads."""
    versions.look()
    made = Metrics(dict(metrics.counters), dict(metrics.distributions))
    for key in metrics.counters:
        if key.name == INFERENCES:
            for (model, model_id), count in rows.items():
                made.count(_prefixed(key, _cohort(model, versions.of(model, model_id))), count)
    for key, use in metrics.models.items():
        if use.loads:
            of_model = _cohort(key.name, versions.newest(key.name))
            for name, value in [
                ("load_model_latency_milli_secs", use.seconds / use.loads * 1e3),
                ("model_byte_size", use.bytes),
            ]:
                seen = made.distributions.setdefault(_prefixed(key._replace(name=name), of_model), Distribution())
                seen.record(value, use.loads)
    return made


def _cohort(model: str, version: str) -> str:
    return f"{model}-{version}-" if version else f"{model}-"


def _prefixed(key: MetricKey, prefix: str) -> MetricKey:
    return key._replace(name=f"{prefix}_{key.name}") if prefix else key

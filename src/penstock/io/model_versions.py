"""Where new versions of models come from while a pipeline runs: what is said of one, and what is asked for them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, TypeAlias, TypeVar, runtime_checkable

from penstock.errors import UsageError
from penstock.io.files import without_secrets
from penstock.pipeline.graph import MAIN, PCollection, PTransform
from penstock.pipeline.traits import Traits

if TYPE_CHECKING:
    from penstock.pipeline.pipeline import Pipeline

KeyT = TypeVar("KeyT")

INTERVAL = 10.0  # seconds between two looks, where nobody says
SHORTEST = 0.2


class ModelMetadata(NamedTuple):
    """A version of a model. `model_id` is the path or the name that it is loaded from, and what its answers are marked
    with; `model_name` is for people."""

    model_id: str
    model_name: str = ""


@dataclass(frozen=True)
class KeyModelPathMapping(Generic[KeyT]):
    """A version of the model that these keys have, of a handler with a model for each key."""

    keys: Sequence[KeyT]
    update_path: str
    model_id: str = ""  # what its answers are marked with; empty: the path


NewVersion: TypeAlias = ModelMetadata | KeyModelPathMapping[Any]


@runtime_checkable
class ModelSource(Protocol):
    """A place that versions of models appear in: a folder, a registry. Used by one thread, in the user's process."""

    def look(self) -> Sequence[NewVersion]:
        """What is new since the last look, the newest last; at the first look, what is there. A place that cannot be
        reached for a while has nothing new; it raises UsageError for what will never work."""

    def describe(self) -> str:
        """For people: what is watched."""


class WatchModels(PTransform["Pipeline", PCollection[NewVersion]]):
    """New versions of a model, as they appear: a row for each. For RunInference(model_metadata_pcoll=...), and for nothing
    else: it ends with the run that uses it."""

    def __init__(self, source: ModelSource, interval: float = INTERVAL, stop_timestamp: float | None = None) -> None:
        """interval: seconds between two looks; less than 0.2 counts as 0.2. stop_timestamp: from then on, as of
        time.time(), nothing is new."""
        if not isinstance(source, ModelSource):
            raise UsageError(f"WatchModels({source!r}): expected an object with look() and describe(), such as FilePattern")
        self.source = source
        self.interval = checked_interval(interval)
        self.stop_timestamp = None if stop_timestamp is None else float(stop_timestamp)

    def expand(self, pcoll: Pipeline) -> PCollection[NewVersion]:
        return pcoll.add(self, ()).outputs[MAIN]

    def traits(self) -> Traits:
        return Traits(watches=self)


def checked_interval(interval: float) -> float:
    """Seconds between two looks: what is less than the shortest counts as that. Raises UsageError for what is no such
    number."""
    if isinstance(interval, bool) or not isinstance(interval, (int, float)) or not 0 < interval < math.inf:
        raise UsageError(f"interval={interval!r}: expected seconds, more than 0")
    return max(SHORTEST, float(interval))


def versions_of(rows: Sequence[Any], step: str) -> Iterator[tuple[Sequence[Any] | None, str, str]]:
    """The keys, the path and the id of each version; those of Beam have the same names."""
    for row in rows:
        for each in row if isinstance(row, list) else [row]:
            if isinstance(each, KeyModelPathMapping) or (hasattr(each, "keys") and hasattr(each, "update_path")):
                yield list(each.keys), str(each.update_path), without_secrets(str(each.model_id or each.update_path))
            elif isinstance(each, ModelMetadata) or (hasattr(each, "model_id") and hasattr(each, "model_name")):
                yield None, str(each.model_id), without_secrets(str(each.model_id))
            else:
                raise UsageError(
                    f"step {step!r}: model_metadata_pcoll gave a {type(each).__name__}; expected ModelMetadata(model_id, "
                    "model_name), or KeyModelPathMapping(keys, update_path, model_id) where there is a model for each key"
                )

"""New versions of models, which come by a side input of Beam's."""

from __future__ import annotations

from typing import Any

from penstock.inference.spec import InferenceSpec
from penstock.io.file_pattern import stamp_of
from penstock.io.model_versions import versions_of
from penstock.models.place import Surroundings
from penstock.models.version_files import VersionFiles


def announce(versions: Any, spec: InferenceSpec, step: str, around: Surroundings) -> None:
    """To whoever holds the model on this machine; all processes that see a version do, and the first one counts."""
    files = VersionFiles(spec.folder(around), spec.session_key(step))
    for keys, path, model_id in versions_of(versions if isinstance(versions, list) else [versions], step):
        if path:  # Beam's WatchFilePattern gives an empty one before there is any
            names = [""] if spec.by_key is None or keys is None else spec.by_key.models_of(keys)
            for name in names:
                files.announce(name, path, model_id, stamp_of(path))

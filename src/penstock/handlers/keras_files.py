"""What a .keras file may hold that is loaded without trust: Keras' own layers and functions, and what the user registered.

Keras' safe mode is on as well. That alone is not enough: it has let functions and classes of Keras' API be called with what
the file says, and layers load programs from other files.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO

from penstock.errors import InputError, UsageError

# Layers that are, or load, a program.
_PROGRAMS = {"Lambda", "__lambda__", "TFSMLayer", "TorchModuleWrapper", "JaxLayer", "FlaxLayer"}
# Of Keras' modules, those with parts of models. Others read and write files, or change how models are loaded.
_PARTS = {
    *("activations", "constraints", "dtype_policies", "initializers", "layers", "losses", "metrics", "models", "ops"),
    *("optimizers", "quantizers", "random", "regularizers", "src"),
}


def check_keras_file(path: str, file: BinaryIO) -> None:
    """UsageError for a file that can run code when it is loaded or called, InputError for one that is no .keras file."""
    try:
        with zipfile.ZipFile(file) as archive:
            config = json.loads(archive.read("config.json"))
    except (zipfile.BadZipFile, KeyError, ValueError) as exc:
        raise InputError(
            f"{path!r} could not be loaded as a model: {type(exc).__name__}: {exc}; expected a .keras file, which "
            "model.save('model.keras') of Keras 3 writes: check the path"
        ) from exc
    found = sorted(set(_programs_in(config)))
    if found:
        raise untrusted(path, f"it holds {', '.join(found)}")


def untrusted(path: str, what: object) -> UsageError:
    return UsageError(
        f"{path!r} can run code when it is loaded or called: {what}; pass trusted=True if you made it or trust who did, or "
        "give the weights alone, with ModelType.SAVED_WEIGHTS and create_model_fn="
    )


def _programs_in(config: Any, key: str = "") -> Iterator[str]:
    if isinstance(config, list):
        for part in config:
            yield from _programs_in(part, key)
    elif isinstance(config, Mapping):
        module, _, rest = str(config.get("module") or "").partition(".")
        if "class_name" in config and module == "keras" and rest and rest.partition(".")[0] not in _PARTS:
            named = config["config"] if config["class_name"] == "function" else config["class_name"]
            yield f"keras.{rest}.{named}"
        for name, part in config.items():
            yield from _programs_in(part, name)
    elif isinstance(config, str) and key != "name" and config.rpartition(".")[2] in _PROGRAMS:
        yield {"__lambda__": "a lambda function", "Lambda": "a Lambda layer"}.get(config, config)

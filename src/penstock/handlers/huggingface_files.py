"""The small files of a model that say how its inputs are made: in a folder, or in the Hugging Face cache or hub.

Nothing here imports torch or transformers: it runs where rows are prepared.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from penstock.errors import InputError, PenstockError


@dataclass(frozen=True)
class ModelFiles:
    """Files of a model by their names in it. A file that the model does not have is None; one that cannot be had is an
    error, so that no model is read without a part of it."""

    place: str  # a folder, or a name in the hub
    hub: Mapping[str, Any] = field(default_factory=dict)  # arguments of hf_hub_download()
    subfolder: str = ""

    def path(self, name: str) -> str | None:
        """Where a file is on this machine, fetched from the hub if it has to be; None: the model has no such file. Raises
        what the hub's client raises when it cannot be fetched."""
        if os.path.isdir(self.place):
            path = os.path.join(self.place, self.subfolder, name)
            return path if os.path.isfile(path) else None
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import EntryNotFoundError, HFValidationError

        try:
            return str(hf_hub_download(self.place, name, subfolder=self.subfolder or None, **self.hub))
        except (EntryNotFoundError, HFValidationError):
            return None

    def json(self, name: str) -> Any:
        """What a file holds."""
        path = self.path(name)
        if path is None:
            return None
        with open(path, encoding="utf-8") as file:
            return json.load(file)

    def below(self, subfolder: str) -> ModelFiles:
        """The files of a folder inside of this one."""
        return ModelFiles(self.place, self.hub, os.path.join(self.subfolder, subfolder) if subfolder else self.subfolder)


def check_place(model: str) -> None:
    """InputError for the path of a folder that is not there."""
    if (os.path.isabs(model) or model.startswith((".", "~"))) and not os.path.isdir(model):
        raise InputError(
            f"model folder {model!r} does not exist; expected a folder with a config.json that the process that loads "
            "the model can read: check the spelling, or give an absolute path"
        )


@contextlib.contextmanager
def reading(what: str) -> Iterator[None]:
    """Errors of the libraries that read a model become InputError, but for too little memory."""
    try:
        yield
    except PenstockError:
        raise
    except (OSError, ValueError, RuntimeError, KeyError, ImportError) as exc:
        if type(exc).__name__ == "OutOfMemoryError":
            raise
        raise InputError(
            f"{what} could not be loaded: {type(exc).__name__}: {exc}\n  expected a folder that the process that loads the "
            "model can read, or a name in the Hugging Face cache or hub; check the spelling, and that it fits its task"
        ) from exc


@contextlib.contextmanager
def loading(what: str) -> Iterator[None]:
    """reading(), by transformers and without its progress bars."""
    from transformers.utils import logging

    bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        with reading(what):
            yield
    finally:
        if bars:
            logging.enable_progress_bar()

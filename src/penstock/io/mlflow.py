"""A registered model of MLflow, as a source of new versions: the one that an alias points to."""

from __future__ import annotations

import atexit
import importlib.util
import os
import shutil
import tempfile
from collections.abc import Sequence
from typing import Any
from urllib.parse import quote, urlsplit

from penstock.errors import MissingPackageError, UsageError
from penstock.io.files import open_cause, without_secrets
from penstock.io.model_versions import ModelMetadata, NewVersion
from penstock.io.outages import Outage
from penstock.rows import safe_str


class MlflowModel:
    """The version of a registered model that an alias points to. It is new when the alias is moved, also back.

    What the version holds is downloaded, unless it lies on a local disk, and model_id is the local path; model_name is
    "name/version". Until there is such an alias, nothing is new. A version whose download fails is tried again at the next
    look.
    """

    def __init__(
        self,
        name: str,
        alias: str = "champion",
        *,
        artifact_path: str | None = None,
        dst_path: str | os.PathLike[str] | None = None,
        tracking_uri: str | None = None,
    ) -> None:
        """artifact_path: the file or folder in the version that is the model; None: all of it. dst_path: a folder for
        downloads, where nothing is removed; None: one of this process, removed at its end.
        tracking_uri: None for what MLflow is set to by itself."""
        if importlib.util.find_spec("mlflow") is None:
            raise MissingPackageError("mlflow", "mlflow")
        self._name, self._alias = _checked("name", name), _checked("alias", alias)
        self._artifact_path = None if artifact_path is None else _checked_inside(artifact_path)
        self._tracking_uri = tracking_uri
        self._folder = None if dst_path is None else os.path.abspath(os.path.expanduser(os.fspath(dst_path)))
        self._client: Any = None
        self._last: str | None = None  # the version that was given last
        self._outage = Outage(self.describe())

    def describe(self) -> str:
        """The model, its alias and the registry, without passwords or keys."""
        at = "" if self._tracking_uri is None else f" at {without_secrets(self._tracking_uri)}"
        return f"models:/{self._name}@{self._alias}{at}"

    def look(self) -> Sequence[NewVersion]:
        """The version that the alias names now, downloaded, if it is another than at the last look. A registry that cannot
        be reached has nothing new, and is logged; UsageError for what will never work."""
        try:
            version = self._current()
            path = None if version == self._last else self._local_path(version)
        except (ImportError, UsageError) as exc:
            told = without_secrets(f"{self.describe()}: {safe_str(exc)}")
            raise UsageError(f"{told}; correct it, or install what the registry needs") from open_cause(exc)
        except Exception as exc:  # MLflow passes on those of its database, its server and its store of artifacts
            self._outage.report(safe_str(exc) if isinstance(exc, LookupError) else f"{type(exc).__name__}: {safe_str(exc)}")
            return []
        self._outage.report("")
        if path is None:
            return []
        self._last = version
        return [ModelMetadata(path, f"{self._name}/{version}")]

    def _current(self) -> str:
        """The version that the alias points to. Raises LookupError while there is none, UsageError for wrong names."""
        from mlflow import MlflowClient
        from mlflow.exceptions import MlflowException

        try:
            if self._client is None:
                self._client = MlflowClient(tracking_uri=self._tracking_uri)
            found = self._client.get_model_version_by_alias(self._name, self._alias)
        except MlflowException as exc:
            is_wrong = exc.error_code == "INVALID_PARAMETER_VALUE"
            if exc.error_code == "RESOURCE_DOES_NOT_EXIST" or (is_wrong and "not found" in str(exc)):
                raise LookupError(f"there is no such model or alias yet ({exc})") from exc
            raise (UsageError(str(exc)) if is_wrong else exc) from exc.__cause__
        if found.status != "READY":
            raise LookupError(f"version {found.version} is not ready: {found.status}")
        return str(found.version)

    def _local_path(self, version: str) -> str:
        uri = self._client.get_model_version_download_uri(self._name, version)
        if self._artifact_path is not None:
            uri = f"{uri.rstrip('/')}/{self._artifact_path}"
        if urlsplit(uri).scheme in ("", "file"):
            return os.path.abspath(self._download(uri, None))
        folder = self._downloads()
        target = os.path.join(folder, "@".join(quote(part, safe="") for part in self._parts(version)))
        if not os.path.exists(target):
            part = tempfile.mkdtemp(prefix=".part-", dir=folder)
            try:
                self._download(uri, part)
                os.rename(part, target)  # so that what has the name is whole
            finally:
                shutil.rmtree(part, ignore_errors=True)
        (entry,) = os.listdir(target)
        return os.path.join(target, entry)

    def _parts(self, version: str) -> list[str]:
        return [self._name, version, *([] if self._artifact_path is None else [self._artifact_path])]

    def _download(self, uri: str, folder: str | None) -> str:
        from mlflow.artifacts import download_artifacts

        return str(download_artifacts(artifact_uri=uri, dst_path=folder, tracking_uri=self._tracking_uri))

    def _downloads(self) -> str:
        if self._folder is None:
            self._folder = folder_of_process("penstock-mlflow-")
        os.makedirs(self._folder, exist_ok=True)
        return self._folder


def folder_of_process(prefix: str) -> str:
    """A new folder that is removed when this process ends; a child that it forks leaves it alone."""
    folder = tempfile.mkdtemp(prefix=prefix)
    atexit.register(_remove, folder, os.getpid())
    return folder


def _remove(folder: str, pid: int) -> None:
    if os.getpid() == pid:
        shutil.rmtree(folder, ignore_errors=True)


def _checked(what: str, given: object) -> str:
    if not isinstance(given, str) or not given:
        raise UsageError(f"MlflowModel({what}={given!r}): expected a text, such as 'champion' for an alias")
    return given


def _checked_inside(path: object) -> str:
    if not isinstance(path, str) or not path or path.startswith("/") or ".." in path.split("/"):
        raise UsageError(f"MlflowModel(artifact_path={path!r}): expected a path inside the version, such as 'model.skops'")
    return path.rstrip("/")

"""Loading scikit-learn models from files, without running code from them unless the caller trusts the file."""

from __future__ import annotations

import contextlib
import enum
import importlib.util
import pickle
import pkgutil
import sys
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

from penstock.errors import InputError, MissingPackageError, UsageError
from penstock.handlers.catalog import SKOPS, check_needs, imported
from penstock.handlers.model_files import open_model_file
from penstock.io.files import hiding_secrets, without_secrets

Trust: TypeAlias = bool | Sequence[str]  # True: to run any code; of a skops file also the types that it may hold


class ModelFileType(enum.Enum):
    """How a model was saved."""

    SKOPS = "skops"
    PICKLE = "pickle"
    JOBLIB = "joblib"


NAMES = {ModelFileType.JOBLIB: (".joblib",), ModelFileType.PICKLE: (".pkl", ".pickle"), ModelFileType.SKOPS: (".skops",)}


def check_trust(uri: str, file_type: object, trusted: Trust) -> None:
    """UsageError when a file of this type may not be loaded without trust. Called when a handler is made."""
    if not isinstance(file_type, ModelFileType):
        expected = ", ".join(str(each) for each in ModelFileType)
        raise UsageError(f"model_file_type={file_type!r}: expected one of {expected}")
    if not isinstance(trusted, bool) and (isinstance(trusted, str) or not all(isinstance(each, str) for each in trusted)):
        raise UsageError(f"trusted={trusted!r}: expected True, False, or a list of types, such as ['numpy.dtype']")
    if file_type is not ModelFileType.SKOPS and trusted is not True:
        raise UsageError(
            f"{without_secrets(str(uri))!r} is a {file_type.value} file, and loading it can run any code that is in it; "
            "pass trusted=True if you made the file or trust who did, or save the model with skops.io.dump(model, path) and "
            "load it with ModelFileType.SKOPS"
        )


def load_estimator(uri: str, file_type: ModelFileType, trusted: Trust) -> Any:
    """The model in the file. Raises InputError when the file is missing or is not what its type says."""
    with hiding_secrets([uri]), open_model_file(uri) as file:
        try:
            if file_type is ModelFileType.SKOPS:
                return _load_skops(uri, file.read(), trusted)
            if file_type is ModelFileType.PICKLE:
                return pickle.load(file)
            return imported("joblib", "joblib", "sklearn").load(file)
        except (UsageError, MissingPackageError):
            raise
        except Exception as exc:
            named = next((kind for kind, names in NAMES.items() if str(uri).endswith(names)), file_type)
            hint = "the path and model_file_type" if named is file_type else f"the path, give model_file_type={named}"
            raise InputError(
                f"{str(uri)!r} could not be loaded as a {file_type.value} file: {type(exc).__name__}: {exc}; check {hint}, "
                "and see that the packages the model was made with are installed"
            ) from exc


def _load_skops(uri: str, content: bytes, trusted: Trust) -> Any:
    check_needs("sklearn", [SKOPS])
    with _without_adapters():
        import skops.io

    found = skops.io.get_untrusted_types(data=content)
    unknown = [name for name in found if trusted is not True and (trusted is False or name not in trusted)]
    if unknown:
        raise UsageError(
            f"{str(uri)!r} holds types that skops does not know to be safe: {', '.join(unknown)}; look at them, and "
            f"trust them alone with trusted={unknown}, or the whole file, if you made it or trust who did, with trusted=True"
        )
    return skops.io.loads(content, trusted=found)


@contextlib.contextmanager
def _without_adapters() -> Iterator[None]:
    """skops imports all packages of scikit-learn. Its adapters for torch, cupy and dask import these if they are installed,
    which takes as long as all the rest, and nothing uses them. Inside, they cannot be imported."""
    spec = importlib.util.find_spec("sklearn.externals")
    folders = [f"{folder}/array_api_compat" for folder in (spec and spec.submodule_search_locations) or ()]
    found = [each.name for each in pkgutil.iter_modules(folders) if each.ispkg and each.name not in ("common", "numpy")]
    hidden = {f"sklearn.externals.array_api_compat.{name}" for name in found} - sys.modules.keys()
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]  # None: Python's way to say that there is no such module
    try:
        yield
    finally:
        for name in hidden:
            sys.modules.pop(name, None)

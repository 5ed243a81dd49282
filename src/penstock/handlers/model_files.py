"""Opening model files, wherever fsspec can reach them."""

from __future__ import annotations

from os import PathLike, fspath
from typing import BinaryIO, cast

from penstock.errors import InputError
from penstock.io.files import store_of, without_secrets


def open_model_file(path: str | PathLike[str]) -> BinaryIO:
    """The file, open for reading and seeking; the caller closes it. InputError when it cannot be opened.

    Called in the process that loads the model: the path must be readable there, not where the pipeline was built.
    """
    shown = repr(without_secrets(str(path)))
    try:
        filesystem, inner_path = store_of(fspath(path), InputError)
        return cast(BinaryIO, filesystem.open(inner_path, "rb"))
    except FileNotFoundError as exc:
        raise InputError(
            f"model file {shown} does not exist; expected a file that the process that loads the model can read: "
            "check the spelling, or give an absolute path or a URL such as 's3://bucket/model'"
        ) from exc
    except IsADirectoryError as exc:
        raise InputError(f"model file {shown} is a directory; give the path of one file in it") from exc
    except PermissionError as exc:
        raise InputError(f"model file {shown} may not be read by this user; change its permissions: {exc}") from exc
    except InputError as exc:
        raise InputError(f"model file {exc}") from exc.__cause__

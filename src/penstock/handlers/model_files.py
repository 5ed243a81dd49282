"""Opening model files, wherever fsspec can reach them."""

from __future__ import annotations

from os import PathLike, fspath
from typing import BinaryIO, cast

from penstock.errors import InputError


def open_model_file(path: str | PathLike[str]) -> BinaryIO:
    """The file, open for reading and seeking; the caller closes it. InputError when it cannot be opened.

    Called in the process that loads the model: the path must be readable there, not where the pipeline was built.
    """
    import fsspec

    try:
        filesystem, inner_path = fsspec.core.url_to_fs(fspath(path))
        return cast(BinaryIO, filesystem.open(inner_path, "rb"))
    except FileNotFoundError as exc:
        raise InputError(
            f"model file {str(path)!r} does not exist; expected a file that the process that loads the model can read: "
            "check the spelling, or give an absolute path or a URL such as 's3://bucket/model'"
        ) from exc
    except IsADirectoryError as exc:
        raise InputError(f"model file {str(path)!r} is a directory; give the path of one file in it") from exc
    except PermissionError as exc:
        raise InputError(f"model file {str(path)!r} may not be read by this user; change its permissions: {exc}") from exc
    except (ImportError, ValueError) as exc:  # fsspec: a protocol it does not know, or whose package is missing
        raise InputError(f"model file {str(path)!r} cannot be opened: {exc}") from exc

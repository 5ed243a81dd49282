"""Checks of the settings of a model handler: each raises UsageError with what was given and what was expected."""

from __future__ import annotations

import difflib
import inspect
import operator
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any, SupportsIndex

from penstock.errors import UsageError

HANDLING = ("timeout", "use_subprocess")  # are of a step, and look as if they were of its model


def check_copies(copies: object) -> None:
    """UsageError unless it is a number of model copies."""
    if copies is not None and (not isinstance(copies, int) or isinstance(copies, bool) or copies < 1):
        raise UsageError(f"model_copies={copies!r}: expected a whole number of at least 1, or None")


def checked_path(model_path: object) -> str:
    """The path or name of a model, as text, or UsageError."""
    path = os.fspath(model_path) if isinstance(model_path, os.PathLike) else model_path
    if not isinstance(path, str) or not path:
        raise UsageError(f"update_model_path({model_path!r}): expected the path of a model, or its name")
    return path


def checked_bytes(size: object) -> int | None:
    """What model_bytes() gave, or UsageError."""
    if size is None:
        return None
    if isinstance(size, bool) or not isinstance(size, SupportsIndex) or operator.index(size) < 0:
        raise UsageError(f"model_bytes() returned {size!r}; expected a whole number of bytes, or None")
    return operator.index(size)


def checked_columns(columns: Any) -> str | tuple[str, ...] | None:
    """The names of columns, or UsageError."""
    names = [columns] if isinstance(columns, str) else columns
    if names is None:
        return None
    is_list = isinstance(names, Sequence) and names and all(isinstance(name, str) and name for name in names)
    if not is_list or len(set(names)) < len(names):
        raise UsageError(f"columns={columns!r}: expected the name of a column, or a list of different names")
    return columns if isinstance(columns, str) else tuple(names)


def columns_form(handler: Any) -> str | None:
    """How a handler takes columns: "arrow" or "numpy"; None: it takes rows. UsageError for anything else that it says."""
    form: object = handler.takes_columns()
    if form is None or isinstance(form, bool):
        return "arrow" if form else None
    if form not in ("arrow", "numpy"):
        what = f"{type(handler).__name__}.takes_columns() returned {form!r}"
        raise UsageError(f'{what}; expected True or "arrow" (a pyarrow.Table), "numpy" (a dict of NumPy arrays), or False')
    return str(form)


def check_output(column: object, prefix: object) -> None:
    """UsageError unless they name the columns of answers, in one way."""
    for name, given in [("output_column", column), ("output_prefix", prefix)]:
        if given is not None and (not isinstance(given, str) or not given):
            raise UsageError(f"{name}={given!r}: expected text")
    if column is not None and prefix is not None:
        raise UsageError("output_column= names one column, output_prefix= begins a name for each output; give one of them")


def checked_variables(variables: object) -> dict[str, str]:
    """Variables of the environment, or UsageError."""
    if variables is not None and not isinstance(variables, Mapping):
        raise UsageError(f'env_vars={variables!r}: expected a dict of text, such as {{"OMP_NUM_THREADS": "1"}}')
    for name, value in (variables or {}).items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise UsageError(f'env_vars={{{name!r}: {value!r}}}: expected text for both: {{"{name}": "{value}"}}')
    return dict(variables or {})


def check_function(method: str, fn: object) -> None:
    """UsageError unless it can be called; `method` says where it was given."""
    if not callable(fn):
        given = f"{method}{fn!r}" if method.endswith("=") else f"{method}({fn!r})"
        raise UsageError(f"{given}: expected a function of one row")


def refuse_arguments(handler: type, unknown: Mapping[str, Any]) -> None:
    """UsageError for arguments that a handler does not have, with those that may have been meant."""
    if not unknown:
        return
    makers = [base.__dict__["__init__"] for base in handler.__mro__ if "__init__" in base.__dict__ and base is not object]
    known = list(dict.fromkeys(name for make in makers for name in _arguments_of(make)))
    name = next(iter(unknown))
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]}?" if near else f"its arguments are {', '.join(known)}"
    if name in HANDLING:
        hint = f"it is one of RunInference(...).with_exception_handling({name}=...)"
    raise UsageError(f"{handler.__name__}({name}=...): there is no such argument; {hint}")


def _arguments_of(make: Any) -> list[str]:
    """The names that a constructor takes, with those of `**settings: Unpack[Settings]`."""
    found = []
    for name, each in inspect.signature(make).parameters.items():
        if each.kind is inspect.Parameter.KEYWORD_ONLY or (
            each.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD and name not in ("self", "settings")
        ):
            found.append(name)
        elif each.kind is inspect.Parameter.VAR_KEYWORD:
            named = re.search(r"Unpack\[(\w+)\]", str(each.annotation))
            found += getattr(make.__globals__.get(named[1]), "__annotations__", ()) if named else ()
    return found


# Who makes a model, by the package of its class: what to do with it.
MODELS = {
    "sklearn": "save it with skops.io.dump(model, 'model.skops') and use SklearnModelHandlerNumpy('model.skops') of "
    "penstock.handlers.sklearn",
    "torch": "save it and use PytorchModelHandlerTensor(...) of penstock.handlers.pytorch",
    "xgboost": "save it and use a handler of penstock.handlers.xgboost",
    "lightgbm": "save it and use a handler of penstock.handlers.lightgbm",
    "transformers": "use HuggingFacePipelineModelHandler(task, model) of penstock.handlers.huggingface",
    "sentence_transformers": "use SentenceTransformerModelHandler(model) of penstock.handlers.huggingface",
    "keras": "save it and use a handler of penstock.handlers.tensorflow",
    "onnxruntime": "use a handler of penstock.handlers.onnx with the path of the model",
}


def handler_for(thing: object) -> str:
    """What to do with something that is given instead of a handler."""
    if isinstance(thing, type):
        return f"call it: {thing.__name__}(...)"
    packages = [base.__module__.partition(".")[0] for base in type(thing).__mro__]
    found = next((MODELS[package] for package in packages if package in MODELS), None)
    if found is None and isinstance(thing, (str, os.PathLike)):
        found = "give the path to the handler for its kind of model (`penstock handlers` lists them)"
    return found or "subclass ps.ModelHandler"

"""Loading the model of a handler, and asking the handler how large it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from penstock.errors import ModelLoadError, PenstockError
from penstock.inference.handler import ModelHandler
from penstock.inference.handler_checks import checked_bytes
from penstock.models.loading import LoadedModel, load
from penstock.rows import let_through, safe_str

T = TypeVar("T")


def load_model_of(
    handler: ModelHandler[Any, Any, Any], step: str, variables: Mapping[str, str], *, one_of_many: bool = False
) -> LoadedModel:
    """Load it with these variables in the environment. ModelLoadError if the handler raises."""

    def load_model() -> Any:
        if set_variables := getattr(handler, "set_environment_vars", None):  # of Beam's
            asked(handler, step, "set_environment_vars", set_variables)
        return asked(handler, step, "load_model", handler.load_model)

    def model_bytes(model: Any) -> int | None:
        return checked_bytes(asked(handler, step, "model_bytes", lambda: handler.model_bytes(model)))

    return load(
        load_model,
        variables,
        model_files=handler.model_files,
        declared_bytes=model_bytes,
        beside=handler,
        one_of_many=one_of_many,
    )


def asked(handler: ModelHandler[Any, Any, Any], step: str, method: str, call: Callable[[], T]) -> T:
    """What a method of the handler that loads something gives. ModelLoadError if it raises."""
    try:
        return call()
    except PenstockError:
        raise
    except BaseException as exc:
        let_through(exc)
        what = f"{type(handler).__name__}.{method}() raised {type(exc).__name__}: {safe_str(exc)}"
        raise ModelLoadError(f"step {step!r}: {what}") from exc

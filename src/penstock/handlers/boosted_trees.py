"""What the handlers of boosted trees (XGBoost, LightGBM) share: model files, trust, and whether the features fit."""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from penstock.errors import BadRowsError, InputError, RowError, UsageError
from penstock.handlers.catalog import check_versions
from penstock.handlers.model_files import open_model_file
from penstock.handlers.tabular import InferenceArgs, OfFrames, TabularModelHandler
from penstock.inference.handler_settings import HandlerSettings
from penstock.io.files import hiding_secrets

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

ExampleT = TypeVar("ExampleT")

PICKLED = b"\x80"  # how pickles begin, those of joblib too


@dataclass(frozen=True)
class Features:
    """What a model takes."""

    count: int
    names: Sequence[str] | None  # None: it was trained without


class BoostedTreesHandler(TabularModelHandler[ExampleT]):
    """A model in a file of its framework's own format, which runs no code when it is loaded; or pickled, and trusted."""

    _family: ClassVar[str]  # its name in the catalog

    def __init__(self, model_uri: str, trusted: bool, settings: HandlerSettings) -> None:
        super().__init__(model_uri, settings)
        self._trusted = trusted

    # What each framework defines.

    def _read(self, content: bytes) -> Any:
        """The model in a file of the framework's own format. Whatever it raises means that it is no such file."""
        raise NotImplementedError

    def _is_model(self, loaded: Any) -> bool:
        """Whether a pickle held a model that this handler can call."""
        raise NotImplementedError

    def _expected(self) -> str:
        """What the file should be, and how one is saved."""
        raise NotImplementedError

    def _features(self, model: Any) -> Features:
        raise NotImplementedError

    # Loading.

    def load_model(self) -> Any:
        check_versions(self._family)
        with hiding_secrets([self._model_uri]), open_model_file(self._model_uri) as file:
            content = file.read()
            if not content:
                raise InputError(f"{str(self._model_uri)!r} is empty; expected {self._expected()}")
            if content.startswith(PICKLED):
                return self._unpickled(content)
            try:
                return self._read(content)
            except Exception as exc:
                raise self._unreadable(exc) from exc

    def _unpickled(self, content: bytes) -> Any:
        if not self._trusted:
            raise UsageError(
                f"{str(self._model_uri)!r} is a pickle, and loading it can run any code that is in it; pass trusted=True if "
                f"you made the file or trust who did, or give {self._expected()}"
            )
        try:
            model = _unpickle(content)
        except Exception as exc:
            raise self._unreadable(exc) from exc
        if not self._is_model(model):
            raise InputError(f"{str(self._model_uri)!r} holds a pickled {type(model).__name__}; expected {self._expected()}")
        return model

    def _unreadable(self, exc: Exception) -> InputError:
        told = str(exc).split("\nStack trace")[0].strip()
        return InputError(
            f"{str(self._model_uri)!r} could not be loaded: {type(exc).__name__}: {told}; expected {self._expected()}"
        )

    # Calling.

    def _run(self, data: Any, rows: int, model: Any, inference_args: InferenceArgs) -> Any:
        features, seen = self._features(model), data.shape[1]
        if features.count != seen:
            error = RowError(f"{self._wrong(features)} {seen} features; check the rows, or columns=[...]")
            raise BadRowsError(dict.fromkeys(range(rows), error))
        return super()._run(data, rows, model, inference_args)

    def _order(self, named: Any, model: Any) -> Sequence[int] | None:
        """By the names of the features, where the model has them: in another order the same columns would give other
        answers. UsageError where they are others."""
        seen = _names_in(named)
        names = self.input_columns() or seen
        features = self._features(model)
        if names is None or (len(names) == features.count and list(features.names or names) == list(names)):
            return None
        if features.names is None:
            raise UsageError(f"{self._wrong(features)} {list(names)}; name the features in columns=[...], in this order")
        if len(names) == features.count and set(names) == set(features.names):
            return [list(names).index(name) for name in features.names]
        missing = [name for name in features.names if name not in (seen or names)]
        advice = f"{missing} are missing: add them in a step before" if missing else f"give columns={list(features.names)}"
        raise UsageError(f"{self._wrong(features)} {list(names)}; {advice}")

    def _wrong(self, features: Features) -> str:
        takes = f"{features.count} features" if features.names is None else f"the features {list(features.names)}"
        return f"the model in {self.model_id()!r} takes {takes}, but saw"


class OfTypedFrames(OfFrames):
    """Frames in which columns of nothing but nulls, or of nulls and truth values, are floats: of objects, the models take
    none, and whether a column has a value must not depend on the other rows."""

    def _data_of_rows(self, rows: Sequence[Any]) -> pd.DataFrame:
        return _typed(super()._data_of_rows(rows))

    def _data_of_table(self, table: pa.Table) -> pd.DataFrame:
        return _typed(super()._data_of_table(table))


def _typed(frame: pd.DataFrame) -> pd.DataFrame:
    objects = [name for name in frame.columns if frame[name].dtype == object]
    kinds = (type(None), bool, float)
    plain = {name: float for name in objects if all(isinstance(value, kinds) for value in frame[name])}
    return frame.astype(plain) if plain else frame


def _names_in(row: Any) -> list[str] | None:
    """The names in a table, or of a row that is a dict, a Series, or a frame of pandas or datatable."""
    if isinstance(row, Mapping):
        return list(row)
    kinds = ("column_names", "columns", "index", "names")
    names = next((getattr(row, name) for name in kinds if hasattr(row, name)), None)
    return None if names is None or callable(names) else [str(name) for name in names]


def _unpickle(content: bytes) -> Any:
    """By joblib where it is there: it reads its own files and plain pickles."""
    try:
        import joblib
    except ModuleNotFoundError:
        return pickle.loads(content)
    return joblib.load(io.BytesIO(content))

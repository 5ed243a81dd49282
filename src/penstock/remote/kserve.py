"""The requests and answers of KServe's protocol, version 2, which Triton and others understand. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

_TYPES = {bool: "BOOL", int: "INT64", float: "FP32", str: "BYTES"}


def kserve_request(name: str, datatype: str | None = None) -> Callable[[Any], dict[str, Any]]:
    """A request_fn: each row, a number, a text or a list of such, nested or not, is the only row of the input `name`.
    datatype: as KServe calls it, such as "FP32"; None: by the first value."""
    return _Request(name, datatype)


def kserve_answer(name: str | None = None) -> Callable[[Any], Any]:
    """An answer_fn: the values of the output `name`, or of the only one, without the axis of rows: a number or a text if
    there is one value, else a list, nested as its shape says."""
    return _Answer(name)


class _Request:
    def __init__(self, name: str, datatype: str | None) -> None:
        self._name = name
        self._datatype = datatype

    def __call__(self, row: Any) -> dict[str, Any]:
        values = row.tolist() if hasattr(row, "tolist") else row
        shape = _shape(values)
        flat = _flat(values)
        datatype = self._datatype or _TYPES.get(type(flat[0]) if flat else float, "BYTES")
        return {"inputs": [{"name": self._name, "shape": [1, *shape], "datatype": datatype, "data": flat}]}


class _Answer:
    def __init__(self, name: str | None) -> None:
        self._name = name

    def __call__(self, body: Any) -> Any:
        if isinstance(body, Mapping) and body.get("error"):
            raise ValueError(f"the service answered with an error: {body['error']!r}")
        outputs = {each["name"]: each for each in body["outputs"]}
        if self._name is None and len(outputs) != 1:
            raise ValueError(f"expected one output, got {', '.join(outputs)}; name one: kserve_answer(name)")
        name = next(iter(outputs)) if self._name is None else self._name
        if name not in outputs:
            raise ValueError(f"there is no output {name!r}; the outputs are {', '.join(outputs)}")
        values, shape = _flat(outputs[name]["data"]), list(outputs[name]["shape"])
        return _shaped(values, shape[1:] if shape and shape[0] == 1 else shape)


def _shape(values: Any) -> list[int]:
    if not isinstance(values, (list, tuple)):
        return []
    return [len(values), *(_shape(values[0]) if values else [])]


def _flat(values: Any) -> list[Any]:
    if not isinstance(values, (list, tuple)):
        return [values]
    return [each for value in values for each in _flat(value)]


def _shaped(values: Sequence[Any], shape: Sequence[int]) -> Any:
    if not shape:
        if len(values) != 1:
            raise ValueError(f"expected one value, got {len(values)}")
        return values[0]
    step = len(values) // shape[0] if shape[0] else 0
    if step * shape[0] != len(values):
        raise ValueError(f"{len(values)} values do not have the shape {list(shape)}")
    return [_shaped(values[at * step : (at + 1) * step], shape[1:]) for at in range(shape[0])]

"""The requests and answers of KServe's protocol, version 2, which Triton and others understand. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

_TYPES = {bool: "BOOL", int: "INT64", float: "FP32", str: "BYTES"}
_ARRAY_TYPES = {
    "bool": "BOOL",
    **{f"{sign}int{bits}": f"{sign.upper()}INT{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)},
    **{f"float{bits}": f"FP{bits}" for bits in (16, 32, 64)},
}


def kserve_request(name: str, datatype: str | None = None) -> Callable[[Any], dict[str, Any]]:
    """A request_fn: each row, a number, a text or a list of such, nested or not, is the only row of the input `name`.
    datatype: as KServe calls it, such as "FP32"; None: that of an array; else BOOL, INT64, BYTES (of texts), and FP32 where
    a number has a fraction."""
    return partial(_request, name, datatype)


def kserve_answer(name: str | None = None) -> Callable[[Any], Any]:
    """An answer_fn: the values of the output `name`, or of the only one, without the axis of rows: a number or a text if
    there is one value, else a list, nested as its shape says."""
    return partial(_answer, name)


def _request(name: str, datatype: str | None, row: Any) -> dict[str, Any]:
    values = _plain(row)
    shape = _shape(values)
    flat = _flat(values)
    if len(flat) != math.prod(shape):
        raise ValueError(f"expected lists of one length, got {len(flat)} values where the first ones say {shape}")
    datatype = datatype or _ARRAY_TYPES.get(str(getattr(row, "dtype", "")).removeprefix("torch."))
    return {"inputs": [{"name": name, "shape": [1, *shape], "datatype": _type_of(flat, datatype), "data": flat}]}


def _answer(wanted: str | None, body: Any) -> Any:
    if isinstance(body, Mapping) and body.get("error"):
        raise ValueError(f"the service answered with an error: {body['error']!r}")
    outputs = {each["name"]: each for each in body["outputs"]}
    if wanted is None and len(outputs) != 1:
        raise ValueError(f"expected one output, got {', '.join(outputs)}; name one: kserve_answer(name)")
    name = next(iter(outputs)) if wanted is None else wanted
    if name not in outputs:
        raise ValueError(f"there is no output {name!r}; the outputs are {', '.join(outputs)}")
    values, shape = _flat(outputs[name]["data"]), list(outputs[name]["shape"])
    return _shaped(values, shape[1:] if shape and shape[0] == 1 else shape)


def _plain(value: Any) -> Any:
    """Lists and plain values of arrays, their scalars, and lists of them."""
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    return value.tolist() if hasattr(value, "tolist") else value


def _type_of(values: Sequence[Any], told: str | None) -> str:
    """What is told, or else by the values. TypeError for those that JSON cannot hold."""
    kinds = {type(value) for value in values} or {float}
    if wrong := next((kind for kind in kinds if kind not in _TYPES), None):
        hint = "; decode them to texts first" if wrong is bytes else ""
        raise TypeError(f"expected numbers, texts or booleans, got {wrong.__name__}{hint}")
    if told is not None:
        return told
    if kinds == {int, float}:
        kinds = {float}
    if len(kinds) > 1:
        raise TypeError(f"expected values of one type, got {' and '.join(sorted(kind.__name__ for kind in kinds))}")
    return _TYPES[kinds.pop()]


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

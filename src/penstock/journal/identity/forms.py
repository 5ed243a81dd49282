"""Values of known types as tuples of text, bytes and numbers: the same in every process, and different when they are."""

from __future__ import annotations

import array
import datetime
import decimal
import fractions
import functools
import logging
import operator
import pathlib
import re
import sys
import zoneinfo
from collections.abc import Callable
from typing import Any, TypeAlias

Form: TypeAlias = tuple[Any, ...]

_GETTERS = operator.itemgetter, operator.attrgetter, operator.methodcaller
_DATA: dict[str, Callable[[Any], Any]] = {  # not imported for it
    **dict.fromkeys((f"ipaddress.IPv{version}{kind}" for version in "46" for kind in ("Address", "Network")), str),
    **dict.fromkeys(("collections.UserDict", "collections.UserList", "collections.UserString"), lambda each: each.data),
    "collections.ChainMap": lambda each: each.maps,
    "configparser.RawConfigParser": lambda each: {name: dict(each.items(name, raw=True)) for name in each},
    "configparser.SectionProxy": lambda each: dict(each.parser.items(each.name, raw=True)),
    "string.Template": lambda each: each.template,
    "uuid.UUID": str,
}
_AS_TEXT = decimal.Decimal, fractions.Fraction, datetime.timezone, zoneinfo.ZoneInfo


def form_of(value: Any) -> Form | None:
    """What there is to know of a value, starting with its kind; None for types that are not known here.

    Frameworks are not imported for it: a value of theirs exists only where they are loaded. What arrays hold is given as a
    memoryview, and not copied.
    """
    return _standard_form(value) or _numpy_form(value) or _torch_form(value) or _arrow_form(value)


def _standard_form(value: Any) -> Form | None:
    match value:
        case pathlib.PurePath():
            return "path", value.as_posix()
        case datetime.date() | datetime.time():
            return type(value).__name__, value.isoformat()
        case datetime.timedelta():
            return "timedelta", value.days, value.seconds, value.microseconds
        case range() | slice():
            return type(value).__name__, value.start, value.stop, value.step
        case bytearray():
            return "bytearray", bytes(value)
        case array.array():
            return "array.array", value.typecode, value.tobytes()
        case re.Pattern():
            return "pattern", value.pattern, value.flags
        case logging.Logger() | logging.LoggerAdapter():
            return "logger", value.name
    if isinstance(value, _AS_TEXT):
        return type(value).__name__, str(value)
    for cls in type(value).__mro__:
        if (parts := _DATA.get(f"{cls.__module__}.{cls.__qualname__}")) is not None:
            return cls.__name__, parts(value)
    if isinstance(value, (functools.partial, functools.partialmethod)):
        return "partial", value.func, value.args, value.keywords
    return ("getter", type(value).__name__, value.__reduce__()[1]) if isinstance(value, _GETTERS) else None


def _numpy_form(value: Any) -> Form | None:
    numpy = sys.modules.get("numpy")
    if numpy is None or not hasattr(numpy, "ndarray"):
        return None
    if isinstance(value, numpy.dtype):
        return "dtype", str(value)
    if isinstance(value, numpy.ufunc):
        return "ufunc", value.__name__
    if not isinstance(value, (numpy.ndarray, numpy.generic)):
        return None
    if value.dtype.hasobject:
        return "objects", value.shape, value.tolist()
    array = numpy.ascontiguousarray(value)
    try:
        content = array.reshape(-1).view(numpy.uint8).data
    except (TypeError, ValueError):  # of items without bytes
        content = array.tobytes()
    return "numpy", str(value.dtype), value.shape, content


def _torch_form(value: Any) -> Form | None:
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "Tensor"):
        return None
    if isinstance(value, (torch.dtype, torch.device)):
        return "torch", str(value)
    if not isinstance(value, torch.Tensor):
        return None
    about = "tensor", str(value.dtype), tuple(value.shape)
    try:
        return *about, value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
    except (RuntimeError, TypeError, NotImplementedError):  # sparse, quantised, or without memory of its own
        return about


def _arrow_form(value: Any) -> Form | None:
    arrow = sys.modules.get("pyarrow")
    if arrow is None or not hasattr(arrow, "Schema"):
        return None
    if isinstance(value, arrow.Schema):
        return "schema", [_arrow_form(field) for field in value], value.metadata
    if isinstance(value, arrow.Field):
        return "field", value.name, str(value.type), value.nullable, value.metadata
    return ("arrow", str(value)) if isinstance(value, arrow.DataType) else None

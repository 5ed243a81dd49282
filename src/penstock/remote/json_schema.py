"""Whether a value fits a JSON schema, by what schemas of answers are mostly made of. Pure.

Types, `enum` and `const`, `properties`, `required`, `additionalProperties`, `items`, `anyOf`, `oneOf` (as anyOf), `allOf`,
references inside it (`#/$defs/...`) are looked at; whatever else it says is left to the service.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_TYPES: Mapping[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "number": (int, float),
    "integer": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
}


def misfit(value: Any, schema: Any, at: str = "the answer", root: Any = None) -> str:
    """What does not fit, in words; nothing, if all does. at: what the value is called."""
    root = schema if root is None else root
    if not isinstance(schema, Mapping):
        return f"{at} is not expected" if schema is False else ""
    if "$ref" in schema:
        return misfit(value, _referred(str(schema["$ref"]), root), at, root)
    wrong = _wrong_type(value, schema.get("type"), at)
    if "enum" in schema and value not in schema["enum"]:
        wrong = wrong or f"{at} is {value!r:.100}; expected one of {schema['enum']!r:.200}"
    if "const" in schema and value != schema["const"]:
        wrong = wrong or f"{at} is {value!r:.100}; expected {schema['const']!r:.100}"
    for each in schema.get("allOf") or ():
        wrong = wrong or misfit(value, each, at, root)
    for name in ("anyOf", "oneOf"):
        tried = [misfit(value, each, at, root) for each in schema.get(name) or ()]
        wrong = wrong or (tried[0] if tried and all(tried) else "")
    if isinstance(value, dict):
        return wrong or _wrong_object(value, schema, at, root)
    items = schema.get("items") if isinstance(value, list) else None
    found = (misfit(each, items, f"{at}[{place}]", root) for place, each in enumerate(value)) if items is not None else ()
    return wrong or next(filter(None, found), "")


def _wrong_object(value: Mapping[str, Any], schema: Mapping[str, Any], at: str, root: Any) -> str:
    properties = schema.get("properties") or {}
    if missing := [name for name in schema.get("required") or () if name not in value]:
        return f"{at} has no {missing[0]!r}, which the schema requires"
    others = schema.get("additionalProperties", True)
    for name, each in value.items():
        if wrong := misfit(each, properties.get(name, others), f"{at}[{name!r}]", root):
            return wrong
    return ""


def _wrong_type(value: Any, told: Any, at: str) -> str:
    kinds: Sequence[Any] = [told] if isinstance(told, str) else told or ()
    if not kinds or any(_is(value, kind) for kind in kinds):
        return ""
    return f"{at} is of type {type(value).__name__}; expected {' or '.join(map(str, kinds))}"


def _is(value: Any, kind: Any) -> bool:
    if isinstance(value, bool):
        return bool(kind == "boolean")
    if kind == "integer" and isinstance(value, float):
        return value.is_integer()
    return isinstance(value, _TYPES.get(kind, (object,)))


def _referred(reference: str, root: Any) -> Any:
    """The part of the schema that a reference names; True, which anything fits, where there is none."""
    found = root
    for name in reference.removeprefix("#").strip("/").split("/") if reference.startswith("#/") else ():
        found = found.get(name.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
    return True if found is None or found is root else found

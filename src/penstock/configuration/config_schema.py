"""A JSON schema of the configuration, with which editors complete and check `penstock.toml`."""

from __future__ import annotations

__all__ = ("config_schema",)

import ast
from collections.abc import Iterator
from typing import Any, Final

from penstock.configuration.option_reference import OptionEntry, every_option, literals

_TYPES: Final = {"int": "integer", "float": "number", "bool": "boolean", "str": "string"}
_QUANTITY: Final = {
    "bytes": r"^[0-9]+(\.[0-9]+)? ?(B|kB|KB|MB|GB|TB|KiB|MiB|GiB|TiB)?$",
    "seconds": r"^[0-9]+(\.[0-9]+)? ?(s|min|h|us|ms)?$",
}
_OPEN: Final = ("save", "restore")  #: tables that may have further tables, of stages from elsewhere


def config_schema() -> dict[str, Any]:
    """Return the schema, of the draft 2020-12."""
    properties: dict[str, Any] = {}
    for entry in every_option():
        table = _table(properties, entry.section)
        table["properties"][entry.name] = _property(entry)

    own = {name: dict(table) for name, table in properties.items()}
    profile = {"type": "object", "properties": own, "additionalProperties": False}
    properties["profiles"] = {
        "description": "Options over those of the file, chosen by PENSTOCK_PROFILE or by an argument.",
        "type": "object",
        "additionalProperties": {"$ref": "#/$defs/profile"},
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "penstock.toml",
        "type": "object",
        "properties": properties,
        "additionalProperties": False,
        "$defs": {"profile": profile},
    }


def _table(properties: dict[str, Any], section: str) -> dict[str, Any]:
    table: dict[str, Any] = {"properties": properties}
    path = ""
    for name in section.split("."):
        path = f"{path}.{name}".strip(".")
        found = table["properties"].setdefault(name, {"type": "object", "properties": {}})
        found["additionalProperties"] = {"type": "object"} if path in _OPEN else False
        table = found

    return table


def _property(entry: OptionEntry) -> dict[str, Any]:
    kinds = list(_kinds(entry.annotation, entry))
    about = f"{entry.effect} Default: {entry.default}."
    return {"description": about, **(kinds[0] if len(kinds) == 1 else {"anyOf": kinds})}


def _kinds(annotation: ast.expr, entry: OptionEntry) -> Iterator[dict[str, Any]]:
    if isinstance(annotation, ast.BinOp):
        yield from _kinds(annotation.left, entry)
        yield from _kinds(annotation.right, entry)
    elif isinstance(annotation, ast.Subscript):
        if ast.unparse(annotation.value) == "Literal":
            yield {"enum": list(literals(annotation))}
        elif ast.unparse(annotation.value) == "tuple":
            item = annotation.slice.elts[0] if isinstance(annotation.slice, ast.Tuple) else annotation.slice
            yield {"type": "array", "items": next(_kinds(item, entry))}
    else:
        name = ast.unparse(annotation)
        if name in _TYPES:
            kind: dict[str, Any] = {"type": _TYPES[name]}
            if name in {"int", "float"} and entry.positive:
                kind["exclusiveMinimum"] = 0
            yield kind
            if name in {"int", "float"} and entry.unit:
                yield {"type": "string", "pattern": _QUANTITY[entry.unit]}

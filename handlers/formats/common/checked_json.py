"""JSON from a medium that may be damaged: every surprise is a `CorruptCheckpointError`.

Each function names the file and the member it looked at, so that the message says where to look.
"""

from __future__ import annotations

__all__ = ("as_list", "as_object", "as_shape", "as_string", "parse_object", "parse_value")

import json
from typing import NoReturn, cast

from penstock.kernel.errors import CorruptCheckpointError


def parse_object(path: str, data: bytes) -> dict[str, object]:
    """Parse a JSON document whose top level is an object.

    Raises:
        CorruptCheckpointError: If it is empty, not JSON, nested without end, or something else.
    """
    return as_object(path, "the document", parse_value(path, data))


def parse_value(path: str, data: bytes | str) -> object:
    """Parse a JSON document of any kind.

    Raises:
        CorruptCheckpointError: If it is empty, not JSON, or nested without end.
    """
    if not data:
        raise CorruptCheckpointError(path, "is empty")
    try:
        return cast("object", json.loads(data))
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpointError(path, f"is not JSON: {error}") from error


def as_object(path: str, name: str, value: object) -> dict[str, object]:
    """Return `value` if it is a JSON object; keys of JSON objects are always strings."""
    if type(value) is not dict:
        _wrong(path, name, value, "an object")

    return cast("dict[str, object]", value)


def as_list(path: str, name: str, value: object) -> list[object]:
    """Return `value` if it is a JSON array."""
    if type(value) is not list:
        _wrong(path, name, value, "a list")

    return cast("list[object]", value)


def as_string(path: str, name: str, value: object) -> str:
    """Return `value` if it is a string."""
    if type(value) is not str:
        _wrong(path, name, value, "a string")

    return value


def as_shape(path: str, name: str, value: object) -> tuple[int, ...]:
    """Return `value` if it is a list of non-negative integers, as a tuple."""
    sizes = tuple(as_list(path, name, value))
    for size in sizes:
        if type(size) is not int or size < 0:
            _wrong(path, name, value, "a list of sizes")

    return cast("tuple[int, ...]", sizes)


def _wrong(path: str, name: str, value: object, expected: str) -> NoReturn:
    shown = "missing" if value is None else repr(value)
    if len(shown) > 80:
        shown = shown[:77] + "..."

    raise CorruptCheckpointError(path, f"{name} is {shown}, not {expected}")

"""JSON from a medium that may be damaged: every surprise is a `CorruptCheckpointError`.

Each function takes the document's path and the member's name, for the message.
"""

from __future__ import annotations

__all__ = (
    "as_list",
    "as_object",
    "as_shape",
    "as_string",
    "check_unicode",
    "convert_member",
    "distinct_members",
    "parse_distinct",
    "parse_object",
    "parse_value",
)

import json
from collections.abc import Iterable
from typing import NoReturn, TypeVar, cast

import msgspec

from penstock.kernel.errors import CorruptCheckpointError

T = TypeVar("T")


def parse_object(path: str, data: bytes) -> dict[str, object]:
    """Parse a JSON document whose top level is an object.

    Raises:
        CorruptCheckpointError: If it is empty, not JSON, nested without end, or not an object.
    """
    return as_object(path, "the document", parse_value(path, data))


def parse_value(path: str, data: bytes | str) -> object:
    """Parse a JSON document of any kind. If a name occurs twice, the last member counts.

    Raises:
        CorruptCheckpointError: If it is empty, not JSON, or nested without end.
    """
    try:
        return msgspec.json.decode(data)
    except (ValueError, RecursionError):
        # Python writes NaN and lone surrogates, which are not JSON, but reads them back.
        return _parse(path, data)


def parse_distinct(path: str, data: bytes) -> dict[str, object]:
    """Parse a JSON document whose top level is an object, and in which no object has a name twice.

    Raises:
        CorruptCheckpointError: As `parse_object`, and if a name occurs twice.
    """
    return as_object(path, "the document", _parse(path, data, distinct=True))


def _parse(path: str, data: bytes | str, *, distinct: bool = False) -> object:
    if not data:
        raise CorruptCheckpointError(path, "is empty")
    try:
        return cast("object", json.loads(data, object_pairs_hook=distinct_members if distinct else None))
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpointError(path, f"is not JSON: {error}") from error


def distinct_members(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Make a dict of the members of an object. For `json.loads`, of which it is an `object_pairs_hook`.

    Raises:
        ValueError: If a name occurs twice.
    """
    members = dict(pairs)
    if len(members) < len(pairs):
        names = [name for name, _ in pairs]
        message = f"{next(name for name in names if names.count(name) > 1)!r} occurs twice"
        raise ValueError(message)

    return members


def convert_member(path: str, name: str, value: object, type_: type[T]) -> T:
    """Convert a parsed value to a msgspec type.

    Raises:
        CorruptCheckpointError: If it does not fit; says where in the value.
    """
    try:
        return msgspec.convert(value, type_)
    except (ValueError, RecursionError) as error:  # also a text with half a character in it
        raise CorruptCheckpointError(path, f"{name}: {error}"[:500]) from error


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


def check_unicode(path: str, names: Iterable[str]) -> None:
    """Raise `CorruptCheckpointError` if a name is no Unicode text: a JSON escape can be half a character."""
    for name in names:
        try:
            name.encode()
        except UnicodeEncodeError as error:
            raise CorruptCheckpointError(path, f"the name {name!r} is no valid Unicode text"[:200]) from error


def _wrong(path: str, name: str, value: object, expected: str) -> NoReturn:
    shown = "missing" if value is None else repr(value)
    if len(shown) > 80:
        shown = shown[:77] + "..."

    raise CorruptCheckpointError(path, f"{name} is {shown}, not {expected}")

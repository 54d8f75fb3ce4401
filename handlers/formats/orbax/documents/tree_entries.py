"""The entries of `_METADATA`, one for each leaf, read into columns.

Source:
    ORBAX_FORMAT.md §1.1. Ten versions of Orbax all write the same form, down to the blanks. That form is
    read in slices; any other is parsed as a whole.
"""

from __future__ import annotations

__all__ = ("Columns", "decode_entries")

from collections.abc import Iterable
from typing import Annotated, Final, Literal, NamedTuple, final

from msgspec import Meta, Struct
from msgspec.json import Decoder

from penstock.handlers.formats.common.checked_json import (
    as_object,
    check_unicode,
    convert_member,
    parse_distinct,
    parse_object,
)
from penstock.handlers.formats.common.json_slices import UnusualFormError, decode_slices
from penstock.kernel.errors import CorruptCheckpointError
from penstock.kernel.protocols.leaf import KeyKind, KeyPath

_MEMBER: Final = "tree_metadata"
_START: Final = b'{"tree_metadata": {'
_END: Final = b"}}}, "  # of the last entry, of `tree_metadata`, and what follows it
_BOUNDARY: Final = b'}},"'


class _Step(Struct, gc=False):
    key: str
    key_type: Literal[1, 2]


class _Value(Struct, gc=False):
    value_type: str
    skip_deserialize: bool = False
    write_shape: tuple[Annotated[int, Meta(ge=0)], ...] | None = None


class _Entry(Struct, gc=False):
    key_metadata: tuple[_Step, ...]
    value_metadata: _Value


_ENTRIES: Final = Decoder(dict[str, _Entry])
_KINDS: Final = {1: KeyKind.SEQUENCE, 2: KeyKind.MAPPING}


@final
class Columns(NamedTuple):
    """What the document says about each leaf, one list per attribute."""

    keys: list[KeyPath]
    kinds: list[tuple[KeyKind, ...]]
    typestrs: list[str]
    write_shapes: list[tuple[int, ...] | None]
    skips: list[bool]


def decode_entries(path: str, data: bytes) -> tuple[Columns, dict[str, object]]:
    """Read the document.

    Args:
        path: Where `data` was found, for the error.
        data: All of it.

    Returns:
        The entries, and the other members of the document.

    Raises:
        CorruptCheckpointError: If it is not JSON, an entry is not one, or a name occurs twice.
    """
    try:
        return _decode_usual(path, data)
    except (UnusualFormError, CorruptCheckpointError):
        return _decode_any(path, data)  # it may be valid; if it is not, this raises the reason


def _decode_usual(path: str, data: bytes) -> tuple[Columns, dict[str, object]]:
    end = data.find(_END)
    if not data.startswith(_START) or end < 0:
        raise UnusualFormError

    collected, names = _Collected(), set[str]()
    for entries, _ in decode_slices(_ENTRIES, data, len(_START), end + 2, _BOUNDARY):
        collected.add(entries.values())
        names.update(entries)

    rest = parse_object(path, b"{" + data[end + len(_END) :])
    if _MEMBER in rest or len(names) < len(collected.columns.keys):
        raise UnusualFormError  # a name occurs twice

    return collected.columns, rest


def _decode_any(path: str, data: bytes) -> tuple[Columns, dict[str, object]]:
    document = parse_distinct(path, data)
    collected = _Collected()
    members = as_object(path, _MEMBER, document.pop(_MEMBER, None))
    collected.add(convert_member(path, name, value, _Entry) for name, value in members.items())
    for keys in collected.columns.keys:
        check_unicode(path, keys)  # Python's parser, unlike that of the usual form, takes surrogates

    return collected.columns, document


@final
class _Collected:
    """The entries so far. Equal values of many leaves are stored as one object."""

    __slots__ = ("_kinds", "_shapes", "_typestrs", "columns")

    def __init__(self) -> None:
        self.columns = Columns([], [], [], [], [])
        self._kinds: dict[tuple[int, ...], tuple[KeyKind, ...]] = {}
        self._typestrs: dict[str, str] = {}
        self._shapes: dict[tuple[int, ...], tuple[int, ...]] = {}

    def add(self, entries: Iterable[_Entry]) -> None:
        keys, kinds, typestrs, write_shapes, skips = self.columns
        rows = [(entry.key_metadata, entry.value_metadata) for entry in entries]
        keys += [tuple([step.key for step in steps]) for steps, _ in rows]
        numbers = [tuple([step.key_type for step in steps]) for steps, _ in rows]
        for each in set(numbers) - self._kinds.keys():
            self._kinds[each] = tuple([_KINDS[number] for number in each])

        kinds += map(self._kinds.__getitem__, numbers)
        typestrs += [self._typestrs.setdefault(value.value_type, value.value_type) for _, value in rows]
        shapes = [value.write_shape for _, value in rows]
        write_shapes += [None if shape is None else self._shapes.setdefault(shape, shape) for shape in shapes]
        skips += [value.skip_deserialize for _, value in rows]

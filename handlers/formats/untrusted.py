"""Input that may be damaged, or come from someone who means harm: a surprise is a `CorruptCheckpointError`.

The functions that check a value of JSON get the document's path and the member's name, for the message. Long
documents are decoded in slices (`Slices`, `decode_object`), because a decode holds the interpreter
lock until it ends. Besides JSON: sizes of arrays, and paths and links in a checkpoint, which lead to places
in it, and not to any number of them.
"""

from __future__ import annotations

__all__ = (
    "MOST_BYTES",
    "SLICE_BYTES",
    "EnteredDirectories",
    "Slices",
    "UnusualFormError",
    "add_distinct",
    "as_list",
    "as_object",
    "as_shape",
    "as_string",
    "check_inside",
    "check_unicode",
    "convert_member",
    "decode_object",
    "distinct_members",
    "is_beyond_memory",
    "parse_distinct",
    "parse_object",
    "parse_value",
)

import json
import math
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence, Sized
from typing import Final, Generic, NoReturn, TypeVar, cast, final

import msgspec
from msgspec.json import Decoder

from penstock.kernel.errors import CorruptCheckpointError
from penstock.kernel.protocols.stores import Store

MOST_BYTES: Final = 2**62
"""Of an array or a chunk, so that no size or offset in one needs more than 64 bits."""


def is_beyond_memory(shape: Sequence[int], itemsize: int) -> bool:
    """Return whether no array can have this shape, even if an axis of 0 makes it take no bytes."""
    return math.prod([n or 1 for n in shape]) * itemsize > MOST_BYTES


def check_inside(path: str, name: str) -> None:
    """Raise unless a name, relative to a directory, leads to a place in it.

    An untrusted checkpoint must not make its reader open other files.

    Args:
        path: What says so: a document, or the directory, for the error.
        name: With slashes.

    Raises:
        CorruptCheckpointError: If it is absolute, goes up, or has a zero byte, which no file name has.
    """
    if os.path.isabs(name) or ".." in name.split("/") or "\0" in name:
        raise CorruptCheckpointError(path, f"{name!r} leads out of the checkpoint"[:300])


@final
class EnteredDirectories:
    """Counts how often each directory is entered, by its identity. Belongs to one walk.

    Args:
        store: Where they are.
    """

    MOST: Final = 16  #: times; a directory that is linked to under several names is entered under each

    __slots__ = ("_counts", "_store")

    def __init__(self, store: Store) -> None:
        self._store = store
        self._counts: Counter[object] = Counter()

    def enter(self, path: str) -> None:
        """Count the directory at `path`. Blocking.

        Raises:
            CorruptCheckpointError: If it was entered too often.
        """
        identity = self._store.identity(path)
        if identity is None:
            return

        self._counts[identity] += 1
        if self._counts[identity] > self.MOST:
            raise CorruptCheckpointError(path, f"is reached by links in more than {self.MOST} ways")


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
    sizes = as_list(path, name, value)
    for size in sizes:
        if type(size) is not int or size < 0:
            _wrong(path, name, sizes, "a list of sizes")

    return tuple(cast("list[int]", sizes))


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


# A decode holds the interpreter lock until it ends and so stops every other thread, including the event
# loop's. So a long object or array is cut between its entries, and the slices are decoded one by one.
EntriesT = TypeVar("EntriesT", bound=Sized)

SLICE_BYTES: Final = 1 << 16
"""Bytes decoded in one step: about half a millisecond."""


class UnusualFormError(ValueError):
    """The document is not in the one form that can be sliced. It may still be valid."""


@final
class Slices(Generic[EntriesT]):
    """Decodes the entries in `data[start:end]`, the inside of an object or of an array, slice by slice.

    A slice begins where an entry begins. If its end boundary were inside a string or a nested value, the
    slice would not be valid JSON. So a slice that decodes is decoded correctly. It yields the entries of a
    slice, and its bytes.

    Args:
        decoder: Of a whole object or array of such entries.
        data: The document.
        start: Where its entries begin.
        end: Where they end.
        boundary: The text between two entries without blanks, as in `}},"`. Documents with one blank after
            each comma are also of the usual form.
        brackets: The opening and the closing one of such an object or array.

    Raises:
        UnusualFormError: If a slice is not JSON, if an entry is not what the decoder takes, or if there are
            more or fewer entries than boundaries say. This is also how a name that occurs twice shows, for
            the decoder keeps only the last of the two.
    """

    __slots__ = ("_boundary", "_brackets", "_comma", "_data", "_decoder", "_end", "_n_before", "at", "nbytes")

    def __init__(
        self,
        decoder: Decoder[EntriesT],
        data: bytes,
        start: int,
        end: int,
        boundary: bytes,
        brackets: bytes = b"{}",
    ) -> None:
        before, comma, after = boundary.partition(b",")
        spaced = before + b", " + after
        if data.find(spaced, start, min(end, start + SLICE_BYTES)) >= 0:
            boundary, comma = spaced, b", "

        self.at = start  #: where the next slice begins; who reads entries without the decoder moves it on
        self.nbytes = SLICE_BYTES  #: of the next slice, at least
        self._decoder, self._data, self._end = decoder, data, end
        self._boundary, self._n_before, self._comma = boundary, len(before), len(comma)
        self._brackets = brackets[:1], brackets[1:]

    def __iter__(self) -> Iterator[tuple[EntriesT, bytes]]:
        opening, closing = self._brackets
        while self.at < self._end:
            stop = self._data.find(self._boundary, self.at + self.nbytes, self._end)
            stop = self._end if stop < 0 else stop + self._n_before
            part = self._data[self.at : stop]
            try:
                entries = self._decoder.decode(opening + part + closing)
            except (ValueError, RecursionError) as error:
                raise UnusualFormError(str(error)) from error

            if len(entries) != part.count(self._boundary) + 1:
                message = f"{len(entries)} entries between {part.count(self._boundary)} boundaries"
                raise UnusualFormError(message)

            self.at = stop + self._comma
            yield entries, part


def decode_object(decoder: Decoder[dict[str, T]], data: bytes, boundary: bytes) -> dict[str, T]:
    """Decode a document that is one object, slice by slice.

    Raises:
        UnusualFormError: If it is none, or not of the usual form, or a name occurs twice.
    """
    if data[:1] != b"{" or data[-1:] != b"}":
        raise UnusualFormError

    found: dict[str, T] = {}
    for members, _ in Slices(decoder, data, 1, len(data) - 1, boundary):
        add_distinct(found, members)

    return found


def add_distinct(found: dict[str, T], members: dict[str, T]) -> None:
    """Add members to those of earlier slices.

    Raises:
        UnusualFormError: If a name is there already.
    """
    n_before = len(found)
    found |= members
    if len(found) < n_before + len(members):
        message = "a name occurs twice"
        raise UnusualFormError(message)

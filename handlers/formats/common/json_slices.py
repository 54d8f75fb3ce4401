"""Long JSON documents, decoded with msgspec slice by slice.

A decode holds the interpreter lock until it ends and so stops every other thread, including the event
loop's. So a long object or array is cut between its entries, and the slices are decoded one by one.
"""

from __future__ import annotations

__all__ = ("SLICE_BYTES", "UnusualFormError", "add_distinct", "decode_object", "decode_slices")

from collections.abc import Iterator, Sized
from typing import Final, TypeVar

from msgspec.json import Decoder

T = TypeVar("T")
EntriesT = TypeVar("EntriesT", bound=Sized)

SLICE_BYTES: Final = 1 << 16
"""Bytes decoded in one step: about half a millisecond."""


class UnusualFormError(ValueError):
    """The document is not in the one form that can be sliced. It may still be valid."""


def decode_slices(
    decoder: Decoder[EntriesT], data: bytes, start: int, end: int, boundary: bytes, brackets: bytes = b"{}"
) -> Iterator[tuple[EntriesT, bytes]]:
    """Decode the entries in `data[start:end]`, the inside of an object or of an array.

    A slice begins where an entry begins. If its end boundary were inside a string or a nested value, the
    slice would not be valid JSON. So a slice that decodes is decoded correctly.

    Args:
        decoder: Of a whole object or array of such entries.
        data: The document.
        start: Where its entries begin.
        end: Where they end.
        boundary: The text between two entries without blanks, as in `}},"`. Documents with one blank after
            each comma are also of the usual form.
        brackets: The opening and the closing one of such an object or array.

    Yields:
        The entries of a slice, and its bytes.

    Raises:
        UnusualFormError: If a slice is not JSON, if an entry is not what the decoder takes, or if there are
            more or fewer entries than boundaries say. This is also how a name that occurs twice shows, for
            the decoder keeps only the last of the two.
    """
    before, comma, after = boundary.partition(b",")
    spaced = before + b", " + after
    if data.find(spaced, start, min(end, start + SLICE_BYTES)) >= 0:
        boundary, comma = spaced, b", "

    opening, closing = brackets[:1], brackets[1:]
    while start < end:
        stop = data.find(boundary, start + SLICE_BYTES, end)
        stop = end if stop < 0 else stop + len(before)
        part = data[start:stop]
        try:
            entries = decoder.decode(opening + part + closing)
        except (ValueError, RecursionError) as error:
            raise UnusualFormError(str(error)) from error

        if len(entries) != part.count(boundary) + 1:
            message = f"{len(entries)} entries between {part.count(boundary)} boundaries"
            raise UnusualFormError(message)

        yield entries, part
        start = stop + len(comma)


def decode_object(decoder: Decoder[dict[str, T]], data: bytes, boundary: bytes) -> dict[str, T]:
    """Decode a document that is one object, slice by slice.

    Raises:
        UnusualFormError: If it is none, or not of the usual form, or a name occurs twice.
    """
    if data[:1] != b"{" or data[-1:] != b"}":
        raise UnusualFormError

    found: dict[str, T] = {}
    for members, _ in decode_slices(decoder, data, 1, len(data) - 1, boundary):
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

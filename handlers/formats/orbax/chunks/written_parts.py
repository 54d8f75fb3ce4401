"""Where the bytes of a leaf lie, in the parts that were written. Pure."""

from __future__ import annotations

__all__ = ("parts_of",)

from collections.abc import Iterable, Iterator, Mapping

from penstock.handlers.formats.common.integrity import Checksum, Checksums
from penstock.handlers.ocdbt.value_refs import Indirect, Value
from penstock.kernel.protocols.written import Written


def parts_of(
    chunks: Iterable[tuple[tuple[int, ...], Value | None]], checksums: Mapping[str, Checksums]
) -> tuple[Written, ...]:
    """Find the checksummed parts that tile every chunk.

    Args:
        chunks: Each with where it lies; None if it was never written.
        checksums: By data file, by ascending offset.

    Returns:
        The parts, or nothing if a chunk lies in another way: in the index, or without a checksum.
    """
    found: list[Written] = []
    for index, value in chunks:
        if not isinstance(value, Indirect):
            return ()

        end = value.offset
        for part in _within(checksums.get(value.file), value):
            if part.offset != end:
                return ()

            end += part.nbytes
            start = part.offset - value.offset
            found.append(Written(0, index, start, value.file, part.offset, part.nbytes, part.crc32c))

        if end != value.offset + value.length:
            return ()

    return tuple(found)


def _within(checksums: Checksums | None, value: Indirect) -> Iterator[Checksum]:
    if checksums is None:
        return

    for at in range(checksums.from_offset(value.offset), len(checksums)):
        if checksums[at].offset >= value.offset + value.length:
            return

        yield checksums[at]

"""Where the bytes of a leaf lie, in the parts that were written. Pure."""

from __future__ import annotations

__all__ = ("parts_of",)

from collections.abc import Iterable, Mapping

from penstock.handlers.formats.common.checksummed_reads import NONE
from penstock.handlers.formats.common.integrity import Checksums
from penstock.handlers.ocdbt.value_refs import Indirect, Value
from penstock.kernel.protocols.written import Written


def parts_of(
    chunks: Iterable[tuple[tuple[int, ...], Value | None]], checksums: Mapping[str, Checksums], leaf: int
) -> tuple[Written, ...]:
    """Find the checksummed parts that tile every chunk.

    Args:
        chunks: Each with where it lies; None if it was never written.
        checksums: By data file, by ascending offset.
        leaf: What to put into `Written.leaf`.

    Returns:
        The parts, or nothing if a chunk lies in another way: in the index, or without a checksum.
    """
    found: list[Written] = []
    for index, value in chunks:
        if not isinstance(value, Indirect):
            return ()

        recorded = checksums.get(value.file, NONE)
        at, stop = value.offset, value.offset + value.length
        for number in range(recorded.from_offset(at), len(recorded)):
            if at >= stop:
                break

            part = recorded[number]
            if part.offset != at:
                return ()

            start, running = at - value.offset, recorded.written_running(number)
            found.append(
                Written(leaf, index, start, value.file, at, part.nbytes, part.crc32c, running=running)
            )
            at += part.nbytes

        if at != stop:
            return ()

    return tuple(found)

"""Reads a pack of small leaves into one buffer, in few calls. Blocking."""

from __future__ import annotations

__all__ = ("read_pack",)

from collections.abc import Iterator, Sequence
from operator import gt
from typing import Final

import numpy as np
from crc32c import crc32c

from penstock.kernel.errors import ChecksumError, TruncatedDataError
from penstock.kernel.messages.packs import HostPack, ReadPack
from penstock.kernel.protocols.stores import ReadableFile
from penstock.stages.files.chunk_order import put_in_order

GAP: Final = 4096
"""Bytes. A gap of up to this size between two leaves is read too: that is cheaper than another call."""


def read_pack(file: ReadableFile, pack: ReadPack, *, verify: bool) -> HostPack:
    """Read the bytes of all leaves into one buffer, each in C order, in however many chunks it is stored.

    Raises:
        TruncatedDataError: If the file ends too early; names the first leaf that is cut off.
        ChecksumError: If bytes differ from those that were written; names the leaf.
    """
    order: Sequence[int] = range(len(pack))
    if any(map(gt, pack.offsets, pack.offsets[1:])):
        order = sorted(order, key=pack.offsets.__getitem__)

    runs = list(_runs(pack, order))
    data = np.empty(sum([stop - start for start, stop, _ in runs]), np.uint8).data
    starts = [0] * len(pack)
    at = 0
    for start, stop, numbers in runs:
        if stop > start:
            _read(file, pack, start, data[at : at + stop - start])

        for number in numbers:
            starts[number] = pack.offsets[number] - start + at

        at += stop - start

    if verify:
        _verify(pack, data, starts)

    put_in_order(pack.specs, data, starts)
    return HostPack(pack, data, starts)


def _runs(pack: ReadPack, order: Sequence[int]) -> Iterator[tuple[int, int, list[int]]]:
    """Yield ranges of the file, each with the leaves that lie in it."""
    start = stop = 0
    numbers: list[int] = []
    for number in order:
        offset = pack.offsets[number]
        if not numbers:
            start = offset
        elif not stop <= offset <= stop + GAP:
            yield start, stop, numbers
            start, numbers = offset, []

        numbers.append(number)
        stop = offset + pack.sizes[number]

    yield start, stop, numbers


def _read(file: ReadableFile, pack: ReadPack, offset: int, buffer: memoryview) -> None:
    try:
        file.read_at(offset, [buffer])
    except TruncatedDataError as error:
        ends = [start + nbytes for start, nbytes in zip(pack.offsets, pack.sizes, strict=True)]
        cut = [number for number, end in enumerate(ends) if end > error.found]
        raise TruncatedDataError(
            error.path, error.needed, error.found, key_path=pack.key_path(cut[0] if cut else -1)
        ) from error


def _verify(pack: ReadPack, data: memoryview, starts: Sequence[int]) -> None:
    rows = zip(starts, pack.sizes, pack.crc32cs, strict=True)
    for number, (start, nbytes, expected) in enumerate(rows):
        if crc32c(data[start : start + nbytes]) != expected and expected >= 0:
            at = pack.offsets[number]
            problem = f"bytes {at} to {at + nbytes} differ from those written"
            raise ChecksumError(pack.file, problem, key_path=pack.key_path(number))

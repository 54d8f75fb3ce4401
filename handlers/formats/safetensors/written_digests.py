"""Collects the checksums of what is written into the files of a new checkpoint, and completes their heads."""

from __future__ import annotations

__all__ = ("WrittenDigests",)

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Final, final

import numpy as np
import numpy.typing as npt

from penstock.handlers.formats.checksummed_reads import append_zeros_to_each
from penstock.handlers.formats.safetensors.file_digests import BLOCK_BYTES, blocks_of, filled
from penstock.kernel.protocols.layouts import Arrangement, WrittenRange
from penstock.kernel.protocols.leaf import LeafSpec

_LENGTH_BYTES: Final = 8


@dataclass(frozen=True, slots=True, eq=False)
class _Blocks:
    """The blocks of one file, by offset."""

    starts: npt.NDArray[np.int64]
    stops: npt.NDArray[np.int64]
    crc32cs: npt.NDArray[np.uint32]  #: of what was written so far, all other bytes being absent


@final
class WrittenDigests:
    """Of one save; see `ArrangedDigests`. Thread-safe.

    A checksum is linear: that of a block is the exclusive or of those of its parts, each with zeros for
    what follows it. So parts may come in any order, and nothing is kept of them.

    Args:
        arrangement: Where every leaf goes, with heads that lack checksums.
        specs: Of all leaves.
    """

    __slots__ = ("_files", "_heads", "_lock")

    def __init__(self, arrangement: Arrangement, specs: Sequence[LeafSpec]) -> None:
        self._heads = {head.path: head.data for head in arrangement.heads}
        tensors: dict[str, list[tuple[int, int]]] = {head.path: [] for head in arrangement.heads}
        for place, spec in zip(arrangement.places, specs, strict=True):
            if place is not None:
                tensors[place.file].append((place.offset, spec.nbytes))

        self._files = {file: _blocks(sorted(found)) for file, found in tensors.items()}
        self._lock = Lock()

    @property
    def block_bytes(self) -> int:
        return BLOCK_BYTES

    def add(self, ranges: Mapping[str, Sequence[WrittenRange]]) -> None:
        for file, found in ranges.items():
            blocks = self._files[file]
            offsets, nbytes, crc32cs = np.array(found, np.int64).reshape(-1, 3).T
            at = np.searchsorted(blocks.starts, offsets, side="right") - 1
            behind = blocks.stops[at] - offsets - nbytes
            parts = append_zeros_to_each(crc32cs.astype(np.uint32), behind)
            with self._lock:
                np.bitwise_xor.at(blocks.crc32cs, at, parts)

    def head(self, file: str) -> bytes:
        data = self._heads[file]
        return data[:_LENGTH_BYTES] + filled(data[_LENGTH_BYTES:], self._files[file].crc32cs)

    def told(self) -> bytes:
        with self._lock:
            return b"".join([blocks.crc32cs.astype("<u4").tobytes() for blocks in self._files.values()])

    def join(self, told: bytes) -> None:
        theirs = np.frombuffer(told, "<u4")
        if len(theirs) != sum([len(blocks.crc32cs) for blocks in self._files.values()]):
            raise ValueError("checksums of other blocks")

        at = 0
        with self._lock:
            for blocks in self._files.values():
                blocks.crc32cs[:] ^= theirs[at : at + len(blocks.crc32cs)]
                at += len(blocks.crc32cs)


def _blocks(tensors: Sequence[tuple[int, int]]) -> _Blocks:
    offsets, nbytes = np.array(tensors, np.int64).reshape(-1, 2).T
    starts, lengths = blocks_of(offsets, nbytes)
    return _Blocks(starts, starts + lengths, np.zeros(len(starts), np.uint32))

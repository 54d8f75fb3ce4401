"""The places of the bytes of a long file while it is written in any order: objects and offsets."""

from __future__ import annotations

__all__ = ("Bytes", "Gathered", "Kept", "Run", "kept")

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias, final

import numpy as np
from crc32c import crc32c
from numpy.typing import NDArray

from penstock.handlers.stores.buckets.bucket_files import new_bytes

Bytes: TypeAlias = NDArray[np.uint8]


class Run(NamedTuple):
    """Bytes that follow each other in the file, and where they lie."""

    offset: int  #: in the file
    at: int  #: among the bytes that they were gathered with
    nbytes: int


@final
@dataclass(frozen=True, slots=True)
class Kept:
    """The bytes of one stretch of the file that lie together in one place."""

    source: str | Bytes  #: the key of an object, or bytes that are still here
    start: int  #: in the source
    nbytes: int
    crc32c: int
    offsets: NDArray[np.int64]  #: of its runs in the file; the runs lie one after another in the source
    lengths: NDArray[np.int64]


@final
class Gathered:
    """Bytes that wait until there are enough of them for an object.

    Args:
        nbytes: Of an object.
    """

    __slots__ = ("_data", "_used", "runs")

    def __init__(self, nbytes: int) -> None:
        self._data: Bytes = new_bytes(nbytes)
        self._used = 0
        self.runs: list[Run] = []

    @property
    def is_full(self) -> bool:
        """True if nothing more fits in."""
        return self._used == len(self._data)

    def take(self, offset: int, source: Bytes) -> int:
        """Copy as much of the bytes as fits in, and return how much that is."""
        taken = min(len(source), len(self._data) - self._used)
        self._data[self._used : self._used + taken] = source[:taken]
        last = self.runs[-1] if self.runs else None
        if last is not None and last.offset + last.nbytes == offset:
            self.runs[-1] = last._replace(nbytes=last.nbytes + taken)
        else:
            self.runs.append(Run(offset, self._used, taken))

        self._used += taken
        return taken

    def in_order(self) -> tuple[Bytes, Sequence[Run]]:
        """Return the bytes in the order of the file, and their runs."""
        data = self._data[: self._used]
        ascending = sorted(self.runs)
        if ascending == self.runs:
            return data, ascending

        moved: list[Run] = []
        at = 0
        for run in ascending:
            moved.append(run._replace(at=at))
            at += run.nbytes

        return np.concatenate([data[run.at : run.at + run.nbytes] for run in ascending]), moved


def kept(source: str | Bytes, data: Bytes, runs: Sequence[Run], stretch: int) -> Iterator[tuple[int, Kept]]:
    """Say which bytes of an object belong to which stretch of the file, with their checksum. Pure.

    Args:
        source: Where they will be found.
        data: All of them.
        runs: In the order of the file, and without gaps in `data`.
        stretch: The length of each stretch of the file.

    Yields:
        The number of a stretch, and what of it is there.
    """
    pieces = [piece for run in runs for piece in _cut(run, stretch)]
    first = 0
    for at in range(1, len(pieces) + 1):
        number = pieces[first].offset // stretch
        if at < len(pieces) and pieces[at].offset // stretch == number:
            continue

        some = pieces[first:at]
        start, end = some[0].at, some[-1].at + some[-1].nbytes
        offsets = np.array([piece.offset for piece in some], np.int64)
        lengths = np.array([piece.nbytes for piece in some], np.int64)
        yield number, Kept(source, start, end - start, crc32c(data[start:end].data), offsets, lengths)
        first = at


def _cut(run: Run, stretch: int) -> Iterator[Run]:
    done = 0
    while done < run.nbytes:
        offset = run.offset + done
        nbytes = min(run.nbytes - done, stretch - offset % stretch)
        yield Run(offset, run.at + done, nbytes)
        done += nbytes

"""What one process tells the primary about what it wrote: columns, compressed."""

from __future__ import annotations

__all__ = ("Part", "decoded_part", "encoded_part", "reading_part", "written_by")

import zlib
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, final

import msgpack
import numpy as np
import numpy.typing as npt

from penstock.kernel.errors import CoordinationError
from penstock.kernel.messages.save import WrittenBatch
from penstock.kernel.messages.written_columns import WrittenColumns
from penstock.kernel.protocols.leaf import LeafSpec

COLUMNS: Final = ("leaf", "chunk", "start", "file", "offset", "nbytes", "crc32c", "coded")


@final
@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """What another process told."""

    files: Sequence[str]  #: relative to the checkpoint directory
    table: npt.NDArray[np.int64]  #: a row for each of `COLUMNS`
    own: Sequence[Any]  #: of the leaves that it alone has; see `encoded_own`
    digests: Mapping[str, bytes]  #: of what it wrote of leaves, by the names to record them under


def encoded_part(
    specs: Sequence[LeafSpec],
    batches: Iterable[WrittenBatch],
    numbers: Sequence[int] | npt.NDArray[np.int64] | None = None,
    own: Sequence[Any] = (),
    digests: Mapping[str, bytes] = MappingProxyType({}),
) -> bytes:
    """Encode where everything of some batches lies.

    Neighbouring rows differ by little, so differences are what is compressed.

    Args:
        specs: Of all leaves, in flatten order.
        batches: What was written.
        numbers: By which each leaf is told of; by default its place.
        own: Told beside it: of the leaves that this process alone has.
        digests: Told beside it: of what this process wrote of leaves, by the names to record them under.
    """
    grids: dict[int, tuple[int, ...]] = {}
    files: dict[str, int] = {}
    rows: list[tuple[int, ...]] = []
    for batch in batches:
        for part in batch.parts():
            grid = grids.get(part.leaf)
            if grid is None:
                grid = grids[part.leaf] = specs[part.leaf].grid_shape

            rows.append(
                (
                    part.leaf if numbers is None else int(numbers[part.leaf]),
                    _flat(part.chunk, grid),
                    part.start,
                    files.setdefault(part.file, len(files)),
                    part.offset,
                    part.nbytes,
                    part.crc32c,
                    -1 if part.coded is None else part.coded,
                )
            )

    table = np.array(sorted(rows), np.int64).reshape(-1, len(COLUMNS))
    columns = [np.diff(column, prepend=0).astype("<i8").tobytes() for column in table.T]
    told = {"files": list(files), "columns": columns, "own": own, "digests": dict(digests)}
    return zlib.compress(msgpack.packb(told, unicode_errors="surrogatepass"), 1)


def decoded_part(data: bytes) -> Part:
    """Decode what `encoded_part` made.

    Raises:
        CoordinationError: If it is something else.
    """
    with reading_part():
        unpacked: Any = msgpack.unpackb(zlib.decompress(data), unicode_errors="surrogatepass")
        table = np.array([_summed(column) for column in unpacked["columns"]])
        return Part(list(unpacked["files"]), table, list(unpacked["own"]), dict(unpacked["digests"]))


def written_by(
    specs: Sequence[LeafSpec], part: Part, places: npt.NDArray[np.int64] | None = None
) -> WrittenBatch:
    """Return what another process wrote.

    Args:
        specs: Of all leaves.
        part: What it told.
        places: Of the leaves among all of them, by the numbers that it told; by default the same.

    Raises:
        CoordinationError: If it names what is not there.
    """
    table = part.table
    with reading_part():
        if places is not None:
            table = table.copy()
            table[0] = places[_checked(table[0], len(places))]

        _check(table, specs, part.files)

    columns = WrittenColumns(specs=specs, files=part.files, **dict(zip(COLUMNS, table, strict=True)))
    return WrittenBatch((), columns=(columns,))


@contextmanager
def reading_part() -> Generator[None]:
    """Have what is wrong with a part, in the block, be a `CoordinationError`."""
    try:
        yield
    except (zlib.error, ValueError, KeyError, TypeError, msgpack.UnpackException) as error:
        raise CoordinationError(
            f"what another process wrote cannot be read ({error}): do all processes run one penstock?"
        ) from error


def _checked(numbers: npt.NDArray[np.int64], count: int) -> npt.NDArray[np.int64]:
    """Return numbers of leaves, if each is below `count`."""
    if len(numbers) and not (numbers.min() >= 0 and numbers.max() < count):
        raise ValueError("it names what is not there")

    return numbers


def _summed(column: bytes) -> npt.NDArray[np.int64]:
    return np.cumsum(np.frombuffer(column, "<i8"))


def _check(table: npt.NDArray[np.int64], specs: Sequence[LeafSpec], files: Sequence[str]) -> None:
    """Raise `ValueError` unless every row is of a leaf, a chunk and a file that there are."""
    counts = {number: spec.n_chunks for number, spec in {id(spec): spec for spec in specs}.items()}
    n_chunks = np.array([counts[id(spec)] for spec in specs], np.int64)
    leaf, chunk, start, file, offset, nbytes, _, _ = table
    if len(leaf) and not (
        (leaf >= 0).all()
        and (leaf < len(specs)).all()
        and (chunk >= 0).all()
        and (chunk < n_chunks[leaf]).all()
        and (file >= 0).all()
        and (file < len(files)).all()
        and min(start.min(), offset.min(), nbytes.min()) >= 0
    ):
        raise ValueError("it names what is not there")


def _flat(chunk: Sequence[int], grid: Sequence[int]) -> int:
    flat = 0
    for at, size in zip(chunk, grid, strict=True):
        flat = flat * size + at

    return flat

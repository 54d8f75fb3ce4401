"""What one process tells the primary about what it wrote: columns, compressed."""

from __future__ import annotations

__all__ = ("decoded_part", "encoded_part")

import zlib
from collections.abc import Iterable, Sequence
from typing import Any, Final, cast

import msgpack
import numpy as np
import numpy.typing as npt

from penstock.kernel.errors import CoordinationError
from penstock.kernel.messages.save import WrittenBatch
from penstock.kernel.protocols.leaf import LeafSpec
from penstock.kernel.protocols.written import Written

COLUMNS: Final = ("leaf", "chunk", "start", "file", "offset", "nbytes", "crc32c", "coded")


def encoded_part(specs: Sequence[LeafSpec], batches: Iterable[WrittenBatch]) -> bytes:
    """Encode where everything of some batches lies.

    Neighbouring rows differ by little, so differences are what is compressed.

    Args:
        specs: Of all leaves, in flatten order.
        batches: What was written.
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
                    part.leaf,
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
    return zlib.compress(msgpack.packb({"files": list(files), "columns": columns}), 1)


def decoded_part(specs: Sequence[LeafSpec], data: bytes) -> WrittenBatch:
    """Decode what `encoded_part` made, of the same leaves.

    Raises:
        CoordinationError: If it is something else.
    """
    try:
        found = cast("dict[str, Any]", msgpack.unpackb(zlib.decompress(data)))
        files = cast("list[str]", found["files"])
        columns = [_summed(column) for column in cast("list[bytes]", found["columns"])]
        rows = zip(*columns, strict=True)
        written = tuple([_written(specs, files, row) for row in rows])
    except (zlib.error, ValueError, KeyError, IndexError, TypeError, msgpack.UnpackException) as error:
        raise CoordinationError(
            f"what another process wrote cannot be read ({error}): do all processes run one penstock?"
        ) from error

    return WrittenBatch((), written)


def _summed(column: bytes) -> list[int]:
    differences: npt.NDArray[np.int64] = np.frombuffer(column, "<i8")
    numbers: list[int] = np.cumsum(differences).tolist()
    return numbers


def _written(specs: Sequence[LeafSpec], files: Sequence[str], row: Sequence[int]) -> Written:
    leaf, flat, start, file, offset, nbytes, crc, coded = row
    index: list[int] = []
    for size in reversed(specs[leaf].grid_shape):
        flat, at = divmod(flat, size)
        index.append(at)

    chunk = tuple(reversed(index))
    return Written(leaf, chunk, start, files[file], offset, nbytes, crc, None if coded < 0 else coded)


def _flat(chunk: Sequence[int], grid: Sequence[int]) -> int:
    flat = 0
    for at, size in zip(chunk, grid, strict=True):
        flat = flat * size + at

    return flat

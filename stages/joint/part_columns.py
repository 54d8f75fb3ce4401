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
from penstock.kernel.messages.written_columns import WrittenColumns
from penstock.kernel.protocols.leaf import LeafSpec

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
        table = np.array([_summed(column) for column in cast("list[bytes]", found["columns"])])
        _check(table, specs, files)
    except (zlib.error, ValueError, KeyError, TypeError, msgpack.UnpackException) as error:
        raise CoordinationError(
            f"what another process wrote cannot be read ({error}): do all processes run one penstock?"
        ) from error

    columns = WrittenColumns(specs=specs, files=files, **dict(zip(COLUMNS, table, strict=True)))
    return WrittenBatch((), columns=(columns,))


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

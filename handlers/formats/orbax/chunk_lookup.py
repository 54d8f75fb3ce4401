"""The stored chunks of an array: from the entries of an index to the chunks of a grid. Pure.

A document may claim a grid of any size. What is done for it grows with the chunks that are stored, and never
with those that are not.
"""

from __future__ import annotations

__all__ = (
    "ChunkBox",
    "check_files",
    "chunk_boxes",
    "directory_index",
    "first_missing",
    "read_value",
    "stored_rows",
)

import itertools
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple, TypeAlias, final

from penstock.handlers.formats import zarr
from penstock.handlers.formats.chunk_regions import Bounds, rectangles, shape_of
from penstock.handlers.formats.inside_paths import EnteredDirectories, check_inside
from penstock.handlers.formats.leaf_table import StoredArray
from penstock.handlers.formats.zarr import METADATA_KEYS, grid_indices, prefix_of
from penstock.handlers.ocdbt.index import Index
from penstock.handlers.ocdbt.wire_format import Indirect, Inline, Value
from penstock.kernel.errors import CorruptCheckpointError, PenstockError, TruncatedDataError
from penstock.kernel.protocols.stores import Store


@final
class ChunkBox(NamedTuple):
    """A stored chunk, or a box of chunks of which none is stored."""

    start: tuple[int, ...]  #: index of the chunk, or of the first one in the box
    shape: tuple[int, ...]  #: of the box, in chunks; all 1 for a stored chunk
    value: Value | None  #: where the chunk is; None for the box

    @property
    def chunks(self) -> Bounds:
        """The box as ranges of chunk indices."""
        return tuple([(at, at + n) for at, n in zip(self.start, self.shape, strict=True)])


def chunk_boxes(index: Index, array: StoredArray, grid: Bounds) -> Iterator[ChunkBox]:
    """Yield what is stored of a part of an array's grid, and boxes of what is not; together they tile it.

    Args:
        index: Where all chunks are.
        array: Whose keys to look up.
        grid: Ranges of chunk indices, none of them empty.
    """
    extent, lows = shape_of(grid), [low for low, _ in grid]
    ones = (1,) * len(grid)
    if extent == ones:  # as of nearly every leaf: there is nothing to tile
        row = index.rows.get((array.prefix + array.format.chunk_key(lows)).encode())
        yield ChunkBox(tuple(lows), ones, None if row is None else index.value(row))
        return

    done = 0  # chunks passed so far, in C order
    for at, row in stored_rows(index, array, grid):
        flat = 0
        for i, low, n in zip(at, lows, extent, strict=True):
            flat = flat * n + i - low

        yield from _boxes(extent, lows, done, flat)
        yield ChunkBox(at, ones, index.value(row))
        done = flat + 1

    yield from _boxes(extent, lows, done, math.prod(extent))


def first_missing(index: Index, array: StoredArray, grid: Bounds) -> tuple[int, ...] | None:
    """Return the index of the first chunk that is not stored; None if all are."""
    return next((found.start for found in chunk_boxes(index, array, grid) if found.value is None), None)


def _boxes(extent: tuple[int, ...], lows: list[int], first: int, stop: int) -> Iterator[ChunkBox]:
    for _, start, shape in rectangles(extent, first, stop):
        yield ChunkBox(tuple(map(int.__add__, start, lows)), shape, None)


def stored_rows(index: Index, array: StoredArray, grid: Bounds) -> Iterator[tuple[tuple[int, ...], int]]:
    """Yield index and row of every chunk that is stored, in C order."""
    rows = index.rows_below(array.prefix.encode())
    if math.prod(shape_of(grid)) <= 2 * len(rows):
        get = index.rows.get
        for at in grid_indices(grid):
            row = get((array.prefix + array.format.chunk_key(at)).encode())
            if row is not None:
                yield at, row

        return

    keys = index.keys_in_order
    there: list[tuple[tuple[int, ...], int]] = []
    for row in rows:
        found = array.format.chunk_index(keys[row][len(array.prefix.encode()) :])
        if found is not None and all(lo <= i < hi for i, (lo, hi) in zip(found, grid, strict=True)):
            there.append((found, row))

    yield from sorted(there)


MOST_LOOKED_FOR: Final = 16
"""An array with at most this many chunks is looked up chunk by chunk; for more its directory is listed."""


Check: TypeAlias = Callable[[str, bytes], None]
"""Compares a document, by its name and content, with what was written."""


def _as_it_is(name: str, data: bytes, /) -> None:
    """Accept a document without a comparison."""


MOST_VALUE_BYTES: Final = 2**20
"""The longest metadata of an array. That of an array with 64 axes has some thousand bytes."""


def directory_index(
    store: Store, directory: str, names: Iterable[str], check: Check = _as_it_is
) -> dict[bytes, Value]:
    """Index arrays that are in a directory each, as an OCDBT database would.

    Raises:
        ChecksumError: If the metadata of an array is not as it was written; `check` raises it.
        CorruptCheckpointError: If a name leads out of `directory`.
    """
    names = list(names)
    for name in names:
        check_inside(directory, name)

    index: dict[bytes, Value] = {}
    for name in _add_small(index, store, directory, names, check):
        for key, is_file in _entries(store, directory, name):
            path = os.path.join(directory, key)
            is_metadata = key.rpartition("/")[2] in METADATA_KEYS
            if not is_file and not is_metadata:
                index[key.encode()] = Indirect(key, 0, -1)  # no chunk has this length
            elif is_file and is_metadata:
                data = store.read_file(path)
                check(key, data)
                index[key.encode()] = Inline(data)
            elif is_file:
                index[key.encode()] = Indirect(key, 0, store.size(path))

    return index


def _add_small(
    index: dict[bytes, Value], store: Store, directory: str, names: list[str], check: Check
) -> list[str]:
    """Look for the chunks of arrays that have few, by their names; return the arrays that remain."""
    chunks_of: dict[bytes, Sequence[str] | None] = {}
    chunks: list[str] = []
    left: list[str] = []
    for metadata_key in METADATA_KEYS:
        keys = [f"{prefix_of(name)}{metadata_key}" for name in names]
        documents = store.read_files([f"{directory}/{key}" for key in keys])
        for name, key, data in zip(names, keys, documents, strict=True):
            if data is None:
                continue

            check(key, data)
            if data not in chunks_of:
                chunks_of[data] = _few_chunks(key, data)

            found = chunks_of[data]
            if found is None:
                left.append(name)
            else:
                index[key.encode()] = Inline(data)
                chunks.extend([f"{prefix_of(name)}{chunk}" for chunk in found])

        names = [name for name, data in zip(names, documents, strict=True) if data is None]

    for key, nbytes in zip(chunks, store.file_sizes([f"{directory}/{key}" for key in chunks]), strict=True):
        if nbytes is not None:
            index[key.encode()] = Indirect(key, 0, nbytes)

    return [*left, *names]


def _few_chunks(path: str, document: bytes) -> Sequence[str] | None:
    """The names of the chunks of an array; None if they are many, or the document cannot be read."""
    try:
        form = zarr.decode(path, document)
    except PenstockError:
        return None  # reported when it is needed

    if math.prod(form.grid_shape) > MOST_LOOKED_FOR:
        return None

    return [form.chunk_key(at) for at in itertools.product(*map(range, form.grid_shape))]


def read_value(store: Store, directory: str, value: Value) -> bytes:
    """Fetch a small value, from the index itself or from a data file."""
    if isinstance(value, Inline):
        return value.value

    path = os.path.join(directory, value.file)
    if value.length > MOST_VALUE_BYTES:
        raise CorruptCheckpointError(path, f"{value.length} bytes are no metadata of an array")

    data = bytearray(value.length)
    file = store.open_data_file(path)
    try:
        file.read_at(value.offset, [memoryview(data)])
    finally:
        file.close()

    return bytes(data)


def check_files(store: Store, directory: str, needed: Mapping[str, int], *, whole: bool = True) -> None:
    """Check that every data file is in `directory` and, if it must be whole, is as long as the index needs.

    Args:
        store: Where.
        directory: What the files are relative to.
        needed: Bytes that must be in each file.
        whole: Whether to look at the files at all, or only at their names.

    Raises:
        TruncatedDataError: If one is too short.
        CorruptCheckpointError: If one is missing, or is outside of `directory`.
    """
    for file in needed:
        check_inside(directory, file)
    if not whole:
        return

    paths = [os.path.join(directory, file) for file in needed]
    sizes = store.file_sizes(paths)
    for path, nbytes, found in zip(paths, needed.values(), sizes, strict=True):
        if found is None or found < 0:
            raise CorruptCheckpointError(path, "is missing, and the index refers to it")
        if found < nbytes:
            raise TruncatedDataError(path, nbytes, found)


def _entries(store: Store, directory: str, name: str) -> Iterator[tuple[str, bool]]:
    """Yield every path below a directory, relative to it, and whether it is a file.

    Raises:
        CorruptCheckpointError: If links make too many paths.
    """
    if store.kind(os.path.join(directory, name)) != "directory":
        return

    entered = EnteredDirectories(store)
    pending = [name]
    while pending:
        outer = pending.pop()
        path = os.path.join(directory, outer)
        entered.enter(path)
        for entry in store.list_directory(path):
            inner = f"{outer}/{entry}" if outer else entry
            is_directory = store.kind(os.path.join(directory, inner)) == "directory"
            yield inner, not is_directory
            if is_directory:
                pending.append(inner)

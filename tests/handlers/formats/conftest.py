"""Small checkpoints, written by penstock's layout or by Orbax, and a twenty-line reader."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import crc32c
import numpy as np
import pytest
from tests.unsealed import unseal

from penstock.handlers import LocalStore, OrbaxLayout
from penstock.handlers.dtypes import dtype_name, numpy_dtype
from penstock.handlers.formats.orbax.stored_checkpoint import OrbaxCheckpoint
from penstock.kernel import (
    CheckedRead,
    DirectRead,
    Document,
    DriverRead,
    KeyKind,
    Leaf,
    LeafSpec,
    ParamInfo,
    ScatterRead,
    StoredLeaf,
    TileRead,
    Written,
    WrittenBatch,
)
from penstock.kernel.protocols import Destination, SharedRead, WrittenTable

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]
Bounds: TypeAlias = tuple[tuple[int, int], ...]


class Buffer:
    """A destination that begins full of rubbish."""

    def __init__(self, bounds: Bounds, itemsize: int) -> None:
        self.bounds = bounds
        self.nbytes = math.prod(stop - start for start, stop in bounds) * itemsize
        self._bytes = bytearray(b"\xa5" * self.nbytes)

    def fresh(self) -> Buffer:
        raise NotImplementedError

    def view(self) -> memoryview:
        return memoryview(self._bytes)


class MakeLeaf(Protocol):
    def __call__(self, index: int, path: Sequence[str | int], typestr: str = ..., **spec: Any) -> Leaf: ...


class WriteFlat(Protocol):
    def __call__(
        self,
        directory: Path,
        leaves: Sequence[Leaf],
        arrays: Mapping[int, Array],
        *,
        piece_bytes: int = ...,
        custom_metadata: Mapping[str, Any] | None = ...,
    ) -> list[Document]: ...


class ReadPart(Protocol):
    async def __call__(
        self,
        checkpoint: OrbaxCheckpoint,
        leaf: StoredLeaf,
        bounds: Bounds | None = ...,
        piece_bytes: int = ...,
    ) -> Array: ...


def _make_leaf(index: int, path: Sequence[str | int], typestr: str = "np.ndarray", **spec: Any) -> Leaf:
    kinds = tuple(KeyKind.SEQUENCE if isinstance(key, int) else KeyKind.MAPPING for key in path)
    info = ParamInfo(tuple(map(str, path)), kinds, "".join(f"[{key!r}]" for key in path))
    value = spec.pop("like", None)
    if value is not None:
        spec = {
            "shape": value.shape,
            "dtype": dtype_name(value.dtype),
            "itemsize": value.dtype.itemsize,
            "chunk_shape": tuple(max(1, n) for n in value.shape),
        } | spec

    handler: Any = None  # the layout never looks at it
    return Leaf(index, info, None, LeafSpec(typestr, **spec), handler)


def _lay_out(
    leaves: Sequence[Leaf], arrays: Mapping[int, Array], file: str, piece_bytes: int
) -> Iterator[tuple[Written, bytes]]:
    """Cut every chunk into pieces, one after another in one file."""
    offset = 0
    for leaf in leaves:
        if leaf.index not in arrays:
            continue

        array, chunk_shape = arrays[leaf.index], leaf.spec.chunk_shape
        counts = [n // chunk for n, chunk in zip(array.shape, chunk_shape, strict=True)]
        for index in itertools.product(*map(range, counts)):
            part = array[tuple(slice(i * n, i * n + n) for i, n in zip(index, chunk_shape, strict=True))]
            data = part.tobytes()
            for start in range(0, len(data), piece_bytes):
                piece = data[start : start + piece_bytes]
                crc = crc32c.crc32c(piece)
                yield Written(leaf.index, index, start, file, offset, len(piece), crc), piece
                offset += len(piece)


def _write_flat(
    directory: Path,
    leaves: Sequence[Leaf],
    arrays: Mapping[int, Array],
    *,
    piece_bytes: int = 1000,
    custom_metadata: Mapping[str, Any] | None = None,
) -> list[Document]:
    layout = OrbaxLayout()
    file = layout.data_file()
    laid_out = list(_lay_out(leaves, arrays, file, piece_bytes))
    specs = {leaf.index: leaf.spec for leaf in leaves}
    written = [WrittenBatch((), WrittenTable.of([piece for piece, _ in laid_out], specs))]
    documents = list(layout.documents(leaves, written, started_ns=1, custom_metadata=custom_metadata))
    for document in [Document(file, b"".join(data for _, data in laid_out)), *documents]:
        path = directory / document.path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(document.data)

    unseal(directory)  # so that tests may change documents
    return documents


async def _read_part(
    checkpoint: OrbaxCheckpoint, leaf: StoredLeaf, bounds: Bounds | None = None, piece_bytes: int = 1 << 20
) -> Array:
    if bounds is None:
        assert leaf.spec.shape is not None
        bounds = tuple((0, n) for n in leaf.spec.shape)
    region: Destination = Buffer(bounds, leaf.spec.itemsize)
    for read in checkpoint.reads(7, leaf, region, piece_bytes):
        assert read.leaf == 7
        if isinstance(read, DriverRead):
            await read.perform()
            continue

        assert not isinstance(read, SharedRead | TileRead), "a checkpoint gives the reads of one leaf"
        assert read.nbytes <= piece_bytes or read.crc32c is not None  # a piece that is checked stays whole
        file = LocalStore().open_data_file(read.file)
        if isinstance(read, CheckedRead):
            assert read.fill(file.read_at, crc32c.crc32c) == read.crc32c
            file.close()
            continue

        data = read.into() if isinstance(read, DirectRead) else memoryview(bytearray(read.nbytes))
        file.read_at(read.offset, [data])
        file.close()
        assert read.crc32c in {None, crc32c.crc32c(data)}
        if isinstance(read, ScatterRead):
            read.scatter(data)

    shape = [stop - start for start, stop in bounds]
    return np.frombuffer(region.view(), numpy_dtype(leaf.spec.dtype)).reshape(shape)


@pytest.fixture(scope="session")
def make_leaf() -> MakeLeaf:
    """A leaf at a path of strings and ints; `like=array` fills in its spec, one chunk."""
    return _make_leaf


@pytest.fixture(scope="session")
def write_flat() -> WriteFlat:
    """Write a whole checkpoint, as the stages would; `arrays` are the values by leaf index."""
    return _write_flat


@pytest.fixture(scope="session")
def read_part() -> ReadPart:
    """Perform all reads of one region, one after another."""
    return _read_part

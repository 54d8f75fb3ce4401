"""Leaves, and where they lie, as seen from the directory of their item."""

from __future__ import annotations

__all__ = ("LeafInItem", "below", "written_in")

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import numpy as np
import numpy.typing as npt

from penstock.handlers.formats.integrity import running_of
from penstock.kernel.protocols.leaf import LeafSpec, ParamInfo
from penstock.kernel.protocols.views import ColumnsOfParts, PackedLeaves, StagedLeaf, WrittenLeaves
from penstock.kernel.protocols.written import Document, Written


@final
@dataclass(frozen=True, slots=True)
class LeafInItem:
    """A leaf in its item, without its value, which is no longer needed."""

    index: int
    info: ParamInfo
    spec: LeafSpec
    value: object = None

    @property
    def nbytes(self) -> int:
        return self.spec.nbytes


@final
@dataclass(frozen=True, slots=True)
class _PackInItem:
    leaves: Sequence[StagedLeaf]
    indices: Sequence[int]
    chunk_sizes: Sequence[int]
    file: str
    offset: int
    nbytes: int
    crc32cs: Sequence[int]
    inner: PackedLeaves

    def parts(self) -> Iterator[Written]:
        for part in self.inner.parts():
            yield replace(part, file=self.file)


@final
@dataclass(frozen=True, slots=True, eq=False)
class _ColumnsInItem:
    files: Sequence[str]
    leaf: Any
    chunk: Any
    start: Any
    file: Any
    offset: Any
    nbytes: Any
    crc32c: Any
    coded: Any
    block_bytes: Any
    running: Any
    inner: ColumnsOfParts
    rows: npt.NDArray[np.int64]  #: of these, there

    @classmethod
    def of(cls, inner: ColumnsOfParts, prefix: str) -> _ColumnsInItem:
        here = np.array([file.startswith(prefix) for file in inner.files], np.bool_)
        rows = np.flatnonzero(here[inner.file])
        return cls(
            [file.removeprefix(prefix) for file in inner.files],
            inner.leaf[rows],
            inner.chunk[rows],
            inner.start[rows],
            inner.file[rows],
            inner.offset[rows],
            inner.nbytes[rows],
            inner.crc32c[rows],
            inner.coded[rows],
            inner.block_bytes[rows],
            running_of(inner.running, inner.nbytes, inner.block_bytes, rows),
            inner,
            rows,
        )

    def parts(self, rows: Iterable[int] | None = None) -> Iterator[Written]:
        at = range(len(self.rows)) if rows is None else list(rows)
        for row, part in zip(at, self.inner.parts([self.rows[row] for row in at]), strict=True):
            yield replace(part, file=self.files[self.file[row]])


@final
@dataclass(frozen=True, slots=True)
class _WrittenInItem:
    written: Sequence[Written]
    packs: Sequence[_PackInItem]
    columns: Sequence[_ColumnsInItem]

    def parts(self) -> Iterator[Written]:
        yield from self.written
        for pack in self.packs:
            yield from pack.parts()
        for columns in self.columns:
            yield from columns.parts()


def below(directory: str, documents: Iterable[Document]) -> Iterator[Document]:
    """Yield the documents of an item, named from the checkpoint."""
    for document in documents:
        yield replace(document, path=f"{directory}/{document.path}")
        del document  # while the next one is made


def written_in(directory: str, batches: Sequence[WrittenLeaves]) -> list[WrittenLeaves]:
    """Return what was written into an item's directory, with file names relative to it."""
    prefix = f"{directory}/"
    n = len(prefix)
    found: list[WrittenLeaves] = []
    for batch in batches:
        written = [replace(w, file=w.file[n:]) for w in batch.written if w.file.startswith(prefix)]
        packs = [
            _PackInItem(
                pack.leaves,
                pack.indices,
                pack.chunk_sizes,
                pack.file[n:],
                pack.offset,
                pack.nbytes,
                pack.crc32cs,
                pack,
            )
            for pack in batch.packs
            if pack.file.startswith(prefix)
        ]
        columns = [_ColumnsInItem.of(each, prefix) for each in batch.columns]
        if written or packs or columns:
            found.append(_WrittenInItem(written, packs, columns))

    return found

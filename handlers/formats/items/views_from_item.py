"""Leaves, and where they lie, as seen from the directory of their item."""

from __future__ import annotations

__all__ = ("LeafInItem", "written_in")

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import final

from penstock.kernel.protocols.leaf import LeafSpec, ParamInfo
from penstock.kernel.protocols.views import PackedLeaves, StagedLeaf, WrittenLeaves
from penstock.kernel.protocols.written import Written


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
@dataclass(frozen=True, slots=True)
class _WrittenInItem:
    written: Sequence[Written]
    packs: Sequence[_PackInItem]

    def parts(self) -> Iterator[Written]:
        yield from self.written
        for pack in self.packs:
            yield from pack.parts()


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
        if written or packs:
            found.append(_WrittenInItem(written, packs))

    return found

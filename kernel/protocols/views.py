"""Views of a message for handlers and layouts: only the leaf itself."""

from __future__ import annotations

__all__ = ("ColumnsOfParts", "FilledLeaf", "FilledPack", "PackedLeaves", "StagedLeaf", "WrittenLeaves")

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

from penstock.kernel.protocols.leaf import LeafSpec, ParamInfo, StoredLeaf
from penstock.kernel.protocols.reads import Target
from penstock.kernel.protocols.written import Written


class StagedLeaf(Protocol):
    """A leaf that is being saved."""

    @property
    def index(self) -> int:
        """Its place in flatten order."""
        ...

    @property
    def info(self) -> ParamInfo: ...
    @property
    def value(self) -> object: ...
    @property
    def spec(self) -> LeafSpec: ...
    @property
    def nbytes(self) -> int:
        """Its stored array bytes."""
        ...


class FilledLeaf(Protocol):
    """A leaf that is being restored; the regions of its target are filled when a value is to be built."""

    @property
    def index(self) -> int:
        """Its place in the result's flatten order; of a part, a negative number of its own."""
        ...

    @property
    def info(self) -> ParamInfo: ...
    @property
    def stored(self) -> StoredLeaf: ...
    @property
    def target(self) -> Target: ...


class FilledPack(Protocol):
    """Small leaves whose bytes lie in one buffer; columns of one length."""

    @property
    def specs(self) -> Sequence[LeafSpec]: ...
    @property
    def sizes(self) -> Sequence[int]:
        """Bytes of each leaf."""
        ...

    @property
    def details(self) -> Sequence[Any]:
        """The result of the handler's `pack_details` for each leaf."""
        ...

    @property
    def data(self) -> memoryview:
        """The bytes of all leaves; gone once the values are built."""
        ...

    @property
    def starts(self) -> Sequence[int]:
        """The offset of each leaf's bytes in `data`."""
        ...


class PackedLeaves(Protocol):
    """The place of small leaves that were written one after the other without a gap."""

    @property
    def leaves(self) -> Sequence[StagedLeaf]: ...
    @property
    def indices(self) -> Sequence[int]:
        """The places of the leaves in flatten order."""
        ...

    @property
    def chunk_sizes(self) -> Sequence[int]:
        """Bytes of each chunk, leaf by leaf, in C order of each leaf's grid."""
        ...

    @property
    def file(self) -> str:
        """Relative to the checkpoint directory."""
        ...

    @property
    def offset(self) -> int:
        """Of the first chunk in the file, bytes."""
        ...

    @property
    def nbytes(self) -> int: ...
    @property
    def crc32cs(self) -> Sequence[int]:
        """One for each chunk."""
        ...

    def parts(self) -> Iterator[Written]:
        """Yield where each chunk lies."""
        ...


class ColumnsOfParts(Protocol):
    """A `Written` in each row; every column is an array of int64."""

    @property
    def files(self) -> Sequence[str]:
        """Relative to the checkpoint directory."""
        ...

    @property
    def leaf(self) -> Any: ...
    @property
    def chunk(self) -> Any:
        """The chunk's place in C order of the leaf's grid."""
        ...

    @property
    def start(self) -> Any: ...
    @property
    def file(self) -> Any:
        """The number of the file in `files`."""
        ...

    @property
    def offset(self) -> Any: ...
    @property
    def nbytes(self) -> Any: ...
    @property
    def crc32c(self) -> Any: ...
    @property
    def coded(self) -> Any:
        """The encoded length of the chunk; -1 where it is not encoded."""
        ...

    @property
    def block_bytes(self) -> Any:
        """Of `Written.running`; 0 where there is none."""
        ...

    @property
    def running(self) -> Any:
        """The checksums of `Written.running`, row after row."""
        ...

    def parts(self, rows: Iterable[int] | None = None) -> Iterator[Written]:
        """Yield all rows, or some of them, as objects, without `running`."""
        ...


class WrittenLeaves(Protocol):
    """The places of the bytes of leaves."""

    @property
    def written(self) -> Sequence[Written]: ...
    @property
    def packs(self) -> Sequence[PackedLeaves]: ...
    @property
    def columns(self) -> Sequence[ColumnsOfParts]: ...
    def parts(self) -> Iterator[Written]:
        """Yield where everything lies, piece by piece."""
        ...

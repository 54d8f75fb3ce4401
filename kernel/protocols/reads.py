"""What a restore reads, and where the bytes go."""

from __future__ import annotations

__all__ = (
    "Adopting",
    "Destination",
    "DirectRead",
    "DriverRead",
    "OpaqueChunk",
    "Read",
    "ScatterRead",
    "Target",
    "WholeChunks",
)

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias, final, runtime_checkable


class Destination(Protocol):
    """A host buffer for one rectangular part of a global array, allocated on first access."""

    @property
    def bounds(self) -> tuple[tuple[int, int], ...]:
        """(start, stop) along each axis of the global array."""
        ...

    @property
    def nbytes(self) -> int: ...

    def view(self) -> memoryview:
        """The buffer: writable, contiguous, C order, as bytes. Thread-safe."""
        ...


@runtime_checkable
class Adopting(Protocol):
    """A `Destination` that can use memory that is already filled."""

    @property
    def nbytes(self) -> int: ...

    def adopt(self, memory: memoryview) -> None:
        """Use these read-only bytes instead of memory of its own. Called before the first access."""
        ...


@final
@dataclass(frozen=True, slots=True, eq=False)
class WholeChunks:
    """Where leaves of one raw chunk each lie, in columns of one length (except `files`)."""

    files: Sequence[str]  #: absolute
    ids: Sequence[int]  #: index in `files`; -1 for a leaf that has to be read in another way
    offsets: Sequence[int]  #: bytes from the start of the file
    crc32cs: Sequence[int]  #: of the bytes as they were written; -1 if it is not known


@dataclass(frozen=True, slots=True)
class Target:
    """What a handler needs read for one leaf."""

    regions: tuple[Destination, ...] = ()  #: distinct parts of the global array; together all that is needed
    staging_bytes: int = 0  #: host bytes that are freed once the value is built (0 if the value keeps them)
    detail: object = None  #: the handler's own, for `build`


@dataclass(frozen=True, slots=True)
class DirectRead:
    """A range of a file that goes unchanged to one place in the destination."""

    leaf: int
    file: str  #: absolute
    offset: int
    nbytes: int
    region: Destination
    start: int  #: offset in the region's bytes
    crc32c: int | None = None  #: of these bytes as they were written, if that is known

    def into(self) -> memoryview:
        """Where the bytes go; allocates the region on first use."""
        return self.region.view()[self.start : self.start + self.nbytes]


@dataclass(frozen=True, slots=True)
class OpaqueChunk:
    """An opaque range: its bytes are meaningless until a stage undoes what the save did."""

    codec: str  #: the name the saving stage gave it
    name: str  #: stored name of the leaf
    key_path: str
    chunk: tuple[int, ...]
    start: int = 0  #: offset in the chunk, bytes: it is always all of it


@dataclass(frozen=True, slots=True)
class ScatterRead:
    """A range of a file that is spread over a destination (another sharding than the stored one)."""

    leaf: int
    file: str  #: absolute
    offset: int
    nbytes: int
    scatter: Callable[[memoryview], None]  #: blocking; copies out of the buffer it is given
    crc32c: int | None = None  #: of these bytes as they were written, if that is known
    opaque: OpaqueChunk | None = None  #: set if `scatter` needs bytes other than those stored


@dataclass(frozen=True, slots=True)
class DriverRead:
    """A read that another library's driver performs (TensorStore, for chunks with a codec)."""

    leaf: int
    nbytes: int
    perform: Callable[[], Awaitable[None]]  #: returns when the destination is filled


Read: TypeAlias = DirectRead | ScatterRead | DriverRead

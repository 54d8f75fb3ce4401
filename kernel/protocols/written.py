"""Pieces of leaves: as a handler plans them, and the table of where they were written."""

from __future__ import annotations

__all__ = (
    "COLUMNS",
    "DISK_MARK",
    "STAGE_RECORD",
    "ByIndex",
    "DiskMark",
    "Document",
    "PiecePlan",
    "RunningSums",
    "Written",
    "WrittenLeaves",
    "WrittenTable",
)

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Final, Protocol, TypeAlias, TypeVar, cast, final, overload

from penstock.kernel.concurrency.brief_steps import integers
from penstock.kernel.errors import CorruptCheckpointError, PenstockError
from penstock.kernel.protocols.leaf import LeafSpec

COLUMNS: Final = ("leaf", "chunk", "start", "file", "offset", "nbytes", "crc32c", "coded", "block_bytes")
"""The columns of a `WrittenTable`, in the order in which processes tell each other their rows."""

STAGE_RECORD: Final = "_PENSTOCK_STAGES"
"""The document that says what stages did to leaves: ours, beside a layout's own, and ignored by Orbax."""
DISK_MARK: Final = "_PENSTOCK_DISK"
"""The document that says which part of what a job saved is on a disk of one process; ours, too."""


@dataclass(frozen=True, slots=True)
class PiecePlan:
    """The way of one piece to the host: planned by a handler, carried out by `device_to_host`."""

    chunk: tuple[int, ...]  #: grid index of the chunk that the piece belongs to
    start: int  #: offset of the piece in its chunk, bytes
    nbytes: int
    cost: int  #: host bytes that `take` allocates: 0 if it returns a view of existing memory
    take: Callable[[], memoryview]  #: blocking; returns `nbytes` contiguous bytes
    begin: Callable[[], None] | None = None
    """Starts what `take` waits for, and returns at once. Called once `cost` is leased, or never."""


@final
@dataclass(frozen=True, slots=True)
class RunningSums:
    """The crc32c of a piece up to the end of each block but the last, so that parts can be compared."""

    block_bytes: int
    crc32cs: bytes  #: of the first block, the first two, and so on: 4 bytes each, little-endian


@dataclass(frozen=True, slots=True)
class Written:
    """The place to which a piece was written."""

    leaf: int  #: index of the leaf
    chunk: tuple[int, ...]
    start: int  #: offset in the chunk, bytes
    file: str  #: relative to the checkpoint directory
    offset: int  #: of the piece in that file, bytes; the chunk begins at `offset - start`
    nbytes: int
    crc32c: int
    coded: int | None = None  #: if the chunk is encoded: its encoded length, bytes
    running: RunningSums | None = None  #: if the piece has several blocks, and parts of it can be of use


T_co = TypeVar("T_co", covariant=True)

Column: TypeAlias = Any
"""Integers of 64 bits, as an `array` or as an array of NumPy, of which the kernel knows nothing."""


class ByIndex(Protocol[T_co]):
    """A column of all leaves of a tree, or of some by their place in flatten order."""

    def __getitem__(self, index: int, /) -> T_co: ...


@final
@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class WrittenTable(Sequence[Written]):
    """A `Written` in each row, in columns of one length; only `files` and `running` are longer or shorter.

    To a stage it is a sequence of `Written`s like any other. They are made on access.
    """

    specs: ByIndex[LeafSpec]  #: of these leaves and perhaps of others
    files: Sequence[str]  #: relative to the checkpoint directory
    leaf: Column
    chunk: Column  #: the chunk's place in C order of the leaf's grid
    start: Column
    file: Column  #: number in `files`
    offset: Column
    nbytes: Column
    crc32c: Column
    coded: Column  #: -1 where the chunk is not encoded
    block_bytes: Column  #: of `Written.running`; 0 where there is none
    running: bytes = b""  #: the checksums of these, row after row

    @classmethod
    def of(cls, parts: Iterable[Written], specs: ByIndex[LeafSpec]) -> WrittenTable:
        """Put rows into columns.

        Raises:
            PenstockError: If a chunk is outside of the grid of its leaf.
        """
        rows = list(parts)
        files = {name: number for number, name in enumerate(dict.fromkeys([part.file for part in rows]))}
        return cls(
            specs=specs,
            files=list(files),
            leaf=integers([part.leaf for part in rows]),
            chunk=integers(_numbers_of(rows, specs)),
            start=integers([part.start for part in rows]),
            file=integers([files[part.file] for part in rows]),
            offset=integers([part.offset for part in rows]),
            nbytes=integers([part.nbytes for part in rows]),
            crc32c=integers([part.crc32c for part in rows]),
            coded=integers([-1 if part.coded is None else part.coded for part in rows]),
            block_bytes=integers([0 if part.running is None else part.running.block_bytes for part in rows]),
            running=b"".join([part.running.crc32cs for part in rows if part.running is not None]),
        )

    def rows(self, numbers: Iterable[int]) -> Iterator[Written]:
        """Yield some rows as objects."""
        ends = self._running_ends() if self.running else ()
        for number in numbers:
            leaf, coded = int(self.leaf[number]), int(self.coded[number])
            block_bytes, running = int(self.block_bytes[number]), None
            if block_bytes:
                sums = self.running[4 * ends[number] : 4 * ends[number + 1]]
                running = RunningSums(block_bytes, sums)

            yield Written(
                leaf,
                _index_of(int(self.chunk[number]), self.specs[leaf].grid_shape),
                int(self.start[number]),
                self.files[int(self.file[number])],
                int(self.offset[number]),
                int(self.nbytes[number]),
                int(self.crc32c[number]),
                None if coded < 0 else coded,
                running,
            )

    def _running_ends(self) -> Sequence[int]:
        """Return where in `running` the checksums of each row begin, and where those of the last one end."""
        sizes = zip(self.nbytes.tolist(), self.block_bytes.tolist(), strict=True)
        return list(accumulate([(n - 1) // block if block else 0 for n, block in sizes], initial=0))

    def __len__(self) -> int:
        return len(self.leaf)

    @overload
    def __getitem__(self, number: int, /) -> Written: ...
    @overload
    def __getitem__(self, number: slice, /) -> tuple[Written, ...]: ...
    def __getitem__(self, number: int | slice, /) -> Written | tuple[Written, ...]:
        if isinstance(number, slice):
            return tuple(self.rows(range(len(self))[number]))

        (row,) = self.rows((range(len(self))[number],))
        return row

    def __iter__(self) -> Iterator[Written]:
        return self.rows(range(len(self)))


def _numbers_of(rows: Sequence[Written], specs: ByIndex[LeafSpec]) -> list[int]:
    known: dict[tuple[int, tuple[int, ...]], int] = {}  # most leaves share a few specs
    numbers: list[int] = []
    for part in rows:
        spec = specs[part.leaf]
        number = known.get((id(spec), part.chunk))
        if number is None:
            number = known[id(spec), part.chunk] = _number_of(part, spec.grid_shape)

        numbers.append(number)

    return numbers


def _number_of(part: Written, grid: Sequence[int]) -> int:
    number, fits = 0, len(part.chunk) == len(grid)
    for at, size in zip(part.chunk, grid, strict=False):
        number, fits = number * size + at, fits and 0 <= at < size
    if not fits:
        raise PenstockError(
            f"chunk {part.chunk} of leaf {part.leaf} was written, but no leaf of the tree has it"
        )

    return number


def _index_of(number: int, grid: Sequence[int]) -> tuple[int, ...]:
    index: list[int] = []
    for size in reversed(grid):
        number, at = divmod(number, size)
        index.append(at)

    return tuple(reversed(index))


class WrittenLeaves(Protocol):
    """The places and checksums of leaves that were written."""

    @property
    def written(self) -> WrittenTable: ...


@dataclass(frozen=True, slots=True)
class Document:
    """A small file of a checkpoint."""

    path: str  #: relative to the checkpoint directory
    data: bytes


@final
@dataclass(frozen=True, slots=True)
class DiskMark:
    """A process' note in the checkpoint on its disk."""

    process: int  #: who wrote it
    processes: tuple[int, ...]  #: who saved together, ascending
    save: str  #: the same in what all of them wrote, and in no other checkpoint

    def encoded(self) -> bytes:
        """Return the document."""
        fields = {"version": 1, "process": self.process, "processes": self.processes, "save": self.save}
        return json.dumps(fields, separators=(",", ":")).encode()

    @classmethod
    def decoded(cls, path: str, data: bytes) -> DiskMark:
        """Read what `encoded` made.

        Raises:
            CorruptCheckpointError: If it is something else; `path` is where it was found.
        """
        try:
            fields = cast("dict[str, Any]", json.loads(data))
            processes = tuple([int(index) for index in fields["processes"]])
            return cls(int(fields["process"]), processes, str(fields["save"]))
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise CorruptCheckpointError(path, f"does not say whose part this is: {error}") from error

"""The pieces that a handler plans of a leaf, and their places on the medium in the end."""

from __future__ import annotations

__all__ = ("DISK_MARK", "STAGE_RECORD", "DiskMark", "Document", "PiecePlan", "RunningSums", "Written")

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, cast, final

from penstock.kernel.errors import CorruptCheckpointError

STAGE_RECORD: Final = "_PENSTOCK_STAGES"
"""The document that says what stages did to leaves: ours, beside a layout's own, and ignored by Orbax."""
DISK_MARK: Final = "_PENSTOCK_DISK"
"""The document that says which part of what a job saved lies on a disk of one process; ours, too."""


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

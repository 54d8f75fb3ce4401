"""What a handler plans of a leaf on its way out, and what stands on the medium in the end."""

from __future__ import annotations

__all__ = ("STAGE_RECORD", "Document", "PiecePlan", "Written")

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

STAGE_RECORD: Final = "_PENSTOCK_STAGES"
"""The document that says what stages did to leaves: ours, beside a layout's own, and ignored by Orbax."""


@dataclass(frozen=True, slots=True)
class PiecePlan:
    """How to get one piece to the host: planned by a handler, carried out by `device_to_host`."""

    chunk: tuple[int, ...]  #: grid index of the chunk that the piece belongs to
    start: int  #: offset of the piece in its chunk, bytes
    nbytes: int
    cost: int  #: host bytes that `take` allocates: 0 if it returns a view of existing memory
    take: Callable[[], memoryview]  #: blocking; returns `nbytes` contiguous bytes
    begin: Callable[[], None] | None = None
    """Starts what `take` waits for, and returns at once. Called once `cost` is leased, or never."""


@dataclass(frozen=True, slots=True)
class Written:
    """Where a piece was written."""

    leaf: int  #: index of the leaf
    chunk: tuple[int, ...]
    start: int  #: offset in the chunk, bytes
    file: str  #: relative to the checkpoint directory
    offset: int  #: of the piece in that file, bytes; the chunk begins at `offset - start`
    nbytes: int
    crc32c: int
    coded: int | None = None  #: if the chunk is encoded: its encoded length, bytes


@dataclass(frozen=True, slots=True)
class Document:
    """A small file of a checkpoint."""

    path: str  #: relative to the checkpoint directory
    data: bytes

"""Written."""

from __future__ import annotations

__all__ = (
    "Document",
    "PiecePlan",
    "Written",
)

from collections.abc import Callable
from dataclasses import dataclass


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

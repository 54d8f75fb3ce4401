"""Reading chunks that a stage of the save made opaque, for example encrypted ones."""

from __future__ import annotations

__all__ = ("OpaquePiece", "decoded")

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from penstock.kernel.errors import CorruptCheckpointError
from penstock.kernel.messages.restore import PlannedBatch
from penstock.kernel.protocols.leaf_handlers import ReadLeaves
from penstock.kernel.protocols.reads import OpaqueChunk, Read, ScatterRead


@dataclass(frozen=True, slots=True)
class OpaquePiece:
    """A whole stored chunk, with the attribute names of a save's `Piece`."""

    name: str  #: stored name of the leaf
    key_path: str
    chunk: tuple[int, ...]
    start: int  #: offset in the chunk, bytes
    data: memoryview  #: bytes; not valid after the function has returned


def decoded(batch: PlannedBatch, codec: str, function: Callable[[OpaquePiece], Any]) -> PlannedBatch:
    """Return a batch in which leaves with this codec are read through `function`.

    Checksums are compared first, on the stored bytes. Nothing is called yet.

    Args:
        batch: Of a restore, after `plan`.
        codec: The name that the stage of the save gave it, as in the leaf's spec.
        function: Returns the chunk's original bytes, as any contiguous buffer. Called in worker
            threads, several at once. Its errors become a `CorruptCheckpointError` that names the leaf.
    """
    if not any(map(_is_opaque, ReadLeaves.of(batch.leaves).reads)):
        return batch

    leaves = [
        replace(leaf, reads=tuple([_through(read, codec, function) for read in leaf.reads]))
        if any(map(_is_opaque, leaf.reads))
        else leaf
        for leaf in batch.leaves
    ]
    return replace(batch, leaves=ReadLeaves.of(leaves))


def _is_opaque(read: Read) -> bool:
    return isinstance(read, ScatterRead) and read.opaque is not None


def _through(read: Read, codec: str, function: Callable[[OpaquePiece], Any]) -> Read:
    if not isinstance(read, ScatterRead) or read.opaque is None or read.opaque.codec != codec:
        return read

    decode = partial(_decode, function, read.file, read.opaque, read.scatter)
    return replace(read, scatter=decode, opaque=None)


def _decode(
    function: Callable[[OpaquePiece], Any],
    file: str,
    about: OpaqueChunk,
    scatter: Callable[[memoryview], None],
    data: memoryview,
) -> None:
    piece = OpaquePiece(about.name, about.key_path, about.chunk, about.start, data)
    try:
        plain = memoryview(function(piece)).cast("B")
    except Exception as error:
        problem = f"codec {about.codec!r} could not be undone for chunk {about.chunk}: {error!r}"
        question = "is the key the right one?"
        raise CorruptCheckpointError(file, f"{problem}; {question}", key_path=about.key_path) from error

    scatter(plain)

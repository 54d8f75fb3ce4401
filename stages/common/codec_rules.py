"""When a chunk is encoded, what that costs, and what an encoded piece must be."""

from __future__ import annotations

__all__ = (
    "AUTO",
    "check_encoded",
    "encoding_room",
    "saved_by_encoding",
)

from typing import Final

from penstock.kernel.errors import PipelineError
from penstock.kernel.messages.save import Piece, StagedBatch

AUTO: Final = "auto"


def encoding_room(nbytes: int) -> int:
    """Bytes that encoding a chunk of `nbytes` may take: more than any codec here makes of noise."""
    return nbytes + nbytes // 128 + 1024


def saved_by_encoding(batch: StagedBatch) -> int:
    """Bytes that encoding saved of the chunks whose last piece a batch holds; fewer than none of noise."""
    return sum(
        [
            piece.leaf.spec.chunk_nbytes - piece.coded
            for piece in batch.pieces
            if piece.coded is not None and piece.start + piece.nbytes == piece.coded
        ]
    )


def check_encoded(piece: Piece) -> None:
    """Refuse to write a chunk as it is whose metadata will say that it is encoded.

    Raises:
        PipelineError: If it is one.
    """
    leaf = piece.leaf
    if piece.coded is None and leaf.spec.codec is not None:
        problem = f"has the codec {leaf.spec.codec}, and no stage `encode` is in the pipeline"
        error = PipelineError(f"{leaf.info.key_path} {problem}")
        error.key_path = leaf.info.key_path
        raise error

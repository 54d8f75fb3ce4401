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
    """Upper bound for the encoded length of a chunk of `nbytes`: above what any codec here makes of noise."""
    return nbytes + nbytes // 128 + 1024


def saved_by_encoding(batch: StagedBatch) -> int:
    """Bytes saved by encoding, over the chunks whose last piece is in the batch; negative for noise."""
    return sum(
        [
            piece.leaf.spec.chunk_nbytes - piece.coded
            for piece in batch.pieces
            if piece.coded is not None and piece.start + piece.nbytes == piece.coded
        ]
    )


def check_encoded(piece: Piece) -> None:
    """Refuse to write an unencoded chunk whose metadata will say that it is encoded.

    Raises:
        PipelineError: If it is such a chunk.
    """
    leaf = piece.leaf
    if piece.coded is None and leaf.spec.codec is not None:
        problem = f"has the codec {leaf.spec.codec}, but the pipeline has no stage `encode`"
        error = PipelineError(f"{leaf.info.key_path} {problem}")
        error.key_path = leaf.info.key_path
        raise error

"""Takes the checksum of a piece, and what tells that of some of its blocks from that of all."""

from __future__ import annotations

__all__ = ("BLOCK_BYTES", "block_bytes_for", "block_bytes_of", "summed")

import sys
from array import array
from typing import Final

from crc32c import crc32c

from penstock.kernel.messages.save import Piece
from penstock.kernel.pipeline.run_context import SaveRun
from penstock.kernel.protocols.written import RunningSums

BLOCK_BYTES: Final = 64 * 1024
"""What a restore may read more than it needs at each end of a range. A larger chunk is no part of a pack."""

MOST_BLOCKS: Final = 2**22
"""Of a checkpoint: every process that restores it reads 4 bytes for each."""


def block_bytes_of(run: SaveRun) -> int:
    """Return the bytes of a block of what a save writes."""
    n_processes = 1 if run.operation is None else len(run.operation.processes)
    return block_bytes_for(run.progress.bytes_total * n_processes)


def block_bytes_for(nbytes: int) -> int:
    """Return the bytes of a block: more in a large checkpoint, so that all sums take 16 MiB at most."""
    block_bytes = BLOCK_BYTES
    while nbytes > block_bytes * MOST_BLOCKS:
        block_bytes *= 2

    return block_bytes


def summed(piece: Piece, block_bytes: int) -> tuple[int, RunningSums | None]:
    """Return the crc32c of a piece, and what is recorded of its blocks, if it is not encoded and has several.

    The sum is carried on from block to block, so no byte is summed twice. Blocking.
    """
    data = piece.data
    if piece.coded is not None or len(data) <= block_bytes:
        return crc32c(data), None

    sums, found = array("I"), 0
    for start in range(0, len(data), block_bytes):
        # The interpreter is kept: to wait for it again after these few microseconds would take longer.
        found = crc32c(data[start : start + block_bytes], found, gil_release_mode=0)
        sums.append(found)

    del sums[-1]
    if sys.byteorder == "big":
        sums.byteswap()

    return found, RunningSums(block_bytes, sums.tobytes())

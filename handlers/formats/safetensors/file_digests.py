"""Digests in a document of a safetensors checkpoint: of its own bytes, and of the tensors after it.

A text of a fixed length, under one name in the `__metadata__` of a header or in the `metadata` of an index:
`crc32c`, the checksum of the document itself; in a header also the length of a block, and in base64 the
checksum of each block of each tensor, by offset. Other readers see a text that they ignore.

Programs that write a file anew often carry its metadata over, so a text may be of other bytes. They end a
header where they must, at the next multiple of eight bytes; penstock adds eight spaces more. So a document
that ends as penstock ends one, and does not have the checksum it says, is damaged; one that ends in another
way was written by somebody else.
"""

from __future__ import annotations

__all__ = ("BLOCK_BYTES", "MEMBER", "BlockSums", "blank", "blocks_of", "ended", "filled", "find")

import base64
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, final

import numpy as np
import numpy.typing as npt
from crc32c import crc32c

from penstock.handlers.formats.integrity import Checksums
from penstock.kernel.errors import ChecksumError, CorruptCheckpointError

MEMBER: Final = "penstock.digests"

BLOCK_BYTES: Final = 4 * 2**20
"""Who needs a part of a tensor reads whole blocks. A terabyte has 1.4 MB of text."""

_KIND: Final = "crc32c "
_TEXT: Final = re.compile(
    rb'"penstock\.digests": ?"crc32c ([0-9a-f]{8})(?: (\d{1,15}) ([A-Za-z0-9+/]*={0,2}))?"'
)
# safetensors aligns its header to eight bytes with spaces. penstock adds eight more, so that a file written
# anew by another program, which pads with fewer, can be told from its own.
_ALIGNMENT: Final = 8
_MORE_SPACES: Final = 8


@final
@dataclass(frozen=True, slots=True, eq=False)
class BlockSums:
    """The checksum of each block of each tensor, by offset."""

    block_bytes: int
    crc32cs: npt.NDArray[np.uint32]

    def at(self, path: str, offsets: npt.NDArray[np.int64], nbytes: npt.NDArray[np.int64]) -> Checksums:
        """Return which ranges of a file they are of.

        Args:
            path: Of the file, for the error.
            offsets: Where each tensor begins, bytes from the start of the file, ascending.
            nbytes: Of each tensor.

        Raises:
            CorruptCheckpointError: If they are more or fewer than the blocks of these tensors.
        """
        n_blocks = int(_counts(nbytes, self.block_bytes).sum())
        if n_blocks != len(self.crc32cs):
            problem = f"has {len(self.crc32cs)} checksums, and {n_blocks} blocks of tensors"
            raise CorruptCheckpointError(path, problem)

        starts, lengths = blocks_of(offsets, nbytes, self.block_bytes)
        return Checksums(starts.astype("<u8"), lengths.astype("<u8"), self.crc32cs)


def blocks_of(
    offsets: npt.NDArray[np.int64], nbytes: npt.NDArray[np.int64], block_bytes: int = BLOCK_BYTES
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Cut tensors into blocks, each from its own beginning. Pure.

    Returns:
        Where each block begins, and its bytes.
    """
    counts = _counts(nbytes, block_bytes)
    first = np.cumsum(counts) - counts
    number = np.arange(int(counts.sum())) - np.repeat(first, counts)
    starts = np.repeat(offsets, counts) + number * block_bytes
    return starts, np.minimum(block_bytes, np.repeat(offsets + nbytes, counts) - starts)


def blank(n_blocks: int | None = None) -> str:
    """Return the text with zeros for the checksums, as long as `filled` leaves it.

    Args:
        n_blocks: Blocks of tensors; None for a document without tensors.
    """
    own = f"{_KIND}{0:08x}"
    if n_blocks is None:
        return own

    return f"{own} {BLOCK_BYTES} {base64.b64encode(bytes(4 * n_blocks)).decode()}"


def ended(document: bytes) -> bytes:
    """Return a document padded with spaces, as penstock ends one."""
    return document + b" " * (-len(document) % _ALIGNMENT + _MORE_SPACES)


def filled(document: bytes, crc32cs: npt.NDArray[np.uint32] | None = None) -> bytes:
    """Return a document whose blank text has the checksums of blocks and, last, its own."""
    found = _TEXT.search(document)
    assert found is not None, "the document has the text"
    if crc32cs is not None:
        start, stop = found.span(3)
        document = document[:start] + base64.b64encode(crc32cs.astype("<u4").tobytes()) + document[stop:]

    start, stop = found.span(1)
    return b"%b%08x%b" % (document[:start], crc32c(document), document[stop:])


def find(path: str, document: bytes, texts: Mapping[str, object]) -> BlockSums | None:
    """Return the checksums that a document has, once its own has been compared.

    Args:
        path: Of the document, for the error.
        document: All of it.
        texts: Its members by name, the text among them.

    Returns:
        None if it has none, or has those of a document that another program wrote anew.

    Raises:
        ChecksumError: If it is not as penstock wrote it.
        CorruptCheckpointError: If penstock cannot have written it.
    """
    found = _TEXT.search(document)
    if found is not None:
        start, stop = found.span(1)
        own = crc32c(document[stop:], crc32c(b"0" * 8, crc32c(document[:start])))
        if own == int(found[1], 16):
            return BlockSums(max(1, int(found[2] or 1)), _decoded(path, found[3] or b""))

    # A flipped bit in the name leaves the text to know it by, and one in the text leaves the name.
    is_said = (
        found is not None
        or MEMBER in texts
        or any(isinstance(text, str) and text.startswith(_KIND) for text in texts.values())
    )
    if is_said and _ends_as_ours(document):
        raise ChecksumError(path, "differs from what was written: its header, or all of it if it is an index")

    return None


def _counts(nbytes: npt.NDArray[np.int64], block_bytes: int) -> npt.NDArray[np.int64]:
    return -(-nbytes // block_bytes)


def _decoded(path: str, text: bytes) -> npt.NDArray[np.uint32]:
    try:
        return np.frombuffer(base64.b64decode(text), "<u4")
    except ValueError as error:
        raise CorruptCheckpointError(path, f"has checksums that are none: {error}") from error


def _ends_as_ours(document: bytes) -> bool:
    return _MORE_SPACES <= len(document) - len(document.rstrip(b" ")) < _MORE_SPACES + _ALIGNMENT

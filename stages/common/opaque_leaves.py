"""Opaque leaves: their bytes are meaningless until a stage undoes what a stage of the save did."""

from __future__ import annotations

__all__ = ("check_plain",)

from collections.abc import Iterable

from penstock.kernel.errors import UnsupportedFormatError
from penstock.kernel.protocols.reads import Read, ScatterRead


def check_plain(reads: Iterable[Read]) -> None:
    """Refuse reads of opaque chunks.

    Raises:
        UnsupportedFormatError: It names the codec, and the leaf.
    """
    for read in reads:
        if isinstance(read, ScatterRead) and read.opaque is not None:
            problem = f"holds chunks that a stage made opaque: {read.opaque.codec!r}"
            advice = "restore with the stage that undoes it, behind `plan` in the pipeline, and without mmap"
            raise UnsupportedFormatError(read.file, f"{problem}; {advice}", key_path=read.opaque.key_path)

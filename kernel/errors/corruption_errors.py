"""`CorruptCheckpointError`s: what is on the medium is no finished, undamaged checkpoint."""

from __future__ import annotations

__all__ = (
    "ChecksumError",
    "IncompleteCheckpointError",
    "MissingFileError",
    "NotACheckpointError",
    "TruncatedDataError",
    "UnsupportedFormatError",
)

from typing import final

from penstock.kernel.errors.families import CorruptCheckpointError


@final
class NotACheckpointError(CorruptCheckpointError, FileNotFoundError):
    """There is nothing at the path, or nothing in a format that penstock knows."""


@final
class MissingFileError(CorruptCheckpointError, FileNotFoundError):
    """A checkpoint refers to a file that does not exist."""


@final
class IncompleteCheckpointError(CorruptCheckpointError):
    """The save of this checkpoint was interrupted; the directory was never published."""


@final
class TruncatedDataError(CorruptCheckpointError):
    """A data file is shorter than the index says.

    Attributes:
        needed: Bytes the index refers to.
        found: Bytes in the file.
    """

    def __init__(self, path: str, needed: int, found: int, *, key_path: str | None = None) -> None:
        super().__init__(path, f"ends at byte {found}, but {needed} are needed", key_path=key_path)
        self.needed, self.found = needed, found


@final
class ChecksumError(CorruptCheckpointError):
    """The bytes read differ from the bytes written."""


@final
class UnsupportedFormatError(CorruptCheckpointError):
    """A checkpoint in a format that penstock recognises and cannot read."""

"""`CorruptCheckpointError`s: what is on the medium is no finished, undamaged checkpoint."""

from __future__ import annotations

__all__ = (
    "ChecksumError",
    "ExpansionError",
    "IncompleteCheckpointError",
    "LinkOutsideError",
    "MissingFileError",
    "NotACheckpointError",
    "NotAFileError",
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
class NotAFileError(CorruptCheckpointError):
    """Something that is no file lies where a checkpoint has one: a pipe, a socket, a device. It is not read.

    Attributes:
        found: What it is.
    """

    def __init__(self, path: str, found: str) -> None:
        super().__init__(path, f"is {found}, not a file")
        self.found = found


@final
class IncompleteCheckpointError(CorruptCheckpointError):
    """The save of this checkpoint was interrupted, or goes on; nothing was published yet.

    Attributes:
        goes_on: Whether somebody is saving it right now: try again when that is over. False on a medium that
            does not say so.
    """

    def __init__(self, path: str, problem: str, *, goes_on: bool = False) -> None:
        super().__init__(path, problem)
        self.goes_on = goes_on


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


@final
class LinkOutsideError(CorruptCheckpointError):
    """A symbolic link in a checkpoint leads out of it, and links may not. The store can allow them.

    Attributes:
        target: Where it leads.
    """

    def __init__(self, path: str, target: str) -> None:
        advice = "allow that with LocalStore(links='any'), or links = 'any' in the table [store]"
        super().__init__(path, f"is a link out of the checkpoint, to {target!r}; {advice}")
        self.target = target


@final
class ExpansionError(CorruptCheckpointError):
    """Without a target, a restore would take far more memory than is stored. It can be allowed.

    Attributes:
        stored_bytes: What the arrays take on the medium.
        result_bytes: What they would take in memory.
        most: How many times as much the result may be.
    """

    def __init__(
        self, path: str, stored_bytes: int, result_bytes: int, most: int, key_path: str | None
    ) -> None:
        problem = f"describes arrays of {result_bytes} bytes, and stores {stored_bytes}"
        advice = f"more than {most} times as much is refused unless `like` or max_expansion allows it"
        super().__init__(path, f"{problem}; {advice}", key_path=key_path)
        self.stored_bytes, self.result_bytes, self.most = stored_bytes, result_bytes, most

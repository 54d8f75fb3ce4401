"""Errors of a save that did not become durable. Save again."""

from __future__ import annotations

__all__ = (
    "BuildChangedError",
    "ClaimLostError",
    "InUseError",
    "IncompletePipelineError",
    "NotDurableError",
    "SaveCancelledError",
)

import errno
from typing import final

from penstock.kernel.errors.families import PenstockError, StorageError


@final
class InUseError(StorageError):
    """Somebody else builds, reads or deletes a checkpoint at the path right now. Try again later.

    Attributes:
        more: Whose claim it is and how that ends, where nothing can be locked; else empty.
    """

    def __init__(self, path: str, more: str = "") -> None:
        problem = "somebody builds, reads or deletes a checkpoint here"
        super().__init__("hold", path, f"{problem}; {more}" if more else problem, errno.EBUSY)
        self.more = more


@final
class ClaimLostError(StorageError):
    """Another process took over what this one had claimed at the path, and this one changed nothing since.

    A claim in a bucket ends when it is not renewed in time: this process was stopped or cut off for longer,
    or somebody had the claim removed. What the other process saves there is whole.

    Attributes:
        holder: Which process has the claim now; empty if it is not known.
    """

    def __init__(self, path: str, holder: str = "") -> None:
        taker = holder or "another process"
        problem = f"this process was stopped or cut off for too long, and {taker} took its claim over"
        super().__init__("hold", path, f"{problem}; open the manager again, or save again", errno.ESTALE)
        self.holder = holder


class BuildChangedError(StorageError):
    """Another program renamed, removed or replaced what a save built, or had just published.

    Nothing was deleted. Find that program (a cleaner of temporary files, `rsync --delete`), and save again.

    Attributes:
        older: Where the checkpoint lies that was to be replaced, if it is not at its own path; else None.
    """

    def __init__(self, operation: str, path: str, problem: str, older: str | None = None) -> None:
        where = f"; the earlier checkpoint is {older!r} now" if older else ""
        super().__init__(operation, path, f"{problem}{where}", errno.ESTALE)
        self.older = older


@final
class NotDurableError(StorageError):
    """A new checkpoint is at its path, whole; but the medium failed to make its name there durable.

    If the power fails now, it may be gone, or the one that it replaced may be back. So that one is kept until
    a later save has made the name durable. Save again, with `overwrite=True`; a manager needs no `overwrite`.

    Attributes:
        published: Always True: it can be restored.
        older: Where the checkpoint lies that was replaced; None if there was none.
    """

    published = True

    def __init__(self, path: str, older: str | None, cause: StorageError) -> None:
        kept = "" if older is None else f"; the one that it replaced is kept as {older!r}"
        problem = f"{cause.problem}: the new checkpoint is there, but may be lost if the power fails{kept}"
        super().__init__(cause.operation, path, f"{problem}. Save again with overwrite=True", cause.errno)
        self.older = older


@final
class SaveCancelledError(PenstockError):
    """The save that was awaited was cancelled; nothing of it is left on disk."""


@final
class IncompletePipelineError(PenstockError):
    """Fewer leaves reached the commit than were planned, so nothing was published.

    Attributes:
        planned: Leaves counted by the first stage.
        arrived: Leaves whose every byte arrived.
    """

    def __init__(self, planned: int, arrived: int, first_absent: str) -> None:
        found = f"{planned} leaves were planned and {arrived} arrived complete"
        super().__init__(f"{found}; first absent: {first_absent}")
        self.planned, self.arrived, self.key_path = planned, arrived, first_absent

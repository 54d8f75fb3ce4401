"""Errors of a save that ended before anything was published. Save again."""

from __future__ import annotations

__all__ = (
    "ClaimLostError",
    "InUseError",
    "IncompletePipelineError",
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

"""Errors of the newer API that have no built-in name."""

from __future__ import annotations

__all__ = (
    "DeletionInProgressError",
    "DeletionRecoveryError",
    "InvalidLayoutError",
    "PartialSaveError",
    "PartialSaveReplacementError",
    "StepAlreadyExistsError",
    "StepNotFoundError",
)

from typing import final

from penstock.errors import CorruptCheckpointError, PenstockError, StepExistsError


class InvalidLayoutError(PenstockError, ValueError):
    """A path is not a finished checkpoint, or lacks what was requested."""


class DeletionInProgressError(PenstockError, RuntimeError):
    """An item is read or saved whose deletion has not finished."""


class DeletionRecoveryError(PenstockError, RuntimeError):
    """A deletion that was interrupted contradicts what is asked for now."""


class PartialSaveError(PenstockError):
    """A partial save cannot be done."""


class PartialSaveReplacementError(PartialSaveError):
    """A partial save has a leaf that an earlier one of the same session has."""


StepAlreadyExistsError = StepExistsError


@final
class StepNotFoundError(CorruptCheckpointError, FileNotFoundError):
    """There is no such step, or no step at all. It is a FileNotFoundError.

    Attributes:
        step: Its number; None if the latest was asked for.
    """

    def __init__(self, path: str, step: int | None) -> None:
        super().__init__(path, "there is no step in it" if step is None else f"there is no step {step} in it")
        self.step = step

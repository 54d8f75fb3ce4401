"""Errors of the newer API that have no built-in name."""

from __future__ import annotations

__all__ = (
    "DeletionInProgressError",
    "DeletionRecoveryError",
    "InvalidLayoutError",
    "PartialSaveError",
    "PartialSaveReplacementError",
)

from penstock.errors import PenstockError


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

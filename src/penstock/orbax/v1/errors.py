"""Errors of the newer API that have no built-in name."""

from __future__ import annotations

__all__ = (
    "DeletionInProgressError",
    "DeletionRecoveryError",
    "InvalidLayoutError",
    "PartialSaveError",
    "PartialSaveReplacementError",
)

from penstock.orbax.v1.common.v1_errors import (
    DeletionInProgressError,
    DeletionRecoveryError,
    InvalidLayoutError,
    PartialSaveError,
    PartialSaveReplacementError,
)

"""Saving a tree part by part: nothing is visible at its path until all parts are put together."""

from __future__ import annotations

__all__ = (
    "finalize",
    "save",
    "save_async",
)

from penstock.orbax.v1.operations.partial_save import finalize, save, save_async

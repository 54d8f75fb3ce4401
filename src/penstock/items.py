"""Saving several named items as one checkpoint."""

from __future__ import annotations

__all__ = (
    "Array",
    "Composite",
    "Json",
    "NumpyRandomKey",
    "Proto",
    "PyTree",
    "RandomKey",
    "for_items",
)

from penstock.checkpointer.save_items import for_items
from penstock.handlers.formats.items.item_types import (
    Array,
    Composite,
    Json,
    NumpyRandomKey,
    Proto,
    PyTree,
    RandomKey,
)

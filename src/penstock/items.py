"""Saving several named items as one checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING

__all__ = (
    "Array",
    "Composite",
    "Json",
    "NumpyRandomKey",
    "Proto",
    "PyTree",
    "RandomKey",
    "SaveRequest",
    "for_items",
)

from penstock.handlers.layouts.item_types import (
    Array,
    Composite,
    Json,
    NumpyRandomKey,
    Proto,
    PyTree,
    RandomKey,
)

if TYPE_CHECKING:
    from penstock.checkpointer.saves import for_items
    from penstock.kernel.pipeline.run_context import SaveRequest
else:
    from penstock.kernel.lazy_names import lazy_names as _lazy_names

    __getattr__, __dir__ = _lazy_names(
        __name__,
        {
            "penstock.checkpointer.saves": ("for_items",),
            "penstock.kernel.pipeline.run_context": ("SaveRequest",),
        },
    )

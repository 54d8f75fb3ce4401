"""Finds the store of a path."""

from __future__ import annotations

from typing import TYPE_CHECKING

__all__ = (
    "StoreFinder",
    "store_of",
)

if TYPE_CHECKING:
    from penstock.stores.store_finder import StoreFinder, store_of
else:
    from penstock.kernel.lazy_names import lazy_names as _lazy_names

    __getattr__, __dir__ = _lazy_names(
        __name__,
        {
            "penstock.stores.store_finder": (
                "StoreFinder",
                "store_of",
            ),
        },
    )

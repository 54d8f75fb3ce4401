"""Type handlers, one file per kind of leaf."""

from __future__ import annotations

from typing import TYPE_CHECKING

__all__ = (
    "Box",
    "BoxCopy",
    "HostRegion",
    "SourceFiles",
    "StoredValue",
    "StoredValueHandler",
)

if TYPE_CHECKING:
    from penstock.handlers.leaves.blocks import Box, HostRegion
    from penstock.handlers.leaves.shards import BoxCopy
    from penstock.handlers.leaves.stored_value import SourceFiles, StoredValue, StoredValueHandler
else:
    from penstock.kernel.lazy_names import lazy_names as _lazy_names

    __getattr__, __dir__ = _lazy_names(
        __name__,
        {
            "penstock.handlers.leaves.blocks": (
                "Box",
                "HostRegion",
            ),
            "penstock.handlers.leaves.shards": ("BoxCopy",),
            "penstock.handlers.leaves.stored_value": (
                "SourceFiles",
                "StoredValue",
                "StoredValueHandler",
            ),
        },
    )

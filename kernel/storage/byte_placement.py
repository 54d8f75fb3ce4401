"""Places bytes in the data files of a store."""

from __future__ import annotations

__all__ = ("placement_of",)

from penstock.kernel.protocols.store_capabilities import DEFAULT_PLACEMENT, Placement, PreferredPlacement
from penstock.kernel.protocols.stores import Store


def placement_of(store: Store) -> Placement:
    """Return what the store prefers, or the default."""
    return store.placement if isinstance(store, PreferredPlacement) else DEFAULT_PLACEMENT

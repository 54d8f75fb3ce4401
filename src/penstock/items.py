"""Saving several named items as one checkpoint."""

from __future__ import annotations

__all__ = ("Array", "Composite", "Json", "NumpyRandomKey", "Proto", "PyTree", "RandomKey", "for_items")

from dataclasses import replace

from penstock.engine import Engine, SaveKeywords
from penstock.handlers.items.kinds import Array, Composite, Json, NumpyRandomKey, Proto, PyTree, RandomKey
from penstock.handlers.items.layout import ItemsLayout
from penstock.handlers.items.parts import take_apart
from penstock.kernel.capabilities import FormattedLayout
from penstock.kernel.errors import SpecError
from penstock.kernel.shared import Shared


def for_items(engine: Engine, items: Composite, keywords: SaveKeywords) -> tuple[Engine, object]:
    """Return what saves the items, and the tree that it saves: their leaves, below their names.

    What is remembered of trees is not shared with saves of single ones: their names mean other files.

    Raises:
        SpecError: If they cannot be saved, or not as `keywords` ask.
    """
    if not isinstance(engine.layout, FormattedLayout):
        raise SpecError(f"a {type(engine.layout).__name__} holds one tree, not several items")
    if keywords.get("base") is not None or keywords.get("compare", "identity") != "identity":
        raise SpecError("several items cannot be saved with base= or compare= yet; save one tree")

    parts = take_apart(items)
    return replace(engine, layout=ItemsLayout(engine.layout, parts), shared=Shared()), parts.tree

"""Saving several named items as one checkpoint."""

from __future__ import annotations

__all__ = ("Array", "Composite", "Json", "NumpyRandomKey", "Proto", "PyTree", "RandomKey", "for_items")

from dataclasses import replace

from penstock.engine import Engine
from penstock.handlers.items.kinds import Array, Composite, Json, NumpyRandomKey, Proto, PyTree, RandomKey
from penstock.handlers.items.layout import ItemsLayout
from penstock.handlers.items.one_tree import OneTreeLayout
from penstock.handlers.items.parts import take_apart
from penstock.kernel.capabilities import FormattedLayout
from penstock.kernel.errors import SpecError
from penstock.kernel.shared import Shared
from penstock.stages.known_values import KnownValues


def for_items(engine: Engine, items: Composite) -> tuple[Engine, object]:
    """Return what saves the items, and the tree that it saves: the only one, or one of all their leaves.

    Which trees were planned is not shared by saves of several items: their names mean other files.

    Raises:
        SpecError: If they cannot be saved.
    """
    if not isinstance(engine.layout, FormattedLayout):
        raise SpecError(f"a {type(engine.layout).__name__} holds one tree, not several items")
    parts = take_apart(items)
    if OneTreeLayout.fits(engine.layout, parts):
        (tree,) = parts.tree.values()
        return replace(engine, layout=OneTreeLayout(engine.layout, parts)), tree

    shared = Shared.with_objects({KnownValues: engine.shared.of(KnownValues)})
    return replace(engine, layout=ItemsLayout(engine.layout, parts), shared=shared), parts.tree

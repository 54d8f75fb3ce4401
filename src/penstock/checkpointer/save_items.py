"""Saving several named items as one checkpoint."""

from __future__ import annotations

__all__ = ("Array", "Composite", "Json", "NumpyRandomKey", "Proto", "PyTree", "RandomKey", "for_items")

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar, cast

from penstock.checkpointer.engine import Engine
from penstock.checkpointer.pipelines import First
from penstock.handlers.layouts.item_parts import take_apart
from penstock.handlers.layouts.item_types import (
    Array,
    Composite,
    Json,
    NumpyRandomKey,
    Proto,
    PyTree,
    RandomKey,
)
from penstock.handlers.layouts.items_layout import CompositeLayout, SingleItemLayout
from penstock.kernel.config.save_format import SaveArgs
from penstock.kernel.errors import SpecError
from penstock.kernel.pipeline.shared_objects import Shared
from penstock.kernel.protocols.layouts import FormattedLayout
from penstock.kernel.protocols.leaf import KeyPath
from penstock.stages.reuse.value_cache import KnownValues

T = TypeVar("T")


def for_items(
    engine: Engine, items: Composite, save_args: object, first: First | None
) -> tuple[Engine, object, object, First | None]:
    """Return an engine that saves the items, and the tree it saves: the only one, or one tree of all.

    Names of leaves are then those in that tree, so `save_args` and `first`, which were given for the tree
    of items, are translated to it.

    Saves of several items do not share plans with other saves, because the same names mean other files.

    Raises:
        SpecError: If they cannot be saved.
    """
    if not isinstance(engine.layout, FormattedLayout):
        raise SpecError(f"a {type(engine.layout).__name__} holds one tree, not several items")
    whole, parts = take_apart(items)
    if SingleItemLayout.fits(engine.layout, parts):
        ((name, tree),) = whole.items()
        engine = replace(engine, layout=SingleItemLayout(engine.layout, parts))
        return engine, tree, _below(name, save_args), None if first is None else _with_name(name, first)

    shared = Shared.with_objects({KnownValues: engine.shared.of(KnownValues)})
    engine = replace(engine, layout=CompositeLayout(engine.layout, parts), shared=shared)
    return engine, whole, save_args, first


def _below(name: str, asked: Any) -> Any:
    """Return the part of `save_args` that applies to one item.

    Raises:
        SpecError: If it has arguments for another item, which has no arrays.
    """
    if isinstance(asked, SaveArgs):
        return asked
    if callable(asked):
        return _with_name(name, asked)
    if not isinstance(asked, Mapping):
        return asked

    given = dict(cast("Mapping[str, object]", asked))
    found = given.pop(name, None)
    if any(value is not None for value in given.values()):
        raise SpecError(f"save_args are for {', '.join(map(repr, given))}, but only {name!r} has arrays")

    return found


def _with_name(name: str, function: Callable[[KeyPath], T]) -> Callable[[KeyPath], T]:
    return lambda keys: function((name, *keys))

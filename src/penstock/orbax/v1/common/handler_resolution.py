"""Which handler loads an item of a checkpoint."""

from __future__ import annotations

__all__ = ("handler_for_load",)

from typing import Any

from penstock.orbax.v1.common.handler_registration import (
    CheckpointableHandlerRegistry,
    NoEntryError,
    resolve_handler_for_load,
)
from penstock.orbax.v1.common.item_names import STATE


def handler_for_load(
    registry: CheckpointableHandlerRegistry, abstract: Any, *, name: str, recorded: str | None
) -> Any:
    """Resolve as `resolve_handler_for_load` does; an unknown item is taken for a tree.

    Raises:
        NoEntryError: If no handler fits, and there is none for trees.
    """
    try:
        return resolve_handler_for_load(registry, abstract, name=name, handler_typestr=recorded)
    except NoEntryError:
        if not registry.has(STATE):
            raise

        return registry.get(STATE)()

"""Restoring several items of one checkpoint, by name."""

from __future__ import annotations

__all__ = ("restore_items",)

from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, Final, cast

from penstock.checkpointer.engine import Engine
from penstock.kernel.concurrency.threads import Threads
from penstock.kernel.errors import NotACheckpointError, SpecError, UnsupportedFormatError
from penstock.kernel.protocols.checkpoints import FoundItems, ItemKind, ListedItems
from penstock.kernel.storage.reading import Reading

_ARRAY: Final = "checkpoint"
"""Orbax's name for the only leaf of an item that is one array."""


async def restore_items(
    engine: Engine,
    threads: Threads,
    restore: Callable[..., Awaitable[Any]],
    path: str,
    like: Mapping[str, Any] | None,
    items: Iterable[str] | None,
) -> dict[str, Any]:
    """Return the values of items of the checkpoint at `path`, all of one and the same checkpoint.

    Args:
        engine: Of a Checkpointer.
        threads: For blocking calls.
        restore: Restores one item: `restore(path, item=name)`, or with a target `like` as well.
        path: Absolute.
        like: Targets, by item; `...` stands for "as it was saved".
        items: Which; None for all.

    Raises:
        SpecError: If `like` names an item that is not among `items`.
        UnsupportedFormatError: If the checkpoint has no items.
        NotACheckpointError: If a requested item is missing.
    """
    layout = engine.layout
    if not isinstance(layout, ListedItems):
        raise UnsupportedFormatError(path, f"a {type(layout).__name__} has no items")

    async with engine.view(path, threads) as viewed:
        return await _restored(viewed, layout, threads, restore, path, like, items)


async def _restored(
    engine: Engine,
    layout: ListedItems,
    threads: Threads,
    restore: Callable[..., Awaitable[Any]],
    path: str,
    like: Mapping[str, Any] | None,
    items: Iterable[str] | None,
) -> dict[str, Any]:
    found = await threads.run(layout.items, engine.store, path)
    targets: Mapping[str, Any] = {} if like is None else like
    chosen = _chosen(found, targets, items)

    async def read(_: Reading) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for name in chosen:
            target = {"like": targets[name]} if targets.get(name, ...) is not ... else {}
            values[name] = await _restore_one(restore, found.path, name, found.kinds[name], target)

        return values

    return await engine.read_unchanged(found.path, threads, read)


def _chosen(found: FoundItems, like: Mapping[str, Any], names: Iterable[str] | None) -> list[str]:
    if isinstance(names, str):
        raise SpecError(f"items must be a list of names, not {names!r}")
    if not isinstance(cast("object", like), Mapping):
        raise SpecError(f"like must be a mapping from items to targets, not a {type(like).__name__}")

    chosen = list(found.kinds if names is None else names)
    for name in (*chosen, *like):
        if name not in found.kinds:
            listed = ", ".join(found.kinds)
            raise NotACheckpointError(found.path, f"has no item {name!r} (its items: {listed})")
    for name in like:
        if name not in chosen:
            raise SpecError(f"like has {name!r}, which is not among the requested items")

    return chosen


async def _restore_one(
    restore: Callable[..., Awaitable[Any]], path: str, name: str, kind: ItemKind, target: dict[str, Any]
) -> Any:
    match kind:
        case "array":
            wrapped = {key: {_ARRAY: value} for key, value in target.items()}
            return (await restore(path, item=name, **wrapped))[_ARRAY]
        case _:
            return await restore(path, item=name, **target)

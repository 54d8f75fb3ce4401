"""Restoring what lies in a step: the tree, or its items."""

from __future__ import annotations

__all__ = ("restore_step",)

from collections.abc import Awaitable, Callable
from typing import Any

from penstock.checkpointer.engine import Engine
from penstock.checkpointer.restore_items import restore_items
from penstock.handlers.formats.items.item_types import Composite
from penstock.kernel.concurrency.threads import Threads
from penstock.steps.step_contents import item_names
from penstock.steps.step_directory import TREE


async def restore_step(
    engine: Engine,
    threads: Threads,
    restore: Callable[..., Awaitable[Any]],
    path: str,
    like: Any,
    item: str | None,
) -> Any:
    """Return the tree of the step at `path`, if it holds one or one is asked for; else a `Composite`.

    Args:
        engine: Of a Checkpointer.
        threads: For blocking calls.
        restore: `Checkpointer.restore`, with all options but `item` and `like`.
        path: Of the step.
        like: `...` for everything; a target of one tree; or a `Composite` of targets, which names the
            items wanted.
        item: The name of one item, which alone is restored.
    """
    if item is not None or (like is not ... and not isinstance(like, Composite)):
        return await restore(path, like=like, item=item)

    async def read() -> Any:
        if like is ...:
            names = await threads.run(item_names, engine.store, path)
            if not names or TREE in names:
                return await restore(path)

            return Composite(await restore_items(engine, threads, restore, path, None, names))

        return Composite(await restore_items(engine, threads, restore, path, like, list(like)))

    return await engine.read_unchanged(path, threads, read)

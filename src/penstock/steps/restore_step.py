"""Restoring what lies in a step: the tree, or its items."""

from __future__ import annotations

__all__ = ("restore_step",)

from typing import Any

from penstock.checkpointer.checkpointer import Checkpointer
from penstock.handlers.formats.items.item_types import Composite
from penstock.kernel.concurrency.threads import Threads
from penstock.steps.step_contents import item_names
from penstock.steps.step_directory import TREE


async def restore_step(
    checkpointer: Checkpointer, threads: Threads, path: str, options: dict[str, Any]
) -> Any:
    """Return the tree of the step at `path`, if it holds one; else a `Composite` of its items.

    Args:
        checkpointer: What restores.
        threads: For looking which items there are.
        path: Of the step.
        options: Those of `Checkpointer.restore`; a `like` is a `Composite`, and names the items wanted.
    """
    like = options.pop("like", None)
    engine = checkpointer.engine

    async def read() -> Any:
        if like is not None:
            wanted = dict(like)
        else:
            names = await threads.run(item_names, engine.store, path)
            if not names or TREE in names:
                return await checkpointer.restore(path, **options)

            wanted = dict.fromkeys(names, ...)

        found: dict[str, object] = {}
        for name, target in wanted.items():
            more = options if target is ... else {**options, "like": target}
            found[name] = await checkpointer.restore(path, item=name, **more)

        return Composite(found)

    return await engine.read_unchanged(path, threads, read)

"""The first stage of a save: the tree to its leaves, every one of them checked before a byte is written."""

from __future__ import annotations

__all__ = ("Flatten",)

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import final

from penstock.kernel.messages import Leaf, LeafBatch, TreeToSave
from penstock.kernel.run import SaveRun
from penstock.kernel.stage import Actor
from penstock.stages.batching import batched
from penstock.stages.trees import flatten_tree


@final
@dataclass(frozen=True, slots=True)
class Flatten:
    """Takes a `TreeToSave`, yields `LeafBatch`es in flatten order.

    Everything that can be wrong with a leaf without reading its bytes is an error here: no handler,
    a type or dtype that cannot be stored, a deleted array, a name that two leaves share or that the
    layout cannot store.
    """

    @property
    def concurrency(self) -> int:
        """One: there is one tree."""
        return 1

    @asynccontextmanager
    async def open(self, run: SaveRun, /) -> AsyncGenerator[Actor]:
        """Yield the actor of one save."""

        async def flatten(message: TreeToSave, /) -> AsyncIterator[LeafBatch[Leaf]]:
            leaves = await run.threads.run(_plan, run, message)
            run.planned = [leaf.info for leaf in leaves]
            run.specs = [leaf.spec for leaf in leaves]
            run.progress.plan(len(leaves), sum(leaf.nbytes for leaf in leaves))
            for batch in batched(leaves, run.limits):
                yield batch
                del batch  # the leaves belong to whoever comes next

        yield flatten


def _plan(run: SaveRun, message: TreeToSave) -> list[Leaf]:
    flat, _ = flatten_tree(message.take(), run.workspace.temporary)
    leaves: list[Leaf] = []
    for index, found in enumerate(flat):
        value: object = found.value
        handler = run.registry.lookup(type(value), found.info.key_path)
        leaves.append(
            Leaf(index, found.info, found.value, handler.describe(found.value, found.info), handler)
        )

    run.layout.check(leaves)
    return leaves

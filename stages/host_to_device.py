"""Makes values of filled buffers: device arrays, numpy arrays, Python scalars."""

from __future__ import annotations

__all__ = ("HostToDevice",)

import itertools
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import final

from penstock.kernel.adapter import AdaptedHandler
from penstock.kernel.messages import HostBatch, ReadLeaf, RestoredBatch
from penstock.kernel.protocols import LeafHandler
from penstock.kernel.read_pack import HostPack, IndexedValues
from penstock.kernel.run import RestoreRun
from penstock.kernel.stage import Actor


@final
@dataclass(frozen=True, slots=True)
class HostToDevice:
    """Takes `HostBatch`es, yields `RestoredBatch`es, and releases the leases on staging buffers.

    Attributes:
        concurrency: Batches built at once, each by a thread.
    """

    concurrency: int = field(default=1, metadata={"positive": True})

    @asynccontextmanager
    async def open(self, run: RestoreRun, /) -> AsyncGenerator[Actor]:
        """Yield the actor of one restore."""

        async def build(batch: HostBatch, /) -> RestoredBatch:
            try:
                if len(batch.packs) == 1 and not batch.leaves and not batch.ready:
                    return RestoredBatch(await run.threads.run(_build_pack, batch.packs[0]))

                built = await run.threads.run(_build, batch) if batch.leaves or batch.packs else []
            finally:
                batch.release()

            return RestoredBatch([*built, *batch.ready])

        yield build


def _build(batch: HostBatch) -> list[tuple[int, object]]:
    # Keyed by identity: a third party's handler need not be hashable.
    by_handler: dict[int, tuple[LeafHandler, list[ReadLeaf]]] = {}
    for leaf in batch.leaves:
        assert not isinstance(leaf.handler, AdaptedHandler)
        by_handler.setdefault(id(leaf.handler), (leaf.handler, []))[1].append(leaf)

    built = [
        (leaf.index, value)
        for handler, leaves in by_handler.values()
        for leaf, value in zip(leaves, handler.build(leaves), strict=True)
    ]
    return [*built, *itertools.chain.from_iterable(map(_build_pack, batch.packs))]


def _build_pack(host: HostPack) -> IndexedValues:
    return IndexedValues(host.pack.indices, host.pack.handler.build_pack(host))

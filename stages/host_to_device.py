"""Builds values from filled buffers: device arrays, NumPy arrays, Python scalars."""

from __future__ import annotations

__all__ = ("HostToDevice",)

import itertools
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import ClassVar, cast, final

from penstock.kernel.messages.packs import HostPack, IndexedValues
from penstock.kernel.messages.restore import HostBatch, RestoredBatch
from penstock.kernel.pipeline.run_context import RestoreRun
from penstock.kernel.pipeline.stage import Actor, Messages
from penstock.kernel.pipeline.statistics import Advice
from penstock.kernel.protocols.leaf_handlers import LeafHandler, PartsHandler, ReadLeaf


@final
@dataclass(frozen=True, slots=True)
class HostToDevice:
    """Takes `HostBatch`es, yields `RestoredBatch`es, and releases the leases on staging buffers.

    Each part of a leaf is put in place at once, so that its buffer can be freed. The value is made once all
    parts are in place.

    Attributes:
        concurrency: Batches built at once, each by a thread.
    """

    messages: ClassVar[Messages] = {HostBatch: RestoredBatch}
    advice: ClassVar[Advice] = Advice(
        "Raise `[restore.host_to_device] concurrency`, and give a `like` with the dtypes that "
        "are stored, so that nothing is cast.",
    )

    concurrency: int = field(default=1, metadata={"positive": True})

    @asynccontextmanager
    async def open(self, run: RestoreRun, /) -> AsyncGenerator[Actor]:
        """Yield the actor of one restore."""
        yield _Builder(run)


@final
class _Builder:
    __slots__ = ("_missing", "_run")

    def __init__(self, run: RestoreRun) -> None:
        self._run = run
        self._missing: dict[int, int] = {}  # parts not yet in place, by the leaf's index

    async def __call__(self, batch: HostBatch, /) -> RestoredBatch | None:
        threads = self._run.threads
        try:
            if len(batch.packs) == 1 and not batch.leaves and not batch.ready:
                return RestoredBatch(await threads.run(_build_pack, batch.packs[0]), batch.plan)

            built = await threads.run(_build, batch) if batch.leaves or batch.packs else []
        finally:
            batch.release()

        complete = self._complete(batch.leaves)
        if complete:
            built += await threads.run(_join, complete)

        values = [*built, *batch.ready]
        return RestoredBatch(values, batch.plan) if values or not batch.leaves else None

    def _complete(self, leaves: Sequence[ReadLeaf]) -> list[ReadLeaf]:
        """Count the parts put in place; return one part of each leaf that is now complete."""
        complete: list[ReadLeaf] = []
        for leaf in leaves:
            if leaf.part is not None:
                missing = self._missing.pop(leaf.part.index, leaf.part.count) - 1
                if missing:
                    self._missing[leaf.part.index] = missing
                else:
                    complete.append(leaf)

        return complete


def _build(batch: HostBatch) -> list[tuple[int, object]]:
    # Keyed by identity: a third party's handler need not be hashable.
    by_handler: dict[int, tuple[LeafHandler, list[ReadLeaf]]] = {}
    for leaf in batch.leaves:
        if leaf.part is not None:
            cast("PartsHandler", leaf.handler).place(leaf)
        else:
            by_handler.setdefault(id(leaf.handler), (leaf.handler, []))[1].append(leaf)

    built = [
        (leaf.index, value)
        for handler, leaves in by_handler.values()
        for leaf, value in zip(leaves, handler.build(leaves), strict=True)
    ]
    return [*built, *itertools.chain.from_iterable(map(_build_pack, batch.packs))]


def _join(parts: Sequence[ReadLeaf]) -> list[tuple[int, object]]:
    return [
        (leaf.part.index, cast("PartsHandler", leaf.handler).join(leaf))
        for leaf in parts
        if leaf.part is not None
    ]


def _build_pack(host: HostPack) -> IndexedValues:
    return IndexedValues(host.pack.indices, host.pack.handler.build_pack(host))

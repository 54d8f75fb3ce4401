"""Builds values from filled buffers: device arrays, NumPy arrays, Python scalars."""

from __future__ import annotations

__all__ = ("HostToDevice",)

from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import ClassVar, cast, final

from penstock.kernel.messages.restore import HostBatch, RestoredBatch
from penstock.kernel.options import fit_fields
from penstock.kernel.pipeline.run_context import RestoreRun
from penstock.kernel.pipeline.stage import Actor, Messages
from penstock.kernel.pipeline.statistics import Advice
from penstock.kernel.protocols.leaf_handlers import PartsHandler, ReadLeaf, ReadLeaves


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

    def __post_init__(self) -> None:
        fit_fields(self, "host_to_device")

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
        leaves, threads = ReadLeaves.of(batch.leaves), self._run.threads
        parts = () if leaves.shared is not None else [leaf for leaf in leaves if leaf.part is not None]
        values = list(batch.ready)
        try:
            if leaves:
                values += await threads.run(_build, leaves, parts)
        finally:
            batch.release()

        complete = self._complete(parts) if parts else ()
        if complete:
            values += await threads.run(_join, complete)

        return RestoredBatch(values, batch.plan) if values or not leaves else None

    def _complete(self, parts: Sequence[ReadLeaf]) -> list[ReadLeaf]:
        """Count the parts put in place; return one part of each leaf that is now complete."""
        complete: list[ReadLeaf] = []
        for leaf in parts:
            if leaf.part is not None:
                missing = self._missing.pop(leaf.part.index, leaf.part.count) - 1
                if missing:
                    self._missing[leaf.part.index] = missing
                else:
                    complete.append(leaf)

        return complete


def _build(leaves: ReadLeaves, parts: Sequence[ReadLeaf]) -> list[tuple[int, object]]:
    """Put parts in place, and make the values of whole leaves. In a worker thread."""
    for part in parts:
        cast("PartsHandler", part.handler).place(part)

    # One call builds all leaves of a handler: jax puts many small arrays on a device in one call.
    by_handler: dict[int, list[int]] = {}  # by identity: handlers need not be hashable
    for number, handler in enumerate(leaves.handlers):
        if not parts or leaves[number].part is None:
            by_handler.setdefault(id(handler), []).append(number)

    built: list[tuple[int, object]] = []
    for numbers in by_handler.values():
        alike = leaves if len(numbers) == len(leaves) else leaves.part(numbers)
        built += zip(alike.indices, alike.handlers[0].build(alike), strict=True)

    return built


def _join(parts: Sequence[ReadLeaf]) -> list[tuple[int, object]]:
    return [
        (leaf.part.index, cast("PartsHandler", leaf.handler).join(leaf))
        for leaf in parts
        if leaf.part is not None
    ]

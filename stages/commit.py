"""Waits for every leaf, then writes the documents that make data files a checkpoint."""

from __future__ import annotations

__all__ = ("Commit",)

import os
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import final

from penstock.kernel.adapter import AdaptedHandler
from penstock.kernel.errors import IncompletePipelineError
from penstock.kernel.messages import Committed, Document, Leaf, Written, WrittenBatch
from penstock.kernel.run import SaveRun
from penstock.kernel.stage import Actor


@final
@dataclass(frozen=True, slots=True)
class Commit:
    """Takes `WrittenBatch`es, yields one `Committed` after the last.

    Leaves planned are counted against leaves whose every byte was written: nothing is truncated in
    silence. When every process of the job has come so far, the index, the metadata and, last, the
    commit mark are made durable, each before the next, and the directories after them.

    Attributes:
        barrier_timeout_s: Seconds to wait for the other processes of the job.

    Raises:
        IncompletePipelineError: If a leaf, or a byte of one, did not arrive.
    """

    barrier_timeout_s: float = field(default=600.0, metadata={"positive": True})

    @property
    def concurrency(self) -> int:
        """One: it collects."""
        return 1

    @asynccontextmanager
    async def open(self, run: SaveRun, /) -> AsyncGenerator[Actor]:
        """Yield the actor of one save."""
        yield _Committer(run, self.barrier_timeout_s)


@final
class _Committer:
    __slots__ = ("_barrier_timeout_s", "_leaves", "_run", "_written")

    def __init__(self, run: SaveRun, barrier_timeout_s: float) -> None:
        self._run = run
        self._barrier_timeout_s = barrier_timeout_s
        self._leaves: list[Leaf] = []
        self._written: list[Written] = []

    async def __call__(self, batch: WrittenBatch, /) -> None:
        self._leaves.extend(batch.leaves)
        self._written.extend(batch.written)

    async def finish(self) -> AsyncIterator[Committed]:
        run = self._run
        await run.workspace.open()
        await run.coordinator.barrier(f"commit {run.path}", self._barrier_timeout_s)
        await run.threads.run(self._commit)
        nbytes = sum(part.nbytes for part in self._written)
        yield Committed(len(self._leaves), nbytes, len({part.file for part in self._written}))

    def _commit(self) -> None:
        run = self._run
        self._leaves.sort(key=lambda leaf: leaf.index)
        check_complete(run, self._leaves, self._written)
        adapted = [leaf.handler for leaf in self._leaves if isinstance(leaf.handler, AdaptedHandler)]
        # Once each, also where one handler serves several types. Keyed by identity: it need not be hashable.
        for handler in {id(handler.inner): handler for handler in adapted}.values():
            handler.finalize(run.workspace.temporary)

        if adapted:  # third parties write files of their own, and need not sync them
            run.store.sync_tree(run.workspace.temporary)

        directories = {"": None} | {os.path.dirname(part.file): None for part in self._written}
        documents = run.layout.documents(
            self._leaves, self._written, started_ns=run.started_ns, custom_metadata=run.custom_metadata
        )
        for document in documents:
            _write_document(run, document, directories)

        for directory in directories:
            run.store.sync_directory(run.workspace.path(directory))


def check_complete(run: SaveRun, leaves: list[Leaf], written: list[Written]) -> None:
    """Compare what was planned with what arrived; `leaves` in order of index."""
    arrived_bytes = [0] * len(run.planned)
    for part in written:
        arrived_bytes[part.leaf] += part.nbytes

    complete = {leaf.index for leaf in leaves if arrived_bytes[leaf.index] == leaf.nbytes}
    if len(complete) != len(run.planned) or len(leaves) != len(run.planned):
        absent = next((info for at, info in enumerate(run.planned) if at not in complete), run.planned[-1])
        raise IncompletePipelineError(len(run.planned), len(complete), absent.key_path)


def _write_document(run: SaveRun, document: Document, directories: dict[str, None]) -> None:
    directory = os.path.dirname(document.path)
    if directory not in directories:
        run.store.make_directory(run.workspace.path(directory))
        directories[directory] = None

    run.store.write_file(run.workspace.path(document.path), document.data)

"""Waits for every leaf, then writes the documents that make data files a checkpoint."""

from __future__ import annotations

__all__ = ("Commit",)

import itertools
import os
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import ClassVar, final

from penstock.kernel.errors import IncompletePipelineError
from penstock.kernel.messages.save import Committed, Leaf, SavePlan, WrittenBatch
from penstock.kernel.pipeline.run_context import SaveRun
from penstock.kernel.pipeline.stage import Actor, Messages
from penstock.kernel.protocols.layouts import ArrangedLayout
from penstock.kernel.protocols.written import Document
from penstock.stages.common.files_handlers import finalize_handlers
from penstock.stages.common.planned_leaves import check_planned, plan_of
from penstock.stages.common.stage_record import stage_record


@final
@dataclass(frozen=True, slots=True)
class Commit:
    """Takes `WrittenBatch`es, yields one `Committed` after the last.

    Each leaf is compared with its plan, spec included, and must have arrived whole: nothing is truncated or
    changed silently. Once every process of the job has reached this point, the index, the metadata and,
    last, the commit mark are made durable in this order, then the directories.

    Attributes:
        barrier_timeout_s: Seconds to wait for the other processes of the job.

    Raises:
        ChangedLeafError: If a leaf is not stored as planned.
        IncompletePipelineError: If a leaf, or a byte of one, did not arrive.
    """

    messages: ClassVar[Messages] = {WrittenBatch: Committed}

    barrier_timeout_s: float = field(default=600.0, metadata={"positive": True})

    @asynccontextmanager
    async def open(self, run: SaveRun, /) -> AsyncGenerator[Actor]:
        """Yield the actor of one save."""
        yield _Committer(run, self.barrier_timeout_s)


@final
class _Committer:
    __slots__ = ("_barrier_timeout_s", "_batches", "_run")

    def __init__(self, run: SaveRun, barrier_timeout_s: float) -> None:
        self._run = run
        self._barrier_timeout_s = barrier_timeout_s
        self._batches: list[WrittenBatch] = []

    async def __call__(self, batch: WrittenBatch, /) -> None:
        self._batches.append(batch)

    async def finish(self) -> AsyncIterator[Committed]:
        run = self._run
        await run.workspace.open()
        await run.coordinator.barrier(f"commit {run.path}", self._barrier_timeout_s)
        nbytes = sum([batch.nbytes for batch in self._batches])
        plan = plan_of(self._batches)
        nbytes_kept = 0 if plan.kept is None else plan.kept.nbytes
        if plan.kept is not None:
            self._batches.append(plan.kept)

        leaves: list[Leaf] = []
        n_files = await run.threads.run(self._commit, leaves, plan)
        if n_files is None:
            await finalize_handlers(run, [each for batch in self._batches for each in batch.handled])
            n_files = await run.threads.run(self._write, leaves, plan)

        yield Committed(len(leaves), nbytes, n_files, nbytes_kept, plan.references)

    def _commit(self, leaves: list[Leaf], plan: SavePlan) -> int | None:
        """Check the leaves and write the documents; None if handlers must complete their files first."""
        leaves += [leaf for batch in self._batches for leaf in batch.leaves]
        leaves.sort(key=attrgetter("index"))
        check_complete(plan, leaves, self._batches)
        if any(batch.handled for batch in self._batches):
            return None

        return self._write(leaves, plan)

    def _write(self, leaves: Sequence[Leaf], plan: SavePlan) -> int:
        run = self._run
        files = {part.file for batch in self._batches for part in batch.written}
        files |= {pack.file for batch in self._batches for pack in batch.packs}
        directories = {"": None} | {os.path.dirname(file): None for file in sorted(files)}
        record = None if isinstance(run.layout, ArrangedLayout) else stage_record(plan)
        beside = () if record is None else (replace(record, path=os.path.join(run.folder, record.path)),)
        for document in beside:
            _write_document(run, document, directories)

        documents = run.layout.documents(
            leaves,
            self._batches,
            started_ns=run.started_ns,
            custom_metadata=run.custom_metadata,
            digests=plan.digests,
            beside=beside,
        )
        for document in documents:
            _write_document(run, document, directories)

        for directory in directories:
            run.store.sync_directory(run.workspace.path(directory))

        return len(files)


def check_complete(plan: SavePlan, leaves: list[Leaf], batches: Sequence[WrittenBatch]) -> None:
    """Compare the plan with what arrived, specs included; `leaves` is in order of index.

    Raises:
        ChangedLeafError: If a leaf differs from its plan.
        IncompletePipelineError: If a leaf or part of one is missing or came twice.
    """
    packs = [pack.leaves for batch in batches for pack in batch.packs]
    for leaf in itertools.chain(leaves, *packs):
        check_planned(leaf, plan)

    arrived_bytes = [0] * len(plan.infos)
    coded: dict[tuple[int, tuple[int, ...]], int] = {}
    for batch in batches:
        for part in batch.written:
            if part.coded is None:
                arrived_bytes[part.leaf] += part.nbytes
            else:
                chunk = (part.leaf, part.chunk)
                coded[chunk] = coded.get(chunk, part.coded) - part.nbytes

        for pack in batch.packs:
            for leaf in pack.leaves:
                arrived_bytes[leaf.index] += leaf.spec.nbytes

    # An encoded chunk counts with its original length, once all of its encoded bytes have arrived.
    chunk_nbytes = {leaf.index: leaf.spec.chunk_nbytes for leaf in leaves} if coded else {}
    for (index, _), absent_bytes in coded.items():
        if absent_bytes == 0:
            arrived_bytes[index] += chunk_nbytes.get(index, 0)

    complete = {leaf.index for leaf in leaves if arrived_bytes[leaf.index] == leaf.nbytes}
    if len(complete) != len(plan.infos) or len(leaves) != len(plan.infos):
        absent = next((info for at, info in enumerate(plan.infos) if at not in complete), plan.infos[-1])
        raise IncompletePipelineError(len(plan.infos), len(complete), absent.key_path)


def _write_document(run: SaveRun, document: Document, directories: dict[str, None]) -> None:
    directory = os.path.dirname(document.path)
    if directory not in directories:
        run.store.make_directory(run.workspace.path(directory))
        directories[directory] = None

    run.store.write_file(run.workspace.path(document.path), document.data)

"""Waits for every leaf, then writes the documents that make data files a checkpoint."""

from __future__ import annotations

__all__ = ("Commit",)

import os
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from operator import is_
from typing import ClassVar, final

import numpy as np
import numpy.typing as npt

from penstock.kernel.errors import IncompletePipelineError
from penstock.kernel.messages.leaves import Leaves, in_columns
from penstock.kernel.messages.save import Committed, SavePlan, WrittenBatch
from penstock.kernel.pipeline.run_context import SaveRun
from penstock.kernel.pipeline.stage import Actor, Messages
from penstock.kernel.protocols.layouts import ArrangedLayout
from penstock.kernel.protocols.leaf import LeafSpec
from penstock.kernel.protocols.written import Document
from penstock.stages.common.files_handlers import finalize_handlers
from penstock.stages.common.planned_leaves import check_planned_together, plan_of
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

        leaves, n_files = await run.threads.run(self._commit, plan)
        if n_files is None:
            await finalize_handlers(run, [each for batch in self._batches for each in batch.handled])
            n_files = await run.threads.run(self._write, leaves, plan)

        yield Committed(len(leaves), nbytes, n_files, nbytes_kept, plan.references)

    def _commit(self, plan: SavePlan) -> tuple[Leaves, int | None]:
        """Check the leaves and write the documents, unless handlers must complete their files first."""
        leaves = arrived_leaves(plan, self._batches)
        if any(batch.handled for batch in self._batches):
            return leaves, None

        return leaves, self._write(leaves, plan)

    def _write(self, leaves: Leaves, plan: SavePlan) -> int:
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


def arrived_leaves(plan: SavePlan, batches: Sequence[WrittenBatch]) -> Leaves:
    """Compare the plan with what arrived, specs included, and return all leaves in order. Pure.

    Raises:
        ChangedLeafError: If a leaf differs from its plan.
        IncompletePipelineError: If a leaf or part of one is missing or came twice.
    """
    n_leaves = len(plan.infos)
    arrived = [in_columns(batch.leaves) for batch in batches]
    packs = [in_columns(pack.leaves) for batch in batches for pack in batch.packs]
    for part in {id(part): part for part in (*arrived, *packs)}.values():
        check_planned_together(part, plan)

    counts = np.zeros(n_leaves, np.int64)
    specs = list(plan.specs)
    for part in arrived:
        np.add.at(counts, np.array(part.indices, np.int64), 1)
        for index, spec in zip(part.indices, part.specs, strict=True):
            specs[index] = spec

    wanted = np.array([spec.nbytes for spec in specs], np.int64)
    complete = (counts == 1) & (_arrived_bytes(specs, batches) == wanted)
    if not complete.all():
        n_complete = int(complete.sum())
        absent = plan.infos[int(np.argmin(complete))]
        raise IncompletePipelineError(n_leaves, n_complete, absent.key_path)

    # The very list of the plan, if it can be, because documents are recognised by it.
    same = all(map(is_, specs, plan.specs))
    return Leaves(range(n_leaves), plan.specs if same else specs, None, plan.infos, plan.handlers)


def _arrived_bytes(specs: Sequence[LeafSpec], batches: Sequence[WrittenBatch]) -> npt.NDArray[np.int64]:
    """Sum up the bytes of each leaf that were written."""
    arrived = np.zeros(len(specs), np.int64)
    coded: dict[tuple[int, tuple[int, ...]], int] = {}
    for batch in batches:
        for part in batch.written:
            if part.coded is None:
                arrived[part.leaf] += part.nbytes
            else:
                chunk = (part.leaf, part.chunk)
                coded[chunk] = coded.get(chunk, part.coded) - part.nbytes

        for pack in batch.packs:
            np.add.at(arrived, np.array(pack.indices, np.int64), pack.sizes)

    # An encoded chunk counts with its original length, once all of its encoded bytes have arrived.
    for (index, _), absent_bytes in coded.items():
        if absent_bytes == 0:
            arrived[index] += specs[index].chunk_nbytes

    return arrived


def _write_document(run: SaveRun, document: Document, directories: dict[str, None]) -> None:
    directory = os.path.dirname(document.path)
    if directory not in directories:
        run.store.make_directory(run.workspace.path(directory))
        directories[directory] = None

    run.store.write_file(run.workspace.path(document.path), document.data)

"""Commits what several processes wrote: each tells the primary, which writes the documents for all.

On local disks each writes the documents of what it has there, and tells the primary that this is durable.
"""

from __future__ import annotations

__all__ = ("JointCommit",)

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final, final

from penstock.kernel.errors import CoordinationError
from penstock.kernel.messages.joint_plan import ArrangedPart
from penstock.kernel.messages.save import Leaf, Leaves, Pending, SavePlan, WrittenBatch
from penstock.kernel.pipeline.run_context import SaveRun
from penstock.kernel.protocols.leaf import LeafSpec
from penstock.kernel.protocols.leaf_handlers import FilesHandler
from penstock.kernel.protocols.written import DISK_MARK, DiskMark, Document
from penstock.stages.files import by_folder, commit_own, finalize_handlers, write_documents
from penstock.stages.joint.arranged_files import complete_files
from penstock.stages.joint.own_leaves import JoinedTrees, announced_numbers, encoded_own
from penstock.stages.joint.part_columns import decoded_part, encoded_part, reading_part, written_by
from penstock.stages.messages.batching import arrived_leaves, check_all_there
from penstock.stages.reuse.base_comparison import digest_name

MOST_INLINE: Final = 16 * 1024
"""Bytes of a part that go by the coordination service, which is made for small values. Others are a file."""

INLINE, IN_FILE = b"=", b"@"
PARTS_FOLDER: Final = "_PENSTOCK_PARTS"
"""Where they are until the primary has read them, by the index of the process. The operation's name ends it:
in a bucket, a process that was stopped may write there when another save is under way."""


@final
class JointCommit:
    """The commit of one save by several processes.

    Args:
        run: The save.
        batches: What this process wrote; what the others wrote is added to it.
    """

    __slots__ = ("_batches", "_operation", "_run")

    def __init__(self, run: SaveRun, batches: list[WrittenBatch]) -> None:
        self._run = run
        self._operation = run.operation
        self._batches = batches

    async def commit(self, plan: SavePlan) -> int:
        """Send this process's part; as the primary, merge those of all. Returns the number of data files."""
        run, operation = self._run, self._operation
        n_files, leaves = 0, None
        if operation.is_local:
            mark = DiskMark(operation.process_index, tuple(operation.processes), operation.identity)
            own = replace(plan, digests=_named(run, plan))
            n_files = await commit_own(run, own, self._batches, (Document(DISK_MARK, mark.encoded()),))
        else:
            leaves = await run.threads.run(arrived_leaves, plan, self._batches)

        async def bring() -> bytes:
            return INLINE if leaves is None else await run.threads.run(self._part, plan, leaves)

        async def merge(parts: Mapping[int, bytes]) -> int:
            if leaves is None:  # each has all durable on its own disk
                return n_files

            # What all others wrote makes many objects, and that may be long after the save began.
            async with run.calm():
                return await self._merge(plan, leaves, parts)

        return await operation.commit(bring, merge) or n_files

    @property
    def _arranged(self) -> ArrangedPart | None:
        return next((batch.arranged for batch in self._batches if batch.arranged is not None), None)

    def _part(self, plan: SavePlan, leaves: Leaves) -> bytes:
        """Make the names of the files that this process wrote durable, and encode where all is."""
        run = self._run
        files = {file for batch in self._batches for file in batch.written.files}
        for directory in sorted({os.path.dirname(file) for file in files}):
            run.store.sync_directory(run.workspace.path(directory))

        own = encoded_own(plan, leaves.specs)
        data = encoded_part(
            self._batches,
            announced_numbers(plan) if own else None,
            own,
            _named(run, plan),
            b"" if self._arranged is None else self._arranged.digests.encoded(),
        )
        if len(data) <= MOST_INLINE:
            return INLINE + data

        run.workspace.make_directory(self._parts_folder)
        run.store.write_file(self._part_file(self._operation.process_index), data)
        return IN_FILE

    async def _merge(self, plan: SavePlan, arrived: Leaves, parts: Mapping[int, bytes]) -> int:
        """Write the documents for all. Returns how many data files there are."""
        run = self._run
        n_here, beside = len(plan.infos), plan.beside
        plan, specs = await run.threads.run(self._joined, arrived.specs, plan, parts)
        plan = replace(plan, beside=beside)
        leaves = Leaves(range(len(plan.infos)), specs, None, plan.infos, plan.handlers)
        handled = [each for batch in self._batches for each in batch.handled]
        handled += _handled_elsewhere(run, leaves[n_here:])
        if handled:
            await finalize_handlers(run, handled)

        return await run.threads.run(self._documents_written, leaves, plan)

    def _documents_written(self, leaves: Leaves, plan: SavePlan) -> int:
        """Write the documents for all, and drop their sources.

        Here, in the worker thread: of thousands of processes, that would take the event loop 10 ms.
        """
        n_files = write_documents(self._run, leaves, plan, self._batches)
        while self._batches:
            self._batches.pop()

        return n_files

    def _joined(
        self, specs: Sequence[LeafSpec], plan: SavePlan, parts: Mapping[int, bytes]
    ) -> tuple[SavePlan, Sequence[LeafSpec]]:
        """Take up what the others wrote; return the plan and the specs of the leaves of all."""
        run = self._run
        told = {index: decoded_part(self._content(index, part)) for index, part in parts.items()}
        with reading_part():
            own = {index: part.own for index, part in told.items()}
            all_leaves = JoinedTrees(run.caches.joined_trees).of(plan, specs, own, run.registry)

        specs, digests = all_leaves.specs, dict(_named(run, plan))
        for part in told.values():
            digests.update(part.digests)

        plan = replace(all_leaves.plan, digests=digests)
        self._batches.append(written_by(specs, told, all_leaves.places))
        sums = [part.sums for part in told.values()]
        del told
        if any(part == IN_FILE for part in parts.values()):
            run.store.remove_tree(run.workspace.path(self._parts_folder))

        check_all_there(plan, specs, self._batches)
        arranged = self._arranged
        if arranged is not None:
            with reading_part():
                for told_sums in sums:
                    arranged.digests.join(told_sums)

            complete_files(run, arranged)

        return plan, specs

    @property
    def _parts_folder(self) -> str:
        return f"{PARTS_FOLDER}-{self._operation.identity}"

    def _part_file(self, index: int) -> str:
        return self._run.workspace.path(f"{self._parts_folder}/{index}")

    def _content(self, index: int, part: bytes) -> bytes:
        if part.startswith(INLINE):
            return part[len(INLINE) :]
        if part == IN_FILE:
            return self._run.store.read_file(self._part_file(index))

        raise CoordinationError(f"{part[:80]!r} is no part: do all processes run one penstock?")


def _handled_elsewhere(run: SaveRun, leaves: Sequence[Leaf]) -> Iterator[Pending]:
    """Yield the files of leaves that only other processes have, for their handlers to complete."""
    for leaf in leaves:
        if isinstance(leaf.handler, FilesHandler):
            for folder, there in by_folder(run, [leaf]):
                yield Pending(there, leaf.handler, folder, None)


def _named(run: SaveRun, plan: SavePlan) -> Mapping[str, bytes]:
    """Return the digests of what this process writes, by the names they are recorded under."""
    return {digest_name(run, name): digest for name, digest in plan.digests.items()}

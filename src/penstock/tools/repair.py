"""Writes every intact leaf of a damaged checkpoint into a new one, and says what is gone."""

from __future__ import annotations

__all__ = (
    "repair",
    "try_leaves",
)

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Final, Literal, final

from penstock.checkpointer.checkpointer import Path
from penstock.config.config import Config
from penstock.handlers.formats.leaf_table import StoredArray
from penstock.handlers.formats.safetensors.safetensors_layout import SafetensorsLayout
from penstock.handlers.formats.safetensors.tensor_paths import SUFFIX
from penstock.handlers.formats.verification import Finding, finding_of
from penstock.handlers.layouts.discovery import checkpoint_path, find_place, finished_steps
from penstock.handlers.leaves.stored_value import SourceFiles, StoredValue, StoredValueHandler
from penstock.handlers.stores.publishing.paths import path_or_url, path_to_save_to
from penstock.handlers.stores.publishing.reading import Reading, read_unchanged
from penstock.kernel.concurrency.threads import Threads
from penstock.kernel.errors import CorruptCheckpointError, PathError, PenstockError, SpecError
from penstock.kernel.memory.memory_limit import MOST_EXPANSION
from penstock.kernel.memory.regulator import MemoryRegulator
from penstock.kernel.messages.save import Leaf
from penstock.kernel.pipeline.failures import short_traceback
from penstock.kernel.protocols.layouts import StoredCheckpoint
from penstock.kernel.protocols.leaf import StoredLeaf
from penstock.kernel.protocols.save_format import SaveFormat
from penstock.kernel.protocols.stores import Store
from penstock.kernel.protocols.written import Document
from penstock.rewriting.rewriting import Rewriting, budget, check_apart, job_of
from penstock.stores.store_finder import StoreFinder
from penstock.tools.carried_files import carried_files
from penstock.tools.repair_report import RepairReport
from penstock.tools.salvage import Salvage, find_damage
from penstock.tools.tensor_salvage import TensorSalvage
from penstock.verification.verify import compare_ranges


@short_traceback
async def repair(
    source: Path,
    target: Path,
    *,
    others: Sequence[Path] = (),
    overwrite: bool = False,
    max_expansion: int = MOST_EXPANSION,
    save_format: SaveFormat | None = None,
    config: Config | Path | None = None,
    store: Store | None = None,
    memory_limit: int | str | None = None,
    memory: MemoryRegulator | None = None,
) -> RepairReport:
    """Write every intact leaf of the damaged checkpoint `source` into a new one, and say what is gone.

    A leaf that is damaged is taken from one of `others` if what is stored there has the checksums that were
    recorded of the damaged one: then it is the same value. It is copied, never linked, since a link would
    be the same bytes on the medium. Items, their documents and custom metadata are carried over, too.
    Leaves that are gone are left out: restore with `like` and `on_missing="keep"`. The new checkpoint is of
    the same kind: of Orbax's layout, or safetensors.

    Args:
        source: One checkpoint, or a step. It is left as it is.
        target: Where the new one goes. Of safetensors: a file if it ends in `.safetensors`, else a folder.
        others: Other checkpoints of the same structure, such as the steps before and after, or a directory
            of steps.
        overwrite: Replace the checkpoint at `target`, atomically.
        max_expansion: How many times the bytes stored the arrays of an item may take; else it is gone.
        save_format: How arrays are stored in the new one, in whatever format of Orbax's layout `source`
            was; by default in one OCDBT database, without a codec.
        config: As for `Checkpointer`, and so are all that follow.
        store: Where all of them are; by default each where its path says, on a disk or in a bucket.
        memory_limit: Host bytes that may be held.
        memory: The budget of a Checkpointer, to share it.

    Raises:
        CorruptCheckpointError: If no leaf of it can be saved.
        SpecError: If `source` is a directory of steps, or `target` cannot be written.
        PathError: If one of `others` is elsewhere than `source`: on a disk, or in another bucket.
        UnsupportedFormatError: If it holds tensors of a type that penstock does not read.
        ReplacedError: If `source` was replaced again and again while it was read.
        StorageError: If the medium refuses the new checkpoint.

    Cancellation:
        Nothing is left at `target`.
    """
    options, regulator = budget(config, (memory_limit, None, None, None), memory)
    stores = StoreFinder(store, options.store)
    start, final = path_or_url(source), path_to_save_to(target)
    places = [path_or_url(other) for other in others]
    origin = stores.at(start)
    for other in places:
        if stores.at(other) is not origin:
            raise PathError(other, f"lies on another disk or in another bucket than {start!r}; copy it there")

    options, job = job_of(options, None)
    rewriting = Rewriting(
        store=stores.at(final),
        config=options,
        memory=regulator,
        coordinator=job,
        overwrite=overwrite,
        save_format=save_format,
        source=origin,
    )
    return await _Repair(rewriting, Threads(), start, places, max_expansion).run(final)


_SAVED: Final = frozenset({"kept", "unchecked", "taken"})
_PIECE_BYTES: Final = 4 * 2**20


@final
@dataclass(frozen=True, slots=True)
class _Repair:
    """One repair."""

    rewriting: Rewriting
    threads: Threads
    start: str
    others: Sequence[str]
    max_expansion: int

    async def run(self, final: str) -> RepairReport:
        store, threads, start = self.rewriting.origin, self.threads, self.start
        is_tensors = await threads.run(_check_source, store, start, final)
        if is_tensors and self.rewriting.save_format is not None:
            raise SpecError("save_format is for Orbax's layout, and safetensors are repaired as safetensors")

        return await read_unchanged(store, threads, start, partial(self._once, final, is_tensors))

    async def _once(self, final: str, is_tensors: bool, source: Reading) -> RepairReport:
        store, threads, start = self.rewriting.origin, self.threads, self.start
        others = await threads.run(_steps_of, store, [other for other in self.others if other != start])
        async with self.rewriting.source_files(threads) as files:
            salvage = await (self._tensors if is_tensors else self._trees)(others, files)
            items = await threads.run(salvage.items, files)
            if not any(leaf.outcome in _SAVED for leaf in salvage.leaves):
                problems = [leaf.problem for leaf in salvage.leaves if leaf.problem]
                problem = problems[0] if problems else "it has no leaves"
                raise CorruptCheckpointError(start, f"holds nothing that can be saved: {problem}")

            carried: list[Document] = []
            if not final.endswith(SUFFIX):
                carried = await threads.run(partial(carried_files, store, start, intact_only=True))

            layout = SafetensorsLayout(beside=[file.path for file in carried]) if is_tensors else None
            report = await self.rewriting.save(source, final, items, layout, beside=carried)

        kind: Literal["orbax", "safetensors"] = "safetensors" if is_tensors else "orbax"
        return RepairReport(start, final, report.nbytes, tuple(salvage.leaves), kind)

    async def _trees(self, others: Sequence[str], files: SourceFiles) -> Salvage:
        """Find what is damaged in a checkpoint of Orbax's layout."""
        store, memory = self.rewriting.origin, self.rewriting.memory
        damage = await self.threads.run(find_damage, store, self.start, others)
        for label, survey in damage.surveys.items():
            damage.add(label, await compare_ranges(store, self.threads, memory, survey.ranges))

        for place, opened, leaves in await self.threads.run(damage.doubtful, self.max_expansion):
            damage.add(place, await self._try(opened, leaves, files))

        return Salvage(damage, others, self.max_expansion)

    async def _tensors(self, others: Sequence[str], files: SourceFiles) -> TensorSalvage:
        """Find what is damaged in safetensors."""
        store, memory = self.rewriting.origin, self.rewriting.memory
        salvage = await self.threads.run(TensorSalvage, store, self.start, others)
        salvage.add(await compare_ranges(store, self.threads, memory, salvage.damaged.ranges))
        salvage.add(await self._try(salvage.damaged.opened, salvage.doubtful, files))
        return salvage

    async def _try(
        self, opened: StoredCheckpoint, leaves: Sequence[StoredLeaf], files: SourceFiles
    ) -> Sequence[Finding]:
        """Read leaves that no checksum vouches for: one that cannot be read is gone."""
        memory = self.rewriting.memory
        piece_bytes = min(_PIECE_BYTES, memory.limit)
        return await try_leaves(opened, leaves, files, self.threads, memory, piece_bytes)


def _steps_of(store: Store, paths: Sequence[str]) -> list[str]:
    """Return checkpoints: those given, and each step of directories of steps."""
    found: list[str] = []
    for path in paths:
        steps = finished_steps(store, path)
        found += [path] if steps is None else [os.path.join(path, name) for name in steps]

    return found


def _check_source(store: Store, start: str, final: str) -> bool:
    """Raise unless `start` is one checkpoint, apart from `final`. Return whether it is safetensors."""
    check_apart(start, final)
    if final == start:
        raise PathError(final, "is the damaged checkpoint itself; name another path")
    place = find_place(store, start)
    if place.kind == "tensors":
        return True
    if place.kind == "root":
        problem = "is a directory of steps; repair one of them"
        raise SpecError(f"{start} {problem}, as in {checkpoint_path(store, start)}")
    if final.endswith(SUFFIX):
        raise PathError(final, "is the name of a safetensors file, and the damaged checkpoint is Orbax's")

    return False


_HANDLER: Final = StoredValueHandler()
_AT_ONCE: Final = 64
"""Leaves read in one call of a thread, if all of them are small."""


async def try_leaves(
    opened: StoredCheckpoint,
    leaves: Sequence[StoredLeaf],
    files: SourceFiles,
    threads: Threads,
    memory: MemoryRegulator,
    piece_bytes: int,
) -> list[Finding]:
    """Read leaves as they would be saved, piece by piece, and say which cannot be.

    Args:
        opened: The tree that they belong to.
        leaves: Which of its leaves.
        files: Opens its files.
        threads: For reading.
        memory: The budget, of which one piece is leased.
        piece_bytes: Of a piece.

    Cancellation:
        Returns when the current group is read.
    """
    findings: list[Finding] = []
    remaining = iter(leaves)
    while group := list(islice(remaining, _AT_ONCE)):
        largest = max(_piece_bytes(leaf, piece_bytes) for leaf in group)
        lease = await memory.acquire(largest, admit_oversize=True)
        try:
            findings += await threads.run(_try, opened, group, files, piece_bytes)
        finally:
            lease.release()

    return findings


def _piece_bytes(leaf: StoredLeaf, piece_bytes: int) -> int:
    """Return the bytes of a leaf that are held at once: a chunk with a codec cannot be cut."""
    array, spec = leaf.detail, leaf.spec
    coded = isinstance(array, StoredArray) and not array.format.plain
    return min(spec.nbytes, max(piece_bytes, spec.chunk_nbytes if coded else 0))


def _try(
    opened: StoredCheckpoint, leaves: Iterable[StoredLeaf], files: SourceFiles, piece_bytes: int
) -> list[Finding]:
    findings: list[Finding] = []
    for leaf in leaves:
        value = StoredValue(files, opened, leaf)
        try:
            (spec,) = _HANDLER.describe([value], [leaf.info], {})
            for piece in _HANDLER.pieces(Leaf(0, leaf.info, value, spec, _HANDLER), piece_bytes):
                piece.take()
        except PenstockError as error:
            found = finding_of(error, opened.path)
            findings.append(replace(found, kind="damaged", key_paths=(leaf.info.key_path,)))

    return findings

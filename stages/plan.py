"""Decides what to read, from what is on disk and what the caller wants.

`mapped_leaves` maps leaves instead of reading them: their memory is the mapped file, in the page cache.
"""

from __future__ import annotations

__all__ = ("Plan", "mapped_leaves")

import os
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from operator import add
from typing import ClassVar, Final, NamedTuple, final

from crc32c import crc32c

from penstock.kernel.concurrency.brief_steps import cuts
from penstock.kernel.errors import ChecksumError, UnsupportedByStoreError
from penstock.kernel.memory.memory_limit import MOST_EXPANSION
from penstock.kernel.messages.restore import Located, PlannedBatch
from penstock.kernel.options import fit_fields
from penstock.kernel.pipeline.run_context import RestoreRun
from penstock.kernel.pipeline.stage import Actor, Messages
from penstock.kernel.pipeline.statistics import Advice
from penstock.kernel.pipeline.together import together
from penstock.kernel.protocols.leaf_handlers import ReadLeaf, ReadLeaves
from penstock.kernel.protocols.reads import AdoptsMemory, CheckedRead, DirectRead, Read, ScatterRead
from penstock.kernel.protocols.stores import SharedFiles
from penstock.stages.messages.batching import batched
from penstock.stages.planning.leaf_reads import check_plain
from penstock.stages.planning.restore_planner import plan_restore
from penstock.stages.read import damage_of_shared

COMPARED_AT_ONCE: Final = min(4, os.cpu_count() or 1)
"""Threads that compare mapped bytes with their checksums. Of little bytes one does."""

_LEAST_COMPARED: Final = 2**25


@final
class Mapped(NamedTuple):
    """Mapped bytes of a leaf that have a checksum."""

    read: DirectRead | CheckedRead
    data: memoryview
    key_path: str


async def mapped_leaves(
    run: RestoreRun, packs: Sequence[ReadLeaves], leaves: Sequence[ReadLeaf], *, verify: bool
) -> list[ReadLeaf]:
    """Map leaves as `map_leaves` does.

    Args:
        run: The restore.
        packs: What is to be restored: small leaves that are whole in a file.
        leaves: The others.
        verify: Whether mapped bytes are compared with their checksums, which reads every byte.

    Raises:
        PenstockError: As `map_leaves`.
        ChecksumError: If `verify` is set and mapped bytes differ from those written: of the first that do.
    """
    found, mapped = await run.threads.run(map_leaves, run, packs, leaves)
    if not verify:
        return found

    sizes = [each.read.nbytes for each in mapped]
    most = max(-(-sum(sizes) // COMPARED_AT_ONCE), _LEAST_COMPARED)
    parts = [mapped[start:stop] for start, stop in cuts(sizes, most)]
    checks: list[Callable[[], Awaitable[ChecksumError | None]]]
    checks = [partial(run.threads.run, damage_of_pack, pack) for pack in packs]
    checks += [partial(run.threads.run, first_damage, part) for part in parts]
    for damage in await together(checks):
        if damage is not None:
            raise damage

    return found


def first_damage(mapped: Sequence[Mapped]) -> ChecksumError | None:
    """Return the error of the first bytes that differ from those written; None if none do. Blocking."""
    for read, data, key_path in mapped:
        if crc32c(data) != read.crc32c:
            problem = f"bytes {read.offset} to {read.offset + read.nbytes} differ from those written"
            return ChecksumError(read.file, problem, key_path=key_path)

    return None


def damage_of_pack(pack: ReadLeaves) -> ChecksumError | None:
    """Return the error of the first leaf of a pack that differs from what was written. Blocking."""
    shared = pack.shared
    if shared is None or not shared.buffer.is_filled:  # the stage that reads it compares
        return None

    return damage_of_shared(shared, shared.buffer.data, shared.buffer.starts, pack.info)


def map_leaves(
    run: RestoreRun, packs: Sequence[ReadLeaves], leaves: Sequence[ReadLeaf]
) -> tuple[list[ReadLeaf], list[Mapped]]:
    """Map every region that is stored as one plain range of a file, and the files of packs. Blocking.

    A region that is stored in another way (with a codec, in several chunks, for another sharding) is
    read as usual.

    Args:
        run: The restore.
        packs: What is to be restored: small leaves that are whole in a file.
        leaves: The others.

    Returns:
        The others with what is left to be read; and what of them was mapped.

    Raises:
        UnsupportedByStoreError: If the store cannot map files.
        StorageError: If a file cannot be mapped.
        UnsupportedFormatError: If a leaf is opaque: its file does not hold its plain bytes.
    """
    store = run.store
    if (shared := store.shared_files) is None:
        raise UnsupportedByStoreError("map the files of", run.path, store, SharedFiles)

    files = _MappedFiles(shared)
    found: list[Mapped] = []
    for pack in packs:
        _map_pack(pack, files)

    return [_map_leaf(leaf, files, found) for leaf in leaves], found


@final
class _MappedFiles(dict[str, memoryview]):
    """Files by their path, each mapped when it is asked for."""

    def __init__(self, store: SharedFiles) -> None:
        self._store = store

    def __missing__(self, path: str) -> memoryview:
        found = self[path] = self._store.map_file(path)
        return found


def _map_pack(pack: ReadLeaves, files: _MappedFiles) -> None:
    if (shared := pack.shared) is None:
        return

    file = files[shared.file]
    if max(map(add, shared.offsets, shared.sizes)) <= len(file):  # else the stage that reads it raises
        shared.buffer.fill(file, shared.offsets)


def _map_leaf(leaf: ReadLeaf, files: _MappedFiles, found: list[Mapped]) -> ReadLeaf:
    check_plain(leaf.reads)
    mapped: set[int] = set()  # regions, by identity
    for region in leaf.target.regions:
        mine = [read for read in _direct(leaf.reads) if read.region is region]
        if not isinstance(region, AdoptsMemory) or not _is_one_range(mine, region.nbytes):
            continue

        path, offset = mine[0].file, mine[0].offset
        if offset + region.nbytes > len(files[path]):
            continue  # the stage that reads it raises the error

        region.adopt(files[path][offset : offset + region.nbytes])
        mapped.add(id(region))

    if not mapped:
        return leaf

    found += _with_checksums(leaf, files, mapped)
    return replace(leaf, reads=tuple(_left(leaf.reads, mapped)))


def _direct(reads: Sequence[Read]) -> list[DirectRead]:
    """Return all direct reads, and the direct parts of the others, by file and offset."""
    found = [read for read in reads if isinstance(read, DirectRead)]
    for read in reads:
        if isinstance(read, CheckedRead):
            found += [part for part in read.parts if isinstance(part, DirectRead)]

    return sorted(found, key=lambda read: (read.file, read.offset))


def _left(reads: Sequence[Read], mapped: set[int]) -> Iterator[Read]:
    """Yield the reads that are left."""
    for read in reads:
        if isinstance(read, CheckedRead):
            parts = tuple([part for part in read.parts if not _is_mapped(part, mapped)])
            if parts:
                yield replace(read, parts=parts)
        elif isinstance(read, ScatterRead) or not _is_mapped(read, mapped):
            yield read


def _is_mapped(read: Read, mapped: set[int]) -> bool:
    return isinstance(read, DirectRead) and id(read.region) in mapped


def _with_checksums(leaf: ReadLeaf, files: dict[str, memoryview], mapped: set[int]) -> Iterator[Mapped]:
    for read in leaf.reads:
        inside = read.parts if isinstance(read, CheckedRead) else (read,)
        if isinstance(read, DirectRead | CheckedRead) and any(_is_mapped(part, mapped) for part in inside):
            data = files[read.file][read.offset : read.offset + read.nbytes]
            if read.crc32c is not None:
                yield Mapped(read, data, leaf.info.key_path)


def _is_one_range(reads: Sequence[DirectRead], nbytes: int) -> bool:
    """Return whether reads fill a region, in order, from one range of one file."""
    end = 0
    for read in reads:
        first = reads[0]
        if read.file != first.file or read.start != end or read.offset != first.offset + end:
            return False

        end += read.nbytes

    return end == nbytes > 0


@final
@dataclass(frozen=True, slots=True)
class Plan:
    """Takes the `Located`, yields `PlannedBatch`es: small leaves in packs, then the others in order.

    Every batch refers to the `RestorePlan`. If nothing is read, one empty batch carries it.

    Raises:
        StructureMismatchError: If the target and the checkpoint differ; lists every difference.
        NoHandlerError: If no handler is registered for a type, wanted or stored.
        SpecError: If an option of the restore does not fit.
        ExpansionError: If there is no target, and the result would take too many times the bytes stored.
        InsufficientMemoryError: If the machine has less memory than the result takes.

    Attributes:
        max_expansion: How many times the bytes stored a result without a target may take.
    """

    messages: ClassVar[Messages] = {Located: PlannedBatch}
    advice: ClassVar[Advice] = Advice(
        busy="Its time grows with the number of leaves: restore fewer, with `only=`.",
        few_leaves=(
            "For so few leaves that is what a first restore loads (`penstock.warm_up()` does it before), or "
            "a type handler that takes its time."
        ),
    )

    max_expansion: int = field(default=MOST_EXPANSION, metadata={"positive": True})

    def __post_init__(self) -> None:
        fit_fields(self, "plan")

    @asynccontextmanager
    async def open(self, run: RestoreRun, /) -> AsyncGenerator[Actor]:
        """Yield the actor of one restore."""

        async def plan(located: Located, /) -> AsyncIterator[PlannedBatch]:
            result, packs, leaves = await run.threads.run(plan_restore, run, located, self.max_expansion)
            if located.request.options.mmap:
                verify = located.request.options.verify is True
                leaves = await mapped_leaves(run, packs, leaves, verify=verify)

            n_leaves, nbytes = sum(map(len, packs)), sum([pack.nbytes for pack in packs])
            if leaves:
                alone = ReadLeaves.of(leaves)
                n_leaves, nbytes = n_leaves + alone.n_ended, nbytes + alone.nbytes
                del alone

            run.progress.plan(n_leaves, nbytes)
            if not n_leaves:
                yield PlannedBatch((), plan=result)

            packs.reverse()
            while packs:  # what is yielded is held no longer, for it will have a buffer
                yield PlannedBatch(packs.pop(), plan=result)

            if leaves:
                for batch in batched(leaves, run.limits, plan=result):
                    yield batch
                    del batch  # the next stage owns the leaves

        yield plan

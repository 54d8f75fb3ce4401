"""Finds the leaves that the base checkpoint holds already, and links their files instead of writing them.

Checkpoints that share files do not depend on each other. The files are hard links, so either checkpoint
may be deleted.

A leaf is known to be unchanged by its value in memory. The bytes on the medium may have changed since. Then
every later checkpoint that shares them is damaged, too, though the right value was there at each save.
So each save compares a share with its checksums, and several in a row read every byte once. What differs is
written from memory.
"""

from __future__ import annotations

__all__ = (
    "Turn",
    "divided_by",
    "due",
    "files_worth_linking",
    "intact_only",
    "link_files",
    "linkable",
    "set_aside",
    "unless_replaced",
)

import mmap
import os
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import Final, TypeAlias, TypeVar, final

from anyio.from_thread import check_cancelled
from crc32c import crc32c

from penstock.kernel.errors import CorruptCheckpointError, KeeperLostError, PenstockError, StorageError
from penstock.kernel.messages.save import Leaves, SavePlan, WrittenBatch
from penstock.kernel.pipeline.run_context import SaveRun
from penstock.kernel.pipeline.together import together
from penstock.kernel.protocols.build_place import StateRead
from penstock.kernel.protocols.stores import ReadableFile, Store
from penstock.kernel.protocols.written import Written, WrittenTable
from penstock.stages.reuse.base_comparison import Candidates, compare

T = TypeVar("T")

LIVE_SHARE = 0.5
"""A file is linked if at least this share of its bytes is still needed. Otherwise the leaves in it are
written again. So a chain of checkpoints never takes more than twice the bytes of its leaves."""


async def set_aside(run: SaveRun, leaves: Leaves, plan: SavePlan) -> tuple[Leaves, SavePlan]:
    """Return the leaves that must be written, in order, and the plan with all others in `kept`.

    The files of the leaves that are kept are linked into the new checkpoint. If another save overwrites the
    base meanwhile, none are kept: what was linked may be of either checkpoint.

    Raises:
        CorruptCheckpointError: If the base is missing or damaged.
    """

    async def look(base: str, identity: object) -> tuple[Leaves, SavePlan]:
        return await _set_aside(run, base, identity, leaves, plan)

    found = await unless_replaced(run, look)
    if found is not None:
        return found

    # Several processes that save together link elsewhere: the place is this process's own.
    await run.workspace.restart()
    return leaves, plan


async def unless_replaced(run: SaveRun, look: Callable[[str, object], Awaitable[T]]) -> T | None:
    """Return what `look` finds in the base, given its path and identity; None if it is replaced meanwhile.

    The base is held for reading. What `look` raises counts only if the base stayed the same. If the save does
    without a base that is gone or damaged, there is nothing in such a one.
    """
    base = run.base
    assert base is not None
    source: StateRead | None = None
    try:
        async with run.reading(base) as source:
            return await look(base, source.identity)
    except PenstockError as error:
        if source is None or source.replaced is None:
            broken = _broken_part(base, error)
            if broken is None or not run.request.base_if_whole:
                raise

            run.events.warning("save.not_linked", path=run.path, file=broken, error=repr(error))
            return None

    run.events.warning("save.base_replaced", path=run.path, base=base)
    return None


def _broken_part(base: str, error: PenstockError) -> str | None:
    """Return the path in the base that is gone, damaged or cannot be read; None if the error is another."""
    if isinstance(error, CorruptCheckpointError | StorageError) and error.path.startswith(base):
        return error.path
    if isinstance(error, KeeperLostError):  # which has the base, too
        return base

    return None


async def _set_aside(
    run: SaveRun, base: str, identity: object, leaves: Leaves, plan: SavePlan
) -> tuple[Leaves, SavePlan]:
    directory, found, files = await linkable(run, base, identity, leaves, plan)
    if not files:
        return leaves, plan

    shared = await link_files(run, directory, files)
    return await run.threads.run(divided_by, run, found, shared, leaves, plan)


async def linkable(
    run: SaveRun, base: str, identity: object, leaves: Leaves, plan: SavePlan
) -> tuple[str, Candidates, set[str]]:
    """Find the unchanged leaves whose stored bytes are intact, as far as they are compared in this save.

    Returns:
        The directory that the names of files are relative to, the leaves, and the files worth linking.
    """
    directory, found, sizes = await run.threads.run(compare, run, base, identity, leaves, plan)
    files = files_worth_linking(found.parts, sizes)
    if not files:
        return directory, found, set()

    # Only what is linked is compared, and only leaves all of whose files are.
    found = found.only(
        [at for at, parts in enumerate(found.parts) if files.issuperset([p.file for p in parts])]
    )
    intact = await intact_only(run, directory, found)
    return directory, intact, files if intact is found else files_worth_linking(intact.parts, sizes)


def divided_by(
    run: SaveRun, found: Candidates, shared: set[str], leaves: Leaves, plan: SavePlan
) -> tuple[Leaves, SavePlan]:
    """Set aside the leaves all of whose files are shared."""
    chosen = [at for at, parts in enumerate(found.parts) if shared.issuperset([part.file for part in parts])]
    if not chosen:
        return leaves, plan

    # Their bytes are on the medium already, so their arrays may die now.
    kept = found.leaves.part(chosen).without_values()
    written = WrittenTable.of([part for at in chosen for part in found.parts[at]], plan.specs)
    batch = WrittenBatch(kept, written)
    gone = set(kept.indices)
    run.events.info("save.unchanged", path=run.path, n_leaves=len(kept), nbytes=batch.nbytes)
    rest = leaves.part([number for number, index in enumerate(leaves.indices) if index not in gone])
    return rest, replace(plan, kept=batch)


def files_worth_linking(unchanged: Iterable[Sequence[Written]], sizes: Mapping[str, int]) -> set[str]:
    """Choose the data files of the base that the new checkpoint shares.

    Args:
        unchanged: The parts of each unchanged leaf.
        sizes: Bytes of each file.

    Returns:
        The files with at least `LIVE_SHARE` of their bytes needed. A leaf can be kept only if all of its
        files are shared, so the parts of other leaves do not count as needed.
    """
    leaves = [parts for parts in unchanged if parts]
    files = {part.file for parts in leaves for part in parts}
    # Until nothing changes: a leaf that loses one of its files leaves fewer needed bytes in the others.
    while True:
        needed: dict[str, int] = defaultdict(int)
        for parts in leaves:
            if all(part.file in files for part in parts):
                for part in parts:
                    needed[part.file] += part.nbytes

        enough = {file for file in files if needed[file] and needed[file] >= LIVE_SHARE * sizes[file]}
        if enough == files:
            return files

        files = enough


async def link_files(run: SaveRun, directory: str, files: Iterable[str]) -> set[str]:
    """Link each file below `directory` into the new checkpoint, durably. Returns those that could be linked.

    The writer of a file may not have synced it: think of `cp -r`.
    """
    names = sorted(files)
    for folder in sorted(set(map(os.path.dirname, names))):
        await run.workspace.open(folder)

    return await run.threads.run(_link, run, directory, names)


def _link(run: SaveRun, directory: str, files: Sequence[str]) -> set[str]:
    shared: set[str] = set()
    for file in files:
        path = run.workspace.path(file)
        try:
            run.store.share(os.path.join(directory, file), path)
        except StorageError as error:
            run.events.warning("save.not_linked", path=run.path, file=file, error=repr(error))
            continue

        run.store.sync_file(path)
        shared.add(file)

    return shared


LITTLE_BYTES: Final = 32 * 2**20
LITTLE_PARTS: Final = 2048
"""So little is compared as a whole in every save: it takes some 20 ms."""

BLOCK_BYTES: Final = 4 * 2**20
LEAST_BYTES: Final = 64 * 2**10
"""Of a block that is read without a lease."""

CONCURRENCY: Final = 2

Due: TypeAlias = Sequence[tuple[int, Written]]
"""Parts to compare, each with the number of its candidate."""


@final
@dataclass(frozen=True, slots=True)
class Turn:
    """The place of one save among those that link."""

    number: int
    salt: int = (
        0  #: another one in each process, so that a run that begins again often does not repeat itself
    )


def due(names: Sequence[str], parts: Sequence[Sequence[Written]], turn: Turn, every: int) -> Due:
    """Choose the parts that are compared in one save. Pure.

    Args:
        names: The stored name of each leaf.
        parts: Of each leaf, in the order of its bytes.
        turn: Of this save.
        every: In so many saves in a row each part is compared once; 0: never.

    Returns:
        About `1 / every` of the parts, or all of them if they are few.
    """
    everything = [(number, part) for number, of_leaf in enumerate(parts) for part in of_leaf]
    few = len(everything) <= LITTLE_PARTS and sum([part.nbytes for _, part in everything]) <= LITTLE_BYTES
    if every <= 0:
        return []
    if every == 1 or few:
        return everything

    # Each cycle deals anew: where two trees are saved by turns, neither gets the same share over and over.
    cycle, at = divmod(turn.number, every)
    return [
        (number, part)
        for number, (name, of_leaf) in enumerate(zip(names, parts, strict=True))
        for part in of_leaf[(at - hash((turn.salt, cycle, name))) % every :: every]
    ]


async def intact_only(run: SaveRun, directory: str, found: Candidates) -> Candidates:
    """Return the candidates without those that differ in a compared part; an event names each.

    Args:
        run: Of the save.
        directory: Which the names of files are relative to.
        found: What would be linked.

    Cancellation:
        Returns once the current reads have ended.
    """
    every = run.compare_linked_every
    chosen = await run.threads.run(_due, run, found, every)
    if not chosen:
        return found

    damaged: dict[int, tuple[Written, str]] = {}

    async def compare(share: Due) -> None:
        nbytes = min(BLOCK_BYTES, run.memory.limit_of(run.flow))
        # What is staged may hold all memory, and waits for this to be written.
        lease = run.memory.acquire_nowait(nbytes, flow=run.flow)
        if lease is None:
            nbytes = LEAST_BYTES
        try:
            for number, part, problem in await run.threads.run(_damaged, run.store, directory, share, nbytes):
                damaged.setdefault(number, (part, problem))
        finally:
            if lease is not None:
                lease.release()

    await together([partial(compare, share) for share in _shares(chosen)])
    for number, (part, problem) in sorted(damaged.items()):
        key_path = found.leaves[number].info.key_path
        run.events.warning(
            "save.base_damaged",
            path=run.path, key_path=key_path, file=os.path.join(directory, part.file),
            offset=part.offset, nbytes=part.nbytes, error=problem,
        )  # fmt: skip

    kept = [number for number in range(len(found.parts)) if number not in damaged]
    return found.only(kept) if damaged else found


def _due(run: SaveRun, found: Candidates, every: int) -> Due:
    turn = Turn(next(run.caches.linking_saves), run.caches.salt)
    infos = found.leaves.infos
    names = [infos[index].name for index in found.leaves.indices]
    chosen = due(names, found.parts, turn, every)
    return sorted(chosen, key=_place)  # a file is read from its beginning to its end


def _place(entry: tuple[int, Written]) -> tuple[str, int]:
    return entry[1].file, entry[1].offset


def _shares(chosen: Due) -> Iterator[Due]:
    """Cut the due parts into shares of about the same bytes, for as many threads."""
    enough = sum([part.nbytes for _, part in chosen]) / CONCURRENCY
    first = nbytes = 0
    for at, (_, part) in enumerate(chosen):
        nbytes += part.nbytes
        if nbytes >= enough:
            yield chosen[first : at + 1]
            first, nbytes = at + 1, 0

    if first < len(chosen):
        yield chosen[first:]


def _damaged(store: Store, directory: str, share: Due, block_bytes: int) -> list[tuple[int, Written, str]]:
    """Read parts, and return those that are not as they were written. Blocking."""
    found: list[tuple[int, Written, str]] = []
    block = memoryview(mmap.mmap(-1, block_bytes))  # aligned, for direct reads
    for name, parts in groupby(share, lambda entry: entry[1].file):
        found += _damaged_in_file(store, os.path.join(directory, name), list(parts), block)

    return found


def _damaged_in_file(
    store: Store, path: str, share: Due, block: memoryview
) -> list[tuple[int, Written, str]]:
    try:
        file = store.open_data_file(path)
    except PenstockError as error:
        return [(number, part, str(error)) for number, part in share]

    found: list[tuple[int, Written, str]] = []
    try:
        for number, part in share:
            try:
                if _crc32c_of(file, part, block) != part.crc32c:
                    found.append((number, part, "the bytes are not those that were written"))
            except PenstockError as error:
                found.append((number, part, str(error)))
    finally:
        file.close()

    return found


def _crc32c_of(file: ReadableFile, part: Written, block: memoryview) -> int:
    found, end = 0, part.offset + part.nbytes
    for at in range(part.offset, end, len(block)):
        check_cancelled()
        read = block[: min(len(block), end - at)]
        file.read_at(at, [read])
        found = crc32c(read, found)

    return found

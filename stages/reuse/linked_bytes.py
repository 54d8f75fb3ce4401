"""Compares what a save is about to link with the checksums recorded of it: a share in each save, in rotation.

A leaf is known to be unchanged by its value in memory. The bytes on the medium may have changed since. Then
every later checkpoint that shares them is damaged, too, though the right value was there at each save.
So each save reads a share, and several in a row read every byte once. What differs is written from memory.
"""

from __future__ import annotations

__all__ = ("LinkTurns", "Turn", "due", "intact_only")

import mmap
import os
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count, groupby
from typing import Final, TypeAlias, final

from anyio import create_task_group
from anyio.from_thread import check_cancelled
from crc32c import crc32c

from penstock.kernel.errors import PenstockError
from penstock.kernel.pipeline.run_context import SaveRun
from penstock.kernel.protocols.stores import ReadableFile, Store
from penstock.kernel.protocols.written import Written
from penstock.stages.reuse.base_comparison import Candidates

LITTLE_BYTES: Final = 32 * 2**20
LITTLE_PARTS: Final = 2048
"""So little is compared as a whole in every save: it takes some 20 ms."""

BLOCK_BYTES: Final = 4 * 2**20
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


@final
class LinkTurns:
    """Counts the saves of a Checkpointer that link. Thread-safe."""

    __slots__ = ("_numbers", "_salt")

    def __init__(self) -> None:
        self._numbers = count()
        self._salt = secrets.randbits(32)

    def next(self) -> Turn:
        """Return the turn of one more save."""
        return Turn(next(self._numbers), self._salt)


def due(names: Sequence[str], parts: Sequence[Sequence[Written]], turn: Turn, every: int) -> Due:
    """Choose what is compared in one save. Pure.

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
    """Return the candidates without those of which a part that was compared differs; an event names each.

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
        lease = await run.lease(nbytes, found.leaves[0].info.key_path, prioritised=False)
        try:
            for number, part, problem in await run.threads.run(_damaged, run.store, directory, share, nbytes):
                damaged.setdefault(number, (part, problem))
        finally:
            lease.release()

    async with create_task_group() as tasks:
        for share in _shares(chosen):
            tasks.start_soon(compare, share)

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
    turn = run.shared.of(LinkTurns).next()
    infos = found.leaves.infos
    names = [infos[index].name for index in found.leaves.indices]
    chosen = due(names, found.parts, turn, every)
    return sorted(chosen, key=_place)  # a file is read from its beginning to its end


def _place(entry: tuple[int, Written]) -> tuple[str, int]:
    return entry[1].file, entry[1].offset


def _shares(chosen: Due) -> Iterator[Due]:
    """Cut what is due into shares of about the same bytes, for as many threads."""
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

"""The tiers of a job of several processes: which of them all can use, and what parts in them make together.

A tier on local disks, or in the keepers of hosts, has a part of each step for each process. If the processes
have the same numbers on the same machines as before, each finds its own part. Otherwise, or with another
number of processes, parts are where they are: whoever finds one tells what it is a part of, by its mark, and
the newest step of which all parts are somewhere can be put together.
"""

from __future__ import annotations

__all__ = ("FoundPart", "WholeStep", "absent_levels", "find_parts", "whole_step")

import json
import os
from collections.abc import Awaitable, Callable, Collection, Container, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from typing import Any, final

from penstock.handlers.stores.publishing.paths import OF_PROCESSES, inside_of_process
from penstock.kernel.errors import CoordinationError, CorruptCheckpointError, StorageError
from penstock.kernel.protocols.coordinator import Operation
from penstock.kernel.protocols.stores import Store
from penstock.steps import step_directory as on_disk
from penstock.steps.step_names import NameFormat
from penstock.steps.tier_record import read_record


@final
@dataclass(frozen=True, slots=True)
class FoundPart:
    """A part of a step that one process found."""

    step: int
    process: int  #: who saved it
    processes: tuple[int, ...]  #: who saved together
    save: str  #: tells that save from any other
    path: str


@final
@dataclass(frozen=True, slots=True)
class WholeStep:
    """A step of which each part was found by a process that can bring it."""

    step: int
    processes: tuple[int, ...]  #: who saved it together
    bring: Mapping[int, Mapping[int, str]] = field(default_factory=dict[int, Mapping[int, str]])
    """By the process that brings it: the path of each part, by who saved it."""


def find_parts(
    store: Store, path: str, names: NameFormat, known: Container[str], local_root: str | None = None
) -> list[FoundPart]:
    """List the parts of steps that this process can read, in a tier and next to it. Blocking.

    Args:
        store: Where the tier is.
        path: Its directory. Those of other processes are looked at, too, in a keeper and on a disk.
        names: Of steps.
        known: The paths of steps that count already.
        local_root: Of this process, if the tier is on a disk below it.

    Raises:
        StorageError: If the medium refuses.
    """
    found: list[FoundPart] = []
    reader = on_disk.StepReader(store)
    beside = places_beside(store, path) if local_root is None else disks_beside(store, path, local_root)
    for place in (path, *beside):
        for step, name in on_disk.find_steps(store, place, names).items():
            at = f"{place}/{name}"
            if at in known or not reader.is_part(at):  # which takes one look; the mark takes several
                continue

            try:
                mark = reader.disk_mark(at)
            except CorruptCheckpointError:
                continue  # it is of no use

            if mark is not None:
                found.append(FoundPart(step, mark.process, mark.processes, mark.save, at))

    return found


def places_beside(store: Store, path: str) -> Sequence[str]:
    """Return the directories of the same tier that other processes have, or had, in one keeper. Blocking."""
    inside = inside_of_process(path)
    if inside is None:
        prefix = "keeper://localhost/"
        if not path.startswith(prefix):
            return ()

        inside = path.removeprefix(prefix)

    try:
        indices = on_disk.list_root(store, OF_PROCESSES)
    except StorageError:
        return ()

    places = [f"{OF_PROCESSES}/{index}/{inside}" for index in indices]
    return [place for place in places if place != path]


def disks_beside(store: Store, path: str, local_root: str) -> Sequence[str]:
    """Return the directories of the same tier that other processes have, or had, on this machine. Blocking.

    The local roots of its processes are called alike but for numbers, as `/scratch/0` and `/scratch/1`.

    Args:
        store: Of the machine's files.
        path: The tier of this process; it serves a root.
        local_root: What the tier is below.
    """
    folder, own = os.path.split(local_root)
    inside = os.path.relpath(path, local_root)
    try:
        served = read_record(store, path)
        alike = [name for name in on_disk.list_root(store, folder) if _unnumbered(name) == _unnumbered(own)]
        places = [os.path.join(folder, name, inside) for name in alike if name != own]
        records = {place: read_record(store, place) for place in places}
    except StorageError:
        return ()

    return [
        place
        for place, record in records.items()
        if served is not None and record is not None and record.root == served.root
    ]


def _unnumbered(name: str) -> str:
    return "".join([each for each in name if not each.isdigit()])


async def absent_levels(
    operation: Operation, prepare: Callable[[], Awaitable[Mapping[int, str]]]
) -> Mapping[int, str]:
    """Return the levels that one process or another cannot use, with what it says; the same in all.

    Args:
        operation: Not joined yet. All processes come, or all raise.
        prepare: Makes the levels ready in this process; returns those that it cannot use, by number.

    Raises:
        PeerError: If another process failed, or did not come.
    """

    async def own() -> list[tuple[int, str]]:
        return list((await prepare()).items())

    return dict(await combined(operation, "tiers", own, _all_absent))


def _all_absent(parts: Mapping[int, list[tuple[int, str]]]) -> list[tuple[int, str]]:
    found: dict[int, str] = {}
    for index, part in parts.items():
        for level, problem in part:
            found.setdefault(level, f"process {index}: {problem}" if len(parts) > 1 else problem)

    return sorted(found.items())


async def combined(
    operation: Operation,
    stage: str,
    own: Callable[[], Awaitable[object]],
    combine: Callable[[Mapping[int, Any]], object],
) -> Any:
    """Return what the primary makes of what each process finds, in JSON; see `Operation.combine`.

    Args:
        operation: Not joined yet. All processes come, or all raise.
        stage: The same in all, and said in errors.
        own: Finds what this process says; once all have come.
        combine: Called in the primary, with what all say.

    Raises:
        PeerError: If another process failed, or did not come.
        CoordinationError: If what another process says cannot be read.
    """

    async def begin(_: Mapping[int, bytes]) -> tuple[str, bytes]:
        return "", b""

    def made(parts: Mapping[int, bytes]) -> bytes:
        return json.dumps(combine({index: _read(part) for index, part in parts.items()})).encode()

    told = b"null"
    async with operation.running():
        operation.at(stage)
        await operation.agree(stage.encode(), list, begin)
        told = await operation.combine(json.dumps(await own()).encode(), made)

    return _read(told)


async def whole_step(
    operation: Operation, find: Callable[[], Awaitable[Sequence[FoundPart]]], after: int
) -> WholeStep | None:
    """Return the newest step of which all parts are somewhere, newer than one; the same in all processes.

    Args:
        operation: Not joined yet. All processes come, or all raise.
        find: Lists the parts that this process can read, those of the nearest tier first.
        after: The newest step that counts already, the same in all.

    Raises:
        PeerError: If another process failed, or did not come.
    """

    def choose(parts: Mapping[int, Any]) -> object:
        found = {index: [_part_of(row) for row in part] for index, part in parts.items()}
        chosen = newest_whole(found, after)
        return None if chosen is None else astuple(chosen)

    async def own() -> object:
        return [astuple(part) for part in await find()]

    chosen = await combined(operation, "parts", own, choose)
    if chosen is None:
        return None

    step, processes, bring = chosen
    paths = {int(who): {int(part): str(path) for part, path in parts.items()} for who, parts in bring.items()}
    return WholeStep(int(step), tuple(processes), paths)


def newest_whole(found: Mapping[int, Sequence[FoundPart]], after: int) -> WholeStep | None:
    """Return the newest step after one of which every part was found. Pure.

    A part that several found is brought by the first of them.

    Args:
        found: By the process that found them.
        after: Steps up to this one count already.
    """
    saves: dict[tuple[int, str], dict[int, tuple[int, str]]] = {}
    together: dict[tuple[int, str], tuple[int, ...]] = {}
    for index in sorted(found):
        for part in found[index]:
            if part.step > after:
                saves.setdefault((part.step, part.save), {}).setdefault(part.process, (index, part.path))
                together[part.step, part.save] = part.processes

    for key in sorted(saves, reverse=True):
        there, processes = saves[key], together[key]
        if all(process in there for process in processes):
            bring: dict[int, dict[int, str]] = {}
            for process in processes:
                index, path = there[process]
                bring.setdefault(index, {})[process] = path

            return WholeStep(key[0], processes, bring)

    return None


def superseded(
    parts: Iterable[FoundPart], latest: int | None, in_root: Collection[int], processes: Sequence[int]
) -> list[FoundPart]:
    """Return the parts that are of no use any more. Pure.

    Those of steps that a newer one has followed, or that are in the root; and those of later ones that these
    very processes saved: another part is lost. Parts that others saved may wait for the others.

    Args:
        parts: That were found.
        latest: The newest step that counts.
        in_root: The steps that are in the root.
        processes: Those of this job.
    """
    newest = -1 if latest is None else latest
    return [
        part
        for part in parts
        if part.step < newest
        or part.step in in_root
        or (part.step > newest and part.processes == tuple(processes))
    ]


def _part_of(row: Any) -> FoundPart:
    step, process, processes, save, path = row
    return FoundPart(int(step), int(process), tuple(processes), str(save), str(path))


def _read(told: bytes) -> object:
    try:
        return json.loads(told)
    except ValueError as error:
        raise CoordinationError(f"what another process found cannot be read: {error}") from error

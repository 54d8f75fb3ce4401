"""A directory of steps as one process of a job uses it: made, cleaned, held, and listed as all agree."""

from __future__ import annotations

__all__ = ("OpenedRoot", "RootOptions", "agreed_steps")

import json
import os
import zlib
from base64 import b85decode, b85encode
from collections.abc import Awaitable, Callable, Container, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, pairwise
from threading import Lock
from typing import Any, Final, TypeAlias, cast, final

from anyio import move_on_after

from penstock.checkpointer.engine import Engine
from penstock.handlers.formats.orbax.discovery import names_a_step
from penstock.handlers.stores.publishing.deletion import remove_abandoned
from penstock.handlers.stores.publishing.pinned_steps import PinnedSteps
from penstock.handlers.stores.publishing.writer_hold import WriterHold
from penstock.kernel.concurrency.threads import Threads
from penstock.kernel.errors import (
    CoordinationError,
    CorruptCheckpointError,
    InUseError,
    PathError,
    RootInUseError,
    StorageError,
)
from penstock.kernel.protocols.coordinator import Operation, SingleProcessCoordinator
from penstock.kernel.protocols.stores import ObjectStore, Store
from penstock.steps import step_directory as on_disk
from penstock.steps.catalogue import StepFiles
from penstock.steps.keep_policies import KeepAll, KeepPolicy
from penstock.steps.save_decisions import JobDecisions
from penstock.steps.step_directory import delete_step

CLOSING_S: Final = 5.0
_SAVE: Final = "save"
_DELETION: Final = "deletion"


@final
@dataclass(frozen=True, slots=True)
class RootOptions:
    """The options of a directory of steps, as one value."""

    metadata: Mapping[str, Any] | None = None  #: the caller's own, for a new root
    keep: KeepPolicy = field(default_factory=KeepAll)  #: which steps stay
    trash: str | None = None  #: a folder for steps that do not stay
    writes: bool = True  #: whether anything is saved; a reader of a shared disk agrees with no other process
    clean: bool = True  #: whether what crashed saves left there is removed on opening
    creates: bool = True  #: whether the root is made if it does not exist
    is_shared: bool = False
    """Whether other managers may save there, too. Then it is held while a step is saved or deleted, another
    holder is logged once, and a checkpoint is opened as a root without steps."""
    by_number: bool = True  #: whether steps are ordered by number; else in the order in which they came
    is_owed: Callable[[int], bool] | None = None  #: whether a step stays until it is copied to another tier
    is_tier: bool = False
    """Whether it is before another directory of the same steps. Then parts of what several processes saved
    are not removed on opening, since the others may be elsewhere; and they are no steps of one process."""


@final
class OpenedRoot:
    """A directory of steps, and what this process may do there.

    On a disk that all processes see, the primary alone holds it, cleans it and deletes; on its own disk
    each process does.

    Args:
        engine: Of the Checkpointer that saves.
        root: The directory.
        files: Names the steps, and finds them.
        threads: For blocking calls.
        reading: For those that only read.
        options: The way in which it is used.
    """

    __slots__ = (
        "_coordinator",
        "_events",
        "_files",
        "_hold",
        "_name",
        "_options",
        "_reading",
        "_root",
        "_store",
        "_threads",
        "_turn",
        "_uses",
        "_was_refused",
        "holds",
        "is_local",
        "job",
        "pins",
    )

    def __init__(
        self,
        engine: Engine,
        root: str,
        files: StepFiles,
        threads: Threads,
        reading: Threads,
        options: RootOptions,
    ) -> None:
        self._store = engine.store
        self._events = engine.events
        self._root = root
        self._files = files
        self._options = options
        self._was_refused = False
        self._threads = threads
        self._reading = reading
        self._hold = WriterHold(engine.store, root)
        self._uses: set[str] = set()  # a save and a deletion may go on at the same time
        self._turn = Lock()
        self.is_local = engine.is_local(root)  #: whether each process has it on a disk of its own
        self._name = engine.agreed_name(root)
        agrees = options.writes or self.is_local
        self._coordinator = engine.coordinator if agrees else SingleProcessCoordinator()
        self.holds = self.is_local or self._coordinator.is_primary  #: whether it cleans up, and deletes steps
        self.pins = PinnedSteps(self._store, root, self._events, is_told=lambda: self._hold.is_held)
        self.job = JobDecisions(self._coordinator, self._name)  #: what the primary decides for all

    async def steps(self, leaving: Container[int], *, opens: bool) -> Mapping[int, str]:
        """Return the steps in it, the same in all processes, which all call this: number to name, ascending.

        On a shared disk those that the primary finds; on local ones those that all processes have. Their
        parts of other steps are removed when they open it.

        Args:
            leaving: Steps that are about to be deleted.
            opens: Whether it is opened first.

        Raises:
            PathError: If it is a checkpoint.
            RootInUseError: If another manager writes there.
            StorageError: If the medium refuses.
            PeerError: If another process could not do its part.
        """
        find = partial(self._find, leaving, opens=opens)
        operation = self._coordinator.operation(f"steps in {self._name}")
        if not self.is_local:
            return await agreed_steps(operation, find, self._files.name)

        async def find_own() -> Mapping[int, OwnStep]:
            return await self._reading.run(self._own, await find())

        found, parts = await common_steps(operation, find_own)
        if opens and self._options.writes and self._options.clean and not self._options.is_tier:
            # A step that is not on all disks cannot be restored as a whole.
            await self._threads.run(self._remove_parts, parts)

        return found

    async def hold(self) -> None:
        """Hold it, unless another process of the job does: before each save.

        Raises:
            RootInUseError: If another manager has it, and it is not shared.
            ClaimLostError: If it is shared, in a bucket, and another manager took it over since.
            StorageError: If the medium refuses, as a full disk may.
        """
        was_held = self._hold.is_held
        await self._threads.run(self.hold_now)
        if not was_held:
            self.pins.tell_again()

    def hold_now(self) -> None:
        """Blocking form of `hold`, in any thread, for a face that pins no steps."""
        if self._options.is_shared:
            self._hold_shared()
        else:
            self._take()

    def rest(self) -> None:
        """Hold it no more until the next save or deletion, if other managers may save there. Blocking.

        Programs that list it then find nothing but their steps. In a bucket, which they do not list, it stays
        held: the hold tells whether another manager took over since.
        """
        self._end(_SAVE)

    @contextmanager
    def held(self) -> Generator[None]:
        """Hold it during a deletion. Blocking; raises as `hold` does."""
        self._begin(_DELETION)
        try:
            yield
        finally:
            self._end(_DELETION)

    def _take(self) -> None:
        if self.holds:
            self._hold.take()

    def _begin(self, use: str) -> None:
        with self._turn:
            self._take()
            self._uses.add(use)

    def _end(self, use: str) -> None:
        with self._turn:
            self._uses.discard(use)
            if self._options.is_shared and self._store.directories is not None and not self._uses:
                self._release()

    def _hold_shared(self) -> None:
        if not self.holds:
            return

        try:
            with self._turn:
                self._hold.take_if_writable()
                self._uses.add(_SAVE)
            self._hold.confirm()
        except RootInUseError as error:
            if not self._was_refused:
                self._was_refused = True
                self._events.warning("step.root_in_use", root=self._root, more=error.more)

    async def give_back(self) -> None:
        """Hold it no more.

        Cancellation:
            Delivered after `CLOSING_S` at most. If the medium hangs, the hold ends when it goes on, or with
            the process.
        """
        with move_on_after(CLOSING_S, shield=True):
            await self._reading.run(self._release)

    def _release(self) -> None:
        try:
            self._hold.release()
        except StorageError as error:
            self._events.warning("step.left_behind", path=error.path, error=repr(error))

    async def _find(self, leaving: Container[int], *, opens: bool) -> Mapping[int, str]:
        """Open it, if asked to; list it, where that counts."""
        listed = await self._threads.run(self._prepare) if opens else None
        if not self.holds:
            return {}

        found = await self._reading.run(self._files.find, listed)
        if self._options.is_tier and not self.is_local:
            found = await self._reading.run(self._without_parts, found)
        if opens and not found:
            await self._reading.run(self._warn_of_other_names, listed)

        return {step: name for step, name in found.items() if step not in leaving}

    def _warn_of_other_names(self, listed: Sequence[str] | None) -> None:
        """Log that there are steps, and none has a name of this manager's: a run would start over."""
        names = on_disk.list_root(self._store, self._root) if listed is None else listed
        steps = sorted(filter(names_a_step, names))
        if steps:
            example = self._files.name(1)
            self._events.warning("step.other_names", root=self._root, names=steps[:3], named_like=example)

    def _prepare(self) -> Sequence[str] | None:
        """Make it ready: write its metadata, and remove what crashed saves left there.

        Returns:
            What was listed in it, if it was. With 20,000 steps, listing is most of the work.
        """
        store, root, options = self._store, self._root, self._options
        try:
            on_disk.check_root(store, root)
        except PathError:
            if not self._options.is_shared:
                raise

            # As Orbax opens it. It is logged, since a run that resumes from it starts over.
            self._events.warning("step.root_is_checkpoint", root=root)

        if not options.writes:
            return None

        if options.creates:
            store.make_directory(root)
        if not self.holds:
            return None

        problem = None if self._options.is_shared else self._hold.take_if_writable()
        if options.metadata is not None:
            on_disk.write_root_metadata(store, root, options.metadata)

        if options.clean and (objects := store.objects) is not None:
            self._collect(objects)

        listed = on_disk.list_root(store, root)
        if options.clean:
            # Under the hold of the root, in which no other manager saves.
            for name in self._files.leftovers(listed):
                self._clean_up(name, remove_abandoned)

        if problem is not None:  # there may be room now
            problem = self._hold.take_if_writable()
        if problem is not None:
            self._events.warning("step.root_not_held", root=root, error=repr(problem))

        return listed

    def _collect(self, store: ObjectStore) -> None:
        try:
            found = store.collect(self._root)
        except StorageError as error:
            self._events.warning("step.left_behind", path=self._root, error=repr(error))
            return

        for path, became in found.items():
            if became != "kept":
                self._events.info("step.cleaned_up", path=path)

    def _without_parts(self, steps: Mapping[int, str]) -> Mapping[int, str]:
        reader, root = on_disk.StepReader(self._store), self._root
        return {step: name for step, name in steps.items() if not reader.is_part(os.path.join(root, name))}

    def _own(self, steps: Mapping[int, str]) -> Mapping[int, OwnStep]:
        """Mark each step on this disk with the process whose part it is."""
        coordinator, reader = self._coordinator, on_disk.StepReader(self._store)
        here = coordinator.process_index, tuple(coordinator.processes)
        found: dict[int, OwnStep] = {}
        for step, name in steps.items():
            path = os.path.join(self._root, name)
            try:
                mark = reader.disk_mark(path)
            except CorruptCheckpointError as error:  # then it is not known, and it is not removed
                self._events.warning("step.unreadable", path=path, error=repr(error))
                found[step] = OwnStep(name, None, is_part=False)
                continue

            is_part = mark is not None and (mark.process, mark.processes) == here
            save = "" if mark is None else mark.save if is_part else None
            found[step] = OwnStep(name, save, is_part=is_part)

        return found

    def _remove_parts(self, steps: Mapping[int, str]) -> None:
        if not self._hold.is_held:
            return

        for name in steps.values():
            self._clean_up(name, lambda store, path: delete_step(store, *os.path.split(path), None))

    def _clean_up(self, name: str, remove: Callable[[Store, str], object]) -> None:
        path = os.path.join(self._root, name)
        try:
            remove(self._store, path)
        except InUseError:
            return  # a live save holds the directory it builds in, or somebody reads it
        except StorageError as error:
            self._events.warning("step.left_behind", path=path, error=repr(error))
        else:
            self._events.info("step.cleaned_up", path=path)


NameOf: TypeAlias = Callable[[int], str]


async def agreed_steps(
    operation: Operation, find: Callable[[], Awaitable[Mapping[int, str]]], name_of: NameOf
) -> Mapping[int, str]:
    """Return the steps that the primary finds, the same in all processes: number to name, ascending.

    What another process finds does not count: on a network a directory may be seen there later.

    Args:
        operation: Not joined yet. All processes come, or all raise.
        find: Makes the root ready in each process, and lists it in the primary.
        name_of: Names the directory of a step.

    Raises:
        PeerError: If another process failed, or did not come.
        CoordinationError: If the service cannot be reached.
    """
    found: Mapping[int, str] = {}

    async def begin(_: Mapping[int, bytes]) -> tuple[str, bytes]:
        return _encoded(found, name_of), b""

    async with operation.running():
        operation.at("open")
        found = await find()
        told, _ = await operation.agree(b"steps", list, begin)
        if not operation.is_primary:  # which has them at hand: decoding thousands would hold up its loop
            found = _decoded(told, name_of)

    return found


def _encoded(steps: Mapping[int, str], name_of: NameOf) -> str:
    """Return a text that stays short for many steps: most follow at equal distances, under plain names."""
    apart = [later - earlier for earlier, later in pairwise([0, *steps])]
    odd = {step: name for step, name in steps.items() if name_of(step) != name}
    return b85encode(zlib.compress(json.dumps([apart, odd]).encode(), 1)).decode()


def _decoded(told: str, name_of: NameOf) -> dict[int, str]:
    try:
        apart, odd = json.loads(zlib.decompress(b85decode(told)))
        return {step: odd.get(str(step)) or name_of(step) for step in accumulate(apart)}
    except (ValueError, TypeError, zlib.error) as error:
        raise CoordinationError(f"the steps that the primary found cannot be read: {error}") from error


@final
@dataclass(frozen=True, slots=True)
class OwnStep:
    """A step that one process finds on its disk."""

    name: str  #: of its directory
    save: str | None  #: what tells the save that made it; None if it is of no use to these processes
    is_part: bool  #: whether it is this process's part of what these very processes saved


async def common_steps(
    operation: Operation, find: Callable[[], Awaitable[Mapping[int, OwnStep]]]
) -> tuple[Mapping[int, str], Mapping[int, str]]:
    """Return the steps that all processes have, from one save each, and the parts here of all other steps.

    Both are number to name, ascending; the numbers of the first are the same in all processes.

    Args:
        operation: Not joined yet. All processes come, or all raise.
        find: Makes the root ready, and lists it, by number ascending. Called in each process.

    Raises:
        PeerError: If another process failed, or did not come.
        CoordinationError: If the service cannot be reached.
    """
    found: Mapping[int, OwnStep] = {}
    common: set[int] = set()

    async def begin(_: Mapping[int, bytes]) -> tuple[str, bytes]:
        return "", b""

    async with operation.running():
        operation.at("open")
        found = await find()
        saves = {step: own.save for step, own in found.items() if own.save is not None}
        await operation.agree(b"steps on local disks", list, begin)
        common = set(_decoded_saves(await operation.combine(_encoded_saves(saves), _saves_of_all)))

    return (
        {step: own.name for step, own in found.items() if step in common},
        {step: own.name for step, own in found.items() if step not in common and own.is_part},
    )


def _saves_of_all(parts: Mapping[int, bytes]) -> bytes:
    """Return the steps that every process has from the same save."""
    first, *others = [_decoded_saves(part) for part in parts.values()]
    return _encoded_saves(
        {step: save for step, save in first.items() if all(other.get(step) == save for other in others)}
    )


def _encoded_saves(saves: Mapping[int, str]) -> bytes:
    return zlib.compress(json.dumps(list(saves.items())).encode(), 1)


def _decoded_saves(told: bytes) -> dict[int, str]:
    try:
        rows = cast("list[tuple[int, str]]", json.loads(zlib.decompress(told)))
        return {int(step): str(save) for step, save in rows}
    except (ValueError, TypeError, zlib.error) as error:
        raise CoordinationError(f"the steps of another process cannot be read: {error}") from error

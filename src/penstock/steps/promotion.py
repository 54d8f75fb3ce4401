"""Steps in several tiers: what each tier holds, and how a step goes from the nearest to the root.

A tier is a directory of steps like the root, with policies of its own. A step is saved into the nearest tier
that wants it, and copied from there in the background, tier by tier. A tier that is slower than saves are
frequent takes the newest.
"""

from __future__ import annotations

__all__ = ("HeldSteps", "Level", "Promoting", "Promotions")

import os
import socket
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias, final

from anyio import CancelScope, Event, move_on_after
from anyio.abc import TaskGroup
from structlog.stdlib import BoundLogger

from penstock.checkpointer.engine import Engine
from penstock.checkpointer.save_future import SavePromise
from penstock.handlers.formats.orbax import CHECKPOINT_METADATA
from penstock.handlers.formats.orbax.file_names import ENCODED, TIER
from penstock.handlers.stores.publishing.paths import scheme_of
from penstock.handlers.stores.publishing.writer_hold import WriterHold
from penstock.kernel.concurrency.threads import LoopHandle, Threads
from penstock.kernel.errors import (
    CoordinationError,
    CorruptCheckpointError,
    DestinationExistsError,
    ExpansionError,
    KeeperLostError,
    NotACheckpointError,
    PathError,
    PeerError,
    PeerFailedError,
    PenstockError,
    ReplacedError,
    RootInUseError,
    SaveCancelledError,
    SpecError,
    StorageError,
    UnsupportedFormatError,
)
from penstock.kernel.options import environment_of
from penstock.kernel.pipeline.failures import without_frame
from penstock.kernel.pipeline.pipeline import Milestone
from penstock.kernel.protocols.build_place import BuildPlace
from penstock.kernel.protocols.save_format import SaveFormat
from penstock.reports.report import Promotion, SaveReport
from penstock.steps.catalogue import NamedSteps
from penstock.steps.joint_tiers import FoundPart, WholeStep, combined, find_parts
from penstock.steps.keep_policies import Needs, StepInfo
from penstock.steps.open_steps import OpenSteps
from penstock.steps.opened_root import RootOptions
from penstock.steps.save_decisions import SaveDecisions
from penstock.steps.save_policies import SavePolicy
from penstock.steps.step_directory import delete_step
from penstock.steps.step_names import NameFormat
from penstock.steps.tier_record import TierRecord, kind_of, read_record, write_record
from penstock.steps.tiers import Memory, Tier
from penstock.telemetry.observers import tell_promotion
from penstock.verification.copying import (
    COPY_WORKERS,
    CheckpointCopier,
    CopySource,
    is_same_checkpoint,
    lengths_below,
)

if TYPE_CHECKING:
    from penstock.handlers.stores.keeper.keeper_store import KeeperStore
    from penstock.kernel.protocols.stores import Store
    from penstock.rewriting.encoder import Encoder

_Key: TypeAlias = tuple[int, str]
"""A step, and what tells one save of it from another."""

WAITS_S: Final = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0)
"""Between two tries of a promotion that fails; the last one again and again."""

_PASSED_BY_AFTER: Final = 2
"""Tries that fail, one after another, until a step goes on to the next level without this one."""

_REMOVING_S: Final = 60.0
_MOST_UNTOLD: Final = 3
"""So often a decision is asked for until it is a failure that it is not heard: the service may be back."""


@final
class Level:
    """One directory of a manager's steps, open: a tier, or the root, which is the last one.

    Args:
        engine: Of the Checkpointer.
        path: The directory.
        names: Names of step directories.
        save_when: Which steps come here.
        options: The way in which the directory is used.
        there: Returns the steps that are here or coming, and whether one is coming; see `SaveDecisions`.
        tier: What it is; None for the root.
        form: How steps are stored here; None where they are copied as they are.

    Raises:
        ConfigError: If this system has no such tier.
        SpecError: If the caller's own store is to be one in memory.
    """

    def __init__(
        self,
        engine: Engine,
        path: str,
        names: NameFormat,
        save_when: SavePolicy,
        options: RootOptions,
        there: Callable[[Level], tuple[Sequence[int], bool]],
        tier: Tier | None = None,
        form: SaveFormat | None = None,
    ) -> None:
        self.path = path
        self.engine = engine.at(path)
        self.tier, self._writes, self.names = tier, options.writes, names
        self.form = form  #: how steps are stored here; None if they are copied as they are
        self._keeper = _keeper_of(path, self.engine.store)
        if isinstance(tier, Memory) and self._keeper is None:
            raise SpecError("a tier in memory is in the keeper's store; leave out store=, or use Disk")

        self.opened = OpenSteps(self.engine, path, NamedSteps(self.engine.store, path, names), options)
        self.catalogue, self.retention = self.opened.catalogue, self.opened.retention
        self.decisions = SaveDecisions(save_when, partial(there, self), self.opened.root.job)
        self.not_durable: set[int] = set()
        """Steps that are here, and may be lost if the power fails, or that are of no use."""
        self.is_out = False  #: whether no step comes here any more, since one of several processes cannot
        self._bases: list[int] = []  # steps whose values are known here, the latest last

    def note_base(self, step: int) -> None:
        """Note that the values of a step are known here: they were saved here, or restored from here."""
        self._bases = [*[known for known in self._bases if known != step], step][-3:]

    def base(self, step: int) -> str | None:
        """Return the path of a step that `step` may be linked to; None if there is none."""
        there = [known for known in self._bases if known in self.catalogue and known != step]
        return self.catalogue.path(there[-1]) if there else None

    def durable(self) -> Sequence[int]:
        """Return the steps that need not be saved again, ascending."""
        steps = self.catalogue.steps
        return [step for step in steps if step not in self.not_durable] if self.not_durable else steps

    @property
    def is_local(self) -> bool:
        """True if several processes have it, each on a disk of its own or in a keeper."""
        return self.opened.root.is_local

    async def prepare(self, record: TierRecord) -> None:
        """Make a tier ready to be opened; a keeper is started if there is none.

        Args:
            record: Written there, for those who come after a crash.

        Raises:
            KeeperLostError: If it cannot be started, or does not answer.
            PathError: If the tier serves another root: its steps are not of this run.
            StorageError: If the medium refuses.
        """
        keeper = self._keeper
        if keeper is not None and isinstance(self.tier, Memory) and self._writes:
            from penstock.keeper.starting import ensure_keeper  # no other tier needs it

            limit = self.tier.limit_bytes
            await ensure_keeper(keeper.socket, limit_bytes="auto" if isinstance(limit, str) else limit)
            options = environment_of(self.engine.config.store, "store")
            await self.opened.reading.run(keeper.take_over, self.path, options)

        await self.opened.reading.run(self._bind, record)

    @property
    def host(self) -> str:
        """The host whose memory it is, for a tier in a keeper."""
        return f"{socket.gethostname()} {'' if self._keeper is None else self._keeper.socket}"

    async def check(self) -> None:
        """Raise `StorageError` if the tier cannot be used any more, as one in a keeper that is lost."""
        await self.opened.reading.run(self.engine.store.kind, self.path)

    def parts_here(self) -> list[FoundPart]:
        """List parts of steps that several processes saved, and that are no steps here. Blocking."""
        if not self.opened.root.holds:  # another process looks
            return []

        known = {self.catalogue.path(step) for step in self.catalogue.steps} if self.is_local else ()
        on_disk = self.is_local and self._keeper is None
        local_root = self.engine.config.job.local_root if on_disk else None
        return find_parts(self.engine.store, self.path, self.names, known, local_root)

    def remove_parts(self, parts: Sequence[FoundPart]) -> None:
        """Remove parts that are of no use; those that another process may be using stay. Blocking."""
        store = self.engine.store
        for part in parts:
            place, name = os.path.split(part.path)
            hold = None if place == self.path else WriterHold(store, place)
            try:
                if hold is not None:
                    hold.take()

                delete_step(store, place, name, None)
            except RootInUseError:
                continue
            except StorageError as error:
                self.engine.events.warning("step.left_behind", path=part.path, error=repr(error))
            else:
                self.engine.events.info("step.cleaned_up", path=part.path)
            finally:
                if hold is not None:
                    with suppress(StorageError):
                        hold.release()

    async def clear(self, step: int) -> None:
        """Remove the part of a step that is no step here, as another process could not keep its own."""
        store, path = self.engine.store, self.catalogue.path(step)

        def remove() -> None:
            if store.kind(path) is not None:
                delete_step(store, *os.path.split(path), None)

        if step not in self.catalogue:
            with suppress(StorageError):  # in the keeper that is lost; else the next manager removes it
                await self.opened.threads.run(remove)

    async def name_tiers(self, record: TierRecord) -> None:
        """Write down in the root which tiers its run has, for those who look at the root alone."""

        def write(store: Store) -> None:
            if read_record(store, self.path) != record:
                write_record(store, self.path, record)

        if self._writes and self.opened.root.holds:
            with suppress(StorageError):  # one that is full or away takes no step, and that is an error
                await self.opened.reading.run(write, self.engine.store)

    async def make_ready(self, source: Level, newest: int | None) -> None:
        """Have a tier in memory make pages for the first save: that takes longer than the save.

        Args:
            source: The level that has the newest step.
            newest: Its number; None if there is none.
        """
        keeper, tier = self._keeper, self.tier
        if keeper is None or not isinstance(tier, Memory):
            return

        def ask() -> None:
            nbytes = tier.step_bytes
            if isinstance(nbytes, str):
                if newest is None:
                    return

                nbytes = sum(lengths_below(source.engine.store, source.catalogue.path(newest)).values())
                if self.is_local and not source.is_local:
                    nbytes //= len(tuple(self.engine.coordinator.processes))

            keeper.make_ready(nbytes)

        # Then the first save takes longer, or fails, and says why. A damaged step is told of when it is read.
        with suppress(StorageError, CorruptCheckpointError):
            await self.opened.reading.run(ask)

    async def note_elsewhere(self, step: int) -> None:
        """Say to the keeper, if the steps are in one, that another tier has a step now."""
        keeper = self._keeper
        if keeper is not None:
            with suppress(StorageError):  # it is lost, and the step is elsewhere
                await self.opened.reading.run(keeper.note_elsewhere, self.catalogue.path(step))

    async def forget_if_gone(self, step: int) -> bool:
        """True if a step is no longer where it was, as in a keeper that has ended; then it is forgotten."""
        try:
            is_gone = await self.opened.reading.run(self.engine.store.kind, self.catalogue.path(step)) is None
        except KeeperLostError as lost:
            is_gone = lost.is_absent
        except StorageError:
            is_gone = False

        if is_gone:
            self.catalogue.remove([step])

        return is_gone

    def _bind(self, record: TierRecord) -> None:
        store, found = self.engine.store, read_record(self.engine.store, self.path)
        served = record.root if found is None else found.root
        if served != record.root:
            problem = f"is a tier of {served or 'a root that its file does not name'}, not of {record.root}"
            advice = f"use another directory, or remove {TIER} with the steps in it"
            raise PathError(self.path, f"{problem}; {advice}")

        if self._writes and self.opened.root.holds and record != found:
            store.make_directory(self.path)
            write_record(store, self.path, record)


def _keeper_of(path: str, store: Store) -> KeeperStore | None:
    """Return the store of a directory that is in a keeper, and not in a store of the caller's."""
    if scheme_of(path) != "keeper":
        return None

    from penstock.handlers.stores.keeper.keeper_store import KeeperStore  # most managers need none

    return store if isinstance(store, KeeperStore) else None


@final
class HeldSteps:
    """The steps of all levels as one directory. Each is read from the nearest level that has it.

    Args:
        levels: The nearest first; the last one is the root.
    """

    def __init__(self, levels: Sequence[Level]) -> None:
        self.levels = levels

    @property
    def steps(self) -> Sequence[int]:
        """All of them, ascending."""
        if len(self.levels) == 1:
            return self.levels[0].catalogue.steps

        return tuple(sorted({step for level in self.levels for step in level.catalogue.steps}))

    @property
    def latest(self) -> int | None:
        """The last one; None if there is none."""
        return max((steps[-1] for level in self.levels if (steps := level.catalogue.steps)), default=None)

    def require_latest(self) -> int:
        """Return the last one.

        Raises:
            NotACheckpointError: If there is none.
        """
        latest = self.latest
        return self.levels[-1].catalogue.require_latest() if latest is None else latest

    def __contains__(self, step: int) -> bool:
        return any(step in level.catalogue for level in self.levels)

    def holders(self, step: int) -> Sequence[Level]:
        """Return the levels that have a step, the nearest first; the root if none has."""
        return [level for level in self.levels if step in level.catalogue] or self.levels[-1:]

    def path(self, step: int) -> str:
        """The directory of a step, in the nearest level that has it."""
        return self.holders(step)[0].catalogue.path(step)

    def infos(self, needs: Needs, among: Mapping[Level, Mapping[int, str]] | None = None) -> list[StepInfo]:
        """Return the infos of all steps for policies. Blocking.

        Args:
            needs: What has to be read.
            among: The steps of each level, of `snapshot`; by default those that there are now.
        """
        found: dict[int, StepInfo] = {}
        for level, steps in (self.snapshot() if among is None else among).items():
            unread = {step: name for step, name in steps.items() if step not in found}
            found |= {info.step: info for info in level.catalogue.infos(unread, needs)}

        return [found[step] for step in sorted(found)]

    def snapshot(self) -> dict[Level, Mapping[int, str]]:
        """Return number and name of each step of each level; a copy."""
        return {level: level.catalogue.snapshot() for level in self.levels}


@final
@dataclass(slots=True, eq=False)
class Promoting:
    """A step that is whole in one level, and goes to others."""

    step: int
    to: list[Level]  #: where it still goes, the nearest first; not empty
    promise: SavePromise | None = None  #: of who saved it; None if that was an earlier process
    report: SaveReport | None = None
    since: float = field(default_factory=time.perf_counter)  #: when its save began
    build: BuildPlace | None = None
    """As long as it is there, the step can be read even if the keeper that it was saved into is lost."""
    stranded_from: Level | None = None
    """Where it was to be kept, if the keeper was lost before that: it is in the build alone."""
    save: str = ""
    """Which save of the step it is: the same in all processes; empty if an earlier process made it."""

    @property
    def key(self) -> _Key:
        """Its step and its save: in a job a save of a step may wait while the next one is kept."""
        return self.step, self.save

    @property
    def lag_s(self) -> float | None:
        """Seconds since its save began; None if an earlier process did that."""
        return None if self.promise is None else time.perf_counter() - self.since

    def arrive(self, directory: str) -> None:
        """Note that it has come to a level: there it is kept, whatever becomes of where it was."""
        self.build = None
        if self.report is not None and self.lag_s is not None:
            there = {**self.report.promoted_s, directory: self.lag_s}
            self.report = replace(self.report, promoted_s=there)
        if self.stranded_from is not None and self.promise is not None and self.report is not None:
            self.stranded_from = None
            self.report = replace(self.report, kept_s=time.perf_counter() - self.since)
            self.promise.reach(Milestone.KEPT)

    def finish(self, path: str, *, superseded_by: str | None = None) -> None:
        """Fulfil the promise: this step is durable, or a newer one is."""
        self.build = None
        if self.promise is not None and self.report is not None:
            took_s = time.perf_counter() - self.since
            self.promise.finish(
                replace(self.report, path=path, durable_s=took_s, superseded_by=superseded_by)
            )

    def fail(self, error: BaseException, *, is_seen: bool = False) -> None:
        """Break the promise."""
        self.build = None
        if self.promise is not None:
            self.promise.fail(error)
            if is_seen:
                self.promise.mark_seen()


@final
class Promotions:
    """Brings steps from level to level, in the background. Used in one event loop.

    Args:
        levels: The nearest first.
        after: Called when a step has come to a level, with that level and then with each that it came from:
            decides what is deleted there.
        waits_s: Seconds between the tries of what fails; the last again and again.
    """

    def __init__(
        self,
        levels: Sequence[Level],
        after: Callable[[Level, int], Awaitable[object]],
        waits_s: Sequence[float] = WAITS_S,
    ) -> None:
        self._levels = levels
        self._threads = threads = Threads(COPY_WORKERS)
        self._encoder: Encoder | None = None
        self._promoters = {
            level: _Promoter(
                level, levels[:number], threads, self._encode_with, self._pass_on, after, waits_s
            )
            for number, level in enumerate(levels)
            if number
        }

    def owes(self, step: int) -> bool:
        """True if a step waits to be copied, or is being copied: it is not deleted meanwhile."""
        return any(promoter.has(step) for promoter in self._promoters.values())

    def coming_to(self, level: Level) -> Sequence[int]:
        """Return the steps that wait for a level, or are being copied there."""
        promoter = self._promoters.get(level)
        return () if promoter is None else promoter.steps

    def take(
        self,
        step: int,
        at: Level,
        to: Sequence[Level],
        promise: SavePromise,
        report: SaveReport,
        build: BuildPlace,
        save: str = "",
    ) -> None:
        """Take over a save that is kept or stranded: bring it to some levels, and fulfil its promise.

        Args:
            step: Its number.
            at: Where it was saved.
            to: The levels, the nearest first; not empty.
            promise: Of the save.
            report: Of the save into the nearest level.
            build: Where it was built; if it is stranded, it is there alone, in one process or all.
            save: What tells it from other saves, in all processes.
        """
        since, origin = time.perf_counter() - report.durable_s, None if build.stranded is None else at
        promoting = Promoting(step, list(to), promise, report, since, build, origin, save)
        loop = LoopHandle()
        promise.cancel = lambda: loop.post(partial(self._cancel, promoting))
        self._promoters[to[0]].offer(promoting)

    async def resume(self) -> None:
        """Bring the newest step to each level that lacks it, as after a crash. Older ones are not copied.

        Several processes call this together, and the primary finds what is lacking.

        Raises:
            StorageError: If a medium refuses.
            PeerError: If the primary does not say.
        """
        if len(self._levels) == 1:
            return

        for number, newest in await self._levels[-1].opened.root.job.decide("resume", self._lacking):
            level = self._levels[number]
            level.engine.events.info("step.promotion_resumed", step=newest, tier=level.path)
            self._promoters[level].offer(Promoting(newest, [level]))

    async def _lacking(self) -> list[tuple[int, int]]:
        """Return each level, by its number, that lacks the newest step of the nearer ones, and that step."""
        found: list[tuple[int, int]] = []
        for number, level in enumerate(self._levels):
            held = HeldSteps(self._levels[:number])
            newest, here = held.latest, level.catalogue.latest
            if newest is None or (here is not None and here > newest):
                continue
            if newest != here or not await self._promoters[level].is_same(newest):
                found.append((number, newest))

        return found

    async def put_together(self, whole: WholeStep) -> None:
        """Make a step in the root of its parts, wherever they are; all processes call this.

        Raises:
            PenstockError: As `CheckpointCopier.copy_together`.
        """
        root = self._levels[-1]
        engine, path = root.engine, root.catalogue.path(whole.step)
        mine = whole.bring.get(engine.coordinator.process_index, {})
        sources = {part: CopySource(engine.stores.at(at), at) for part, at in mine.items()}
        engine.events.info("step.promotion_resumed", step=whole.step, tier=root.path)
        copier = CheckpointCopier(engine.store, engine.store, self._threads, engine.memory)
        began = time.perf_counter()
        nbytes = await copier.copy_together(
            engine.operation(path),
            sources,
            path,
            processes=whole.processes,
            overwrite=whole.step in root.catalogue,
            prepare=root.opened.root.hold,
        )
        root.catalogue.add(whole.step, root.catalogue.name(whole.step))
        seconds = time.perf_counter() - began
        engine.events.info("step.promoted", step=whole.step, tier=root.path, nbytes=nbytes, seconds=seconds)

    def start(self, tasks: TaskGroup) -> None:
        """Begin, in a task group that ends with the manager."""
        for promoter in self._promoters.values():
            tasks.start_soon(promoter.run)

    async def bring(self, step: int) -> None:
        """Wait until a step waits no more to be copied, and is not being copied.

        Raises:
            PenstockError: If a try fails.
        """
        for promoter in self._promoters.values():
            await promoter.settle(step)

    async def settle(self) -> None:
        """Wait until no step waits to be copied; what failed before is tried at once.

        Raises:
            PenstockError: If a try fails. It is tried again later, as long as the manager is open.
        """
        for promoter in self._promoters.values():
            await promoter.settle()

    async def drop(self, step: int) -> None:
        """Copy a step no further, since it is deleted. Returns when no copy of it is under way."""
        for promoter in self._promoters.values():
            problem = NotACheckpointError(promoter.path_of(step), "the step was deleted")
            await promoter.drop(step, problem)

    async def close(self) -> None:
        """End what encodes; nothing is copied any more."""
        if self._encoder is not None:
            await self._encoder.close()

    def end(self, because: BaseException | None = None) -> None:
        """Break every promise that is left, as nothing is copied any more.

        Args:
            because: What the manager raises; else the callers hear that their saves were cancelled.
        """
        for promoter in self._promoters.values():
            promoter.end(because)

    def _encode_with(self) -> Encoder:
        """Return what encodes steps; most managers need none."""
        if self._encoder is None:
            from penstock.rewriting.encoder import Encoder

            engine = self._levels[-1].engine
            self._encoder = Encoder(engine.config, engine.stores, engine.memory, engine.events)

        return self._encoder

    def _pass_on(self, promoting: Promoting) -> None:
        """Bring a step that has come to a level to the next one, or fulfil its promise."""
        level = promoting.to.pop(0)
        if promoting.to:
            self._promoters[promoting.to[0]].offer(promoting)
        else:
            promoting.finish(level.catalogue.path(promoting.step))

    def _cancel(self, promoting: Promoting) -> None:
        for promoter in self._promoters.values():
            promoter.cancel(promoting)


def _first_problem(problems: Mapping[int, str | None]) -> str | None:
    return next((f"process {index}: {problem}" for index, problem in problems.items() if problem), None)


@final
class _Brought(NamedTuple):
    """The cost of bringing a step to a level."""

    nbytes: int
    processor_s: float | None = None  #: see `Promotion`


class _Turn(NamedTuple):
    """The primary's decision about the next copy, which all processes make together."""

    step: int
    save: str = ""  #: see `Promoting`
    source: int | None = None
    """The number of the level that all copy it from; None if it is here, -1 if it is nowhere any more."""
    left_out: Sequence[_Key] = ()  #: earlier saves that are not copied
    chunk_bytes: int | None = None  #: of chunks that are encoded on the way; None if none are
    is_passed_by: bool = False  #: whether the step goes on to the next level without this one


@final
class _Promoter:
    """Copies steps into one level, one after another. Of those that wait, the newest alone stays.

    Of several processes, the primary decides which step is next and which are left out, and all copy it
    together. Steps may be kept in another order in each process, so in the others all wait that were offered,
    until they hear what becomes of them. Each try that fails, fails for all.

    Args:
        level: Where they go.
        nearer: Where they come from, the nearest first.
        threads: For blocking calls.
        encode_with: Returns what brings steps that get another codec.
        pass_on: Called with a step that has come.
        after: As for `Promotions`.
        waits_s: As for `Promotions`.
    """

    def __init__(
        self,
        level: Level,
        nearer: Sequence[Level],
        threads: Threads,
        encode_with: Callable[[], Encoder],
        pass_on: Callable[[Promoting], None],
        after: Callable[[Level, int], Awaitable[object]],
        waits_s: Sequence[float],
    ) -> None:
        self._level, self._nearer = level, nearer
        self._encoded = f"{ENCODED}-{len(nearer)}-"  # in names, before the number of a process
        self._threads, self._encode_with = threads, encode_with
        self._pass_on, self._after = pass_on, after
        self._waits_s = waits_s
        self._job = level.opened.root.job
        self._is_joint = level.engine.is_joint
        self._decides = not self._is_joint or self._job.coordinator.is_primary
        self._n_decided = 0
        self._is_untold = False  # whether the last decision did not come to all, and is asked for again
        self._waiting: dict[_Key, Promoting] = {}  # where it is decided here, without those left out
        self._turn: _Key | None = None  # the save that this process has chosen, and is telling the others
        self._left_out: list[_Key] = []  # of several processes: since the last step that all have copied
        self._busy: Promoting | None = None
        self._is_there = False  # whether that has come
        self._scope = CancelScope()  # of the copy under way
        self._superseded: list[Promoting] = []  # whose promises a newer step fulfils
        self._asked, self._changed, self._hurry = Event(), Event(), Event()
        self._n_failed = 0  # tries, one after another
        self._n_refused = 0  # of these, those that had begun to copy
        self._failure: PenstockError | None = None  # of the last try

    @property
    def steps(self) -> Sequence[int]:
        """The steps that wait, or are being copied."""
        busy = () if self._is_there or self._busy is None else (self._busy.step,)
        return [*[step for step, _ in self._waiting], *busy]

    def has(self, step: int) -> bool:
        """True if a step waits, or is being copied."""
        return step in self.steps

    def path_of(self, step: int) -> str:
        """The path that a step has here."""
        return self._level.catalogue.path(step)

    def offer(self, promoting: Promoting) -> None:
        """Have a step copied, unless a newer one comes before its turn."""
        replaced = self._waiting.pop(promoting.key, None)
        self._waiting[promoting.key] = promoting
        if replaced is not None:
            self._supersede(replaced)
        if self._decides:
            newest = promoting.step if self._is_joint else max(self._waiting)[0]
            for key in sorted(self._waiting):
                is_replaced = key[0] == promoting.step and key != promoting.key
                if (key[0] < newest or is_replaced) and key != self._turn:
                    self._leave_out(self._waiting.pop(key))

        self._asked.set()

    def _leave_out(self, promoting: Promoting) -> None:
        """Leave out a step that waits no more, since a newer one does."""
        if self._is_joint:
            self._left_out.append(promoting.key)

        self._supersede(promoting)

    def _supersede(self, promoting: Promoting) -> None:
        """Leave a step out for a newer one; a level further on may want it, which has a queue of its own."""
        self._events.info("step.superseded", step=promoting.step, tier=self._level.path)
        if len(promoting.to) > 1:
            self._pass_on(promoting)
        else:
            promoting.build = None  # a newer one is there: of two that are stranded, one is enough
            self._superseded.append(promoting)

    async def run(self) -> None:
        """Copy what is offered, until cancelled."""
        await self._remove_encoded()
        while True:
            await self._asked.wait()
            if not self._waiting:
                self._asked = Event()
                continue

            is_done = await self._try_next()
            self._announce()
            if not is_done:
                wait_s = self._waits_s[min(self._n_failed, len(self._waits_s)) - 1]
                with move_on_after(wait_s):
                    await self._hurry.wait()

    async def _remove_encoded(self) -> None:
        """Remove what a job that died had encoded. None of its processes encodes before this has run."""
        for source in self._nearer if self._is_joint else ():
            if self._form_for(source) is not None and (source.is_local or self._decides):
                store, path = source.engine.store, source.path
                with suppress(StorageError):  # it is in the way of nothing
                    for name in await self._threads.run(store.list_directory, path):
                        if name.startswith(self._encoded):
                            await self._threads.run(store.remove_tree, os.path.join(path, name))

    async def _try_next(self) -> bool:
        """Copy the step whose turn it is.

        Returns:
            False if it waits for another try.
        """
        try:
            turn = await self._next()
        except (StorageError, PeerError, CoordinationError) as error:
            self._note_failed(error)
            self._log_failed(max(self.steps, default=-1))
            return False
        finally:
            self._turn = None

        promoting = self._waiting.pop((turn.step, turn.save))
        self._busy, self._is_there = promoting, False
        try:
            is_done = await self._try(promoting, turn)
        finally:
            self._busy = None

        if is_done:
            del self._left_out[: len(turn.left_out)]

        return is_done

    async def _next(self) -> _Turn:
        """Return what is copied next, once this process has it and knows what is left out.

        Raises:
            StorageError: If a medium does not say if it is here already.
            PeerError: If the primary does not say what is next.
        """
        if not self._is_joint:
            key = max(self._waiting)
            return _Turn(*key, is_passed_by=self._is_to_pass_by(self._waiting[key]))

        is_again = self._is_untold
        self._n_decided += not is_again
        try:
            turn = _Turn(
                *await self._job.decide(f"promote {self._n_decided}", self._decision, is_again=is_again)
            )
        except (StorageError, PeerError, CoordinationError) as error:
            self._is_untold = not isinstance(error, StorageError | PeerFailedError)  # these were told
            raise

        self._is_untold = False
        if is_again:
            self._failure = None

        known = frozenset(self._left_out)  # all of them in the primary, and what was heard before
        for step, save in turn.left_out:
            if (step, save) not in known:
                await self._offered((step, save))
                self._leave_out(self._waiting.pop((step, save)))

        await self._offered((turn.step, turn.save))
        return turn

    async def _offered(self, key: _Key) -> None:
        """Wait for a save that is kept in the primary, and will be here in a moment."""
        while key not in self._waiting:
            self._asked = Event()
            await self._asked.wait()

    async def _decision(self) -> _Turn:
        self._turn = key = max(self._waiting)  # a newer one waits until all have heard of it
        promoting = self._waiting[key]
        if self._is_to_pass_by(promoting):
            return _Turn(*key, left_out=list(self._left_out), is_passed_by=True)

        source = await self._source_of(promoting)
        is_coded = source is not None and source >= 0 and self._form_for(self._nearer[source]) is not None
        chunk_bytes = self._encode_with().chunk_bytes if is_coded else None
        return _Turn(*key, source, list(self._left_out), chunk_bytes)

    async def _source_of(self, promoting: Promoting) -> int | None:
        step = promoting.step
        if promoting.stranded_from is not None:
            return self._nearer.index(promoting.stranded_from)
        if step in self._level.catalogue and await self.is_same(step):
            return None

        there = [number for number, level in enumerate(self._nearer) if step in level.catalogue]
        there = [number for number in there if not self._nearer[number].is_out]
        there.sort(key=lambda number: self._form_for(self._nearer[number]) is not None)
        return there[self._n_failed % len(there)] if there else -1

    def _form_for(self, source: Level) -> SaveFormat | None:
        """Return how steps of a level are encoded on the way; None if they are copied as they are."""
        return None if self._level.form == source.form else self._level.form

    async def _try(self, promoting: Promoting, turn: _Turn) -> bool:
        """Copy a step. What the medium refuses waits for the next try, if no newer step does.

        Returns:
            False if it waits.
        """
        if turn.is_passed_by:
            self._pass_by(promoting)
            return True

        began = time.perf_counter()
        with CancelScope() as self._scope:
            try:
                if self._is_joint:
                    brought = await self._bring_together(promoting, turn)
                else:
                    brought = await self._bring(promoting)
            except (StorageError, RootInUseError, ReplacedError) as error:
                self._note_failed(error)
            except PenstockError as error:  # the same again would fail again
                if self._is_joint and turn.source != -1:  # the others do not know what failed here
                    self._note_failed(error)
                    return self._wait_again(promoting)

                self._events.error(
                    "step.promotion_ended", step=promoting.step, tier=self._level.path, error=repr(error)
                )
                promoting.fail(without_frame(error))
                return True
            else:
                self._n_failed, self._n_refused, self._failure = 0, 0, None
                seconds = time.perf_counter() - began
                self._events.info(
                    "step.promoted",
                    step=promoting.step,
                    tier=self._level.path,
                    nbytes=brought.nbytes,
                    seconds=seconds,
                    processor_s=brought.processor_s,
                )
                tier = "root" if self._level.tier is None else kind_of(self._level.path)
                path = self.path_of(promoting.step)
                took = brought.nbytes, seconds, promoting.lag_s, brought.processor_s
                told = Promotion(path, tier, *took)
                tell_promotion(self._level.engine.observers, told, self._events)
                await self._note_there(promoting)
                return True

        if self._scope.cancelled_caught:
            self._fail_cancelled(promoting)
            return True

        return self._wait_again(promoting)

    def _is_to_pass_by(self, promoting: Promoting) -> bool:
        """True if a step need not wait for this level, which fails: there is another one that it goes to."""
        return self._n_refused >= _PASSED_BY_AFTER and len(promoting.to) > 1

    def _pass_by(self, promoting: Promoting) -> None:
        """Bring a step to the next level without this one. The step after it is tried here once."""
        error = repr(self._failure)
        self._events.warning("step.tier_failed", step=promoting.step, tier=self._level.path, error=error)
        self._n_failed = self._n_refused = _PASSED_BY_AFTER - 1
        self._pass_on(promoting)

    def _note_failed(self, error: PenstockError) -> None:
        self._failure = without_frame(error)
        self._n_failed += 1

    def _log_failed(self, step: int) -> None:
        self._events.warning(
            "step.promotion_failed", step=step, tier=self._level.path, error=repr(self._failure)
        )

    def _wait_again(self, promoting: Promoting) -> bool:
        """Let a step wait for the next try, if no newer one does. Returns False."""
        self._n_refused += 1
        self._log_failed(promoting.step)
        if self._decides and any(step >= promoting.step for step, _ in self._waiting):  # or saved again
            self._leave_out(promoting)
        else:
            self._waiting[promoting.key] = promoting

        return False

    async def _bring_together(self, promoting: Promoting, turn: _Turn) -> _Brought:
        """Copy a step together with the other processes; return no bytes if it was here.

        Raises:
            PenstockError: If it cannot be copied by one of them.
        """
        level, step, path = self._level, turn.step, self.path_of(turn.step)
        if turn.source is None:
            return _Brought(0)
        if turn.source == -1:
            raise NotACheckpointError(path, "the step is in no nearer tier any more")

        source, coordinator = self._nearer[turn.source], level.engine.coordinator

        async def prepare() -> None:
            await level.opened.root.hold()
            await level.retention.forget(step)

        store = source.engine.store
        copier = CheckpointCopier(store, level.engine.store, self._threads, level.engine.memory)
        async with self._encoded_together(source, promoting, turn) as (encoded, processor_s):
            has_parts = source.is_local or encoded is not None
            nbytes = await copier.copy_together(
                level.engine.operation(path),
                {coordinator.process_index: CopySource(store, encoded or source.catalogue.path(step))},
                path,
                processes=coordinator.processes if has_parts else (),
                overwrite=step in level.catalogue or await self._is_left(step),
                prepare=prepare,
            )

        level.catalogue.add(step, level.catalogue.name(step))
        return _Brought(nbytes, processor_s)

    @asynccontextmanager
    async def _encoded_together(
        self, source: Level, promoting: Promoting, turn: _Turn
    ) -> AsyncGenerator[tuple[str | None, float | None]]:
        """Have each process encode its part of a step, or of what all see some of the leaves.

        It is written next to the step and removed with the end of the block: only then is known what all the
        parts are, which become one checkpoint.

        Yields:
            Where it is, and what that took, as in `_Brought`. If one of the processes cannot encode its part,
            nothing: then all copy the step as it is.

        Raises:
            PeerError: If another process failed, or did not come.
        """
        form = self._form_for(source)
        if turn.chunk_bytes is None or form is None:
            yield None, None
            return

        level, store, path = self._level, source.engine.store, source.catalogue.path(turn.step)
        coordinator = level.engine.coordinator
        beside = os.path.join(source.path, f"{self._encoded}{coordinator.process_index}")
        part = os.path.join(beside, os.path.basename(path))
        processor_s: float | None = None

        async def encode() -> str | None:
            nonlocal processor_s
            try:
                encoded = await self._encode_with().encode(
                    store,
                    path,
                    store,
                    part,
                    form,
                    overwrite=True,  # another try may have left it
                    is_here_alone=promoting.stranded_from is not None,
                    chunk_bytes=turn.chunk_bytes,
                    processes=() if source.is_local else tuple(coordinator.processes),
                    process=coordinator.process_index,
                )
            except PenstockError as error:
                return repr(error)

            processor_s = encoded.processor_s
            return None

        operation = level.engine.operation(f"{self.path_of(turn.step)} encoded")
        try:
            problem = await combined(operation, "encode", encode, _first_problem)
            if problem is not None:
                self._events.warning("step.not_encoded", step=turn.step, tier=level.path, error=problem)

            yield (part, processor_s) if problem is None else (None, None)
        finally:
            with move_on_after(_REMOVING_S, shield=True), suppress(StorageError):
                await self._threads.run(store.remove_tree, beside)

    async def _bring(self, promoting: Promoting) -> _Brought:
        """Copy a step from the nearest level where it is whole; return no bytes if it was here.

        Raises:
            PenstockError: If it cannot be copied, or no level has it.
        """
        level, step = self._level, promoting.step
        await level.opened.root.hold()
        await level.retention.forget(step)
        there = [source for source in self._nearer if step in source.catalogue]
        there.sort(key=lambda source: self._form_for(source) is not None)  # dearer than to read further
        sources = {source: source.catalogue.path(step) for source in there}
        if promoting.stranded_from is not None and promoting.build is not None:
            sources = {promoting.stranded_from: promoting.stranded_from.catalogue.path(step)}
        elif step in level.catalogue and await self.is_same(step):
            return _Brought(0)

        damage: CorruptCheckpointError | None = None
        refused: StorageError | None = None
        for source, path in sources.items():
            try:
                brought = await self._bring_from(source, path, promoting)
            except CorruptCheckpointError as error:  # another tier may have it undamaged
                self._events.error("step.damaged", path=path, error=repr(error))
                damage = damage or error
                continue
            except StorageError as error:  # likewise, if it is this one that does not answer
                if source is promoting.stranded_from or not await source.forget_if_gone(step):
                    refused = refused or error

                continue

            level.catalogue.add(step, level.catalogue.name(step))
            return brought

        nowhere = NotACheckpointError(self.path_of(step), "the step is in no nearer tier any more")
        try:
            raise refused or damage or nowhere
        finally:
            del refused, damage, nowhere  # or each kept its own frame, and so the memory of a stranded step

    async def _bring_from(self, source: Level, path: str, promoting: Promoting) -> _Brought:
        """Bring a step from one level, stored as it is to be here; what cannot be so is copied as it is.

        Raises:
            PenstockError: If it cannot be copied.
        """
        level, step = self._level, promoting.step
        stores = source.engine.store, level.engine.store
        overwrite = step in level.catalogue or await self._is_left(step)
        form = self._form_for(source)
        if form is not None:
            try:
                encoded = await self._encode_with().encode(
                    stores[0],
                    path,
                    stores[1],
                    self.path_of(step),
                    form,
                    overwrite=overwrite,
                    is_here_alone=promoting.stranded_from is not None,
                )
                return _Brought(encoded.nbytes, encoded.processor_s)
            except PenstockError as error:
                is_strange = isinstance(error, UnsupportedFormatError | ExpansionError)
                is_damaged = isinstance(error, CorruptCheckpointError) and not is_strange
                if is_damaged or isinstance(error, StorageError | DestinationExistsError):
                    raise

                # As what a handler wrote into files that it alone can read.
                self._events.warning("step.not_encoded", step=step, tier=level.path, error=repr(error))

        copier = CheckpointCopier(*stores, self._threads, level.engine.memory)
        return _Brought(await copier.copy(path, self.path_of(step), overwrite=overwrite))

    async def _is_left(self, step: int) -> bool:
        """True if the try before has published a step, and failed after that: nobody else writes here."""
        if self._n_failed:
            with suppress(StorageError):  # which the next try meets, too
                kind = self._level.engine.store.kind
                return await self._threads.run(kind, self.path_of(step)) is not None

        return False

    async def is_same(self, step: int) -> bool:
        """True if a step that is here is the one that the nearest level has, and no older one of its number.

        Raises:
            StorageError: If a medium refuses.
        """
        source = HeldSteps(self._nearer).holders(step)[0]
        stores = source.engine.store, self._level.engine.store
        paths = source.catalogue.path(step), self.path_of(step)
        if not source.is_local or self._level.is_local:
            return await self._threads.run(is_same_checkpoint, stores[0], paths[0], stores[1], paths[1])

        def alike() -> bool:  # what is made of parts has the times of the primary's
            files = [os.path.join(path, CHECKPOINT_METADATA) for path in paths]
            return stores[0].read_files(files[:1]) == stores[1].read_files(files[1:])

        return await self._threads.run(alike)

    async def _note_there(self, promoting: Promoting) -> None:
        step, path = promoting.step, self.path_of(promoting.step)
        overtaken = [one for one in self._superseded if one.step <= step]
        self._superseded = [one for one in self._superseded if one.step > step]
        stranded = {one.step: one.stranded_from for one in (promoting, *overtaken)}
        promoting.arrive(self._level.path)
        self._pass_on(promoting)
        for one in overtaken:
            one.finish(self.path_of(one.step), superseded_by=path)

        self._is_there = True  # from here on it may be deleted where it came from
        for level in (self._level, *self._nearer):
            if step in level.catalogue:
                await level.note_elsewhere(step)
            if self._is_joint or step in level.catalogue:  # all processes decide about the same
                await self._after(level, step)

        for number, origin in stranded.items():
            if self._is_joint and origin is not None:
                await origin.clear(number)

    async def settle(self, step: int | None = None) -> None:
        """See `Promotions.settle`, and `Promotions.bring` for one step."""
        tries = self._n_failed
        if not self._is_joint:
            self._hurry.set()
        try:
            while (self._waiting or self._busy is not None) and (step is None or self.has(step)):
                if self._is_joint and self._fails_for_all and self._is_the_end:
                    self._raise_failure()

                await self._changed.wait()
                is_new = self._fails_for_all if self._is_joint else self._n_failed > tries
                if is_new and self._is_the_end:
                    self._raise_failure()
        finally:
            self._hurry = Event()

    @property
    def _is_the_end(self) -> bool:
        """True if a step here goes to no other level: it is durable nowhere if this one fails."""
        return any(len(each.to) == 1 for each in self._owed)

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    @property
    def _fails_for_all(self) -> bool:
        """True if the last failure is one of all processes of a job, and so all raise it.

        A try more in one of them would wait for the others. What one alone did not hear it asks for again.
        """
        return not self._is_untold or self._n_failed >= _MOST_UNTOLD

    def cancel(self, promoting: Promoting) -> None:
        """Copy this step no further; of several processes, one alone waits for it no longer."""
        if self._is_joint and (self._busy is promoting or self._waiting.get(promoting.key) is promoting):
            self._fail_cancelled(promoting)
        elif self._busy is promoting:
            self._scope.cancel()  # the copy's task fails it
        elif self._waiting.get(promoting.key) is promoting:
            del self._waiting[promoting.key]
            self._fail_cancelled(promoting)
        elif promoting in self._superseded:
            self._superseded.remove(promoting)
            self._fail_cancelled(promoting)

        self._announce()

    def _fail_cancelled(self, promoting: Promoting) -> None:
        problem = f"step {promoting.step} was cancelled on its way to {self._level.path!r}"
        promoting.fail(SaveCancelledError(problem), is_seen=True)

    async def drop(self, step: int, problem: PenstockError) -> None:
        """Copy a step no further, whose number this is; return when that is over.

        Several processes have begun it together, and so they bring it to its end.
        """
        for one in self._unfulfilled():
            if one.step == step:
                one.fail(problem)
                self.cancel(one)

        while any(one.step == step for one in self._owed):
            await self._changed.wait()

    def end(self, because: BaseException | None) -> None:
        """See `Promotions.end`."""
        left = self._unfulfilled()
        self._waiting, self._superseded = {}, []
        for one in left:
            problem = (
                f"the CheckpointManager was left before step {one.step} was copied to {self._level.path!r}"
            )
            one.fail(SaveCancelledError(problem) if because is None else because, is_seen=True)

    @property
    def _owed(self) -> list[Promoting]:
        """Those that wait, and the one whose copy is under way."""
        busy = () if self._busy is None else (self._busy,)
        return [*self._waiting.values(), *busy]

    def _unfulfilled(self) -> list[Promoting]:
        return [*self._owed, *self._superseded]

    def _announce(self) -> None:
        self._changed.set()
        self._changed = Event()

    @property
    def _events(self) -> BoundLogger:
        return self._level.engine.events

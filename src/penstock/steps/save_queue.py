"""The saves of a manager: their order, their bases, and what happens when one is durable."""

from __future__ import annotations

__all__ = ("StepSaves",)

import os
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar, final

from anyio import Event
from anyio.abc import TaskGroup

from penstock.checkpointer.checkpointer import Checkpointer
from penstock.checkpointer.operations import Operations
from penstock.checkpointer.save_future import SaveFuture, SavePromise
from penstock.checkpointer.saves import Onward
from penstock.handlers.formats.orbax.orbax_layout import OrbaxLayout
from penstock.handlers.layouts.item_types import Composite
from penstock.handlers.stores.publishing.workspace import how_to_replace
from penstock.kernel.codecs import AUTO
from penstock.kernel.concurrency.threads import Threads
from penstock.kernel.errors import (
    ClosedError,
    ConfigError,
    CorruptCheckpointError,
    KeeperLostError,
    NoSpaceError,
    NotACheckpointError,
    NotOnThisDiskError,
    OlderStepError,
    PeerError,
    PeerFailedError,
    PenstockError,
    SpecError,
    StepExistsError,
    StorageError,
)
from penstock.kernel.pipeline.pipeline import Milestone
from penstock.kernel.pipeline.run_context import BaseIfWhole, SaveRequest
from penstock.kernel.protocols.build_place import BuildPlace
from penstock.kernel.protocols.coordinator import Operation, SoleOperation
from penstock.kernel.protocols.save_format import SaveFormat
from penstock.reports.report import SaveReport
from penstock.steps.joint_tiers import FoundPart, absent_levels, superseded, whole_step
from penstock.steps.keep_policies import Metric, Mode, Needs, as_keep_policy
from penstock.steps.opened_root import RootOptions
from penstock.steps.promotion import HeldSteps, Level, Promotions
from penstock.steps.save_decisions import hear_sigterm
from penstock.steps.save_policies import SavePolicy, as_save_policy
from penstock.steps.step_contents import step_items
from penstock.steps.step_metrics import RankedMetrics, best_step
from penstock.steps.step_names import NameFormat, StepNames
from penstock.steps.tier_record import TierRecord, labels_of
from penstock.steps.tiers import Disk, Memory, Tier, path_of

if TYPE_CHECKING:
    from penstock.steps.peers import PeerCopies

T = TypeVar("T")
_METRICS: Final[Needs] = frozenset({"metrics"})


@final
@dataclass(slots=True, eq=False)
class _Pending:
    """A save under way."""

    level: Level  #: where it is saved
    was_newest: bool  #: when it began; an older step is saved only if that is asked for
    future: SaveFuture | None = None
    is_stranded: bool = False  #: it is on its way from the memory of this process, as a promotion is
    done: Event = field(default_factory=Event)  #: the save is over
    ended: Event = field(default_factory=Event)  #: and the deletions that follow are decided


@final
class StepSaves:
    """The state of a manager. Used in one event loop.

    Args:
        checkpointer: What saves.
        root: The directory of steps.
        names: Names of step directories.
        save_when: Which steps are saved.
        options: The way in which the directory is used.
        tiers: Where steps are before they are in the root, the nearest first.
        link: Whether arrays are linked to an earlier step that holds them.
    """

    def __init__(
        self,
        checkpointer: Checkpointer,
        root: str,
        names: NameFormat,
        save_when: SavePolicy,
        options: RootOptions,
        tiers: Sequence[Tier] = (),
        *,
        link: bool,
    ) -> None:
        engine = checkpointer.engine.at(root)
        self._checkpointer = checkpointer
        self._engine = engine
        self._events = engine.events
        self._keeper = engine.report_keeper
        self._root, self._writes = root, options.writes
        self._link = link
        self._names = names if isinstance(names, StepNames) else None
        self._savers: dict[str, Operations] = {}  # by codec
        self._pending: dict[int, _Pending] = {}
        self._followed: list[_Pending] = []  # ended, and the deletions that follow are being decided
        self._tasks: TaskGroup | None = None
        self._failure: BaseException | None = None
        self._peers: dict[str, PeerCopies] = {}  # by the path of a level
        self._doubtful: list[Level] = []  # where a save of several processes failed since the last look
        process = engine.coordinator.process_index if engine.is_joint else None
        owing = replace(options, is_owed=partial(self._is_owed, root) if tiers else None)
        keeps = [options.keep, *[as_keep_policy(tier.keep) for tier in tiers]]
        self.levels: list[Level] = []
        """Where steps are, the nearest first; the last one is the root."""
        for tier, keep in zip(tiers, keeps[1:], strict=True):
            place, policy = path_of(tier, root, process), as_save_policy(tier.save_when)
            form = self._form_of(tier)
            owed = partial(self._is_owed, place)
            used = replace(owing, keep=keep, metadata=None, is_tier=True, is_owed=owed)
            try:
                level = Level(checkpointer.engine, place, names, policy, used, self._known_steps, tier, form)
            except ConfigError as error:
                if not isinstance(tier, Memory):
                    raise

                # This system has no keepers. What a program says of one that has need not be changed.
                self._events.warning("step.tier_absent", tier=place, error=repr(error))
            else:
                self.levels.append(level)

        form = self._form_of(None) if tiers else None
        self.levels.append(
            Level(checkpointer.engine, root, names, save_when, owing, self._known_steps, form=form)
        )
        local = [level.is_local for level in self.levels]
        if local != sorted(local, reverse=True):
            raise SpecError("what all processes see cannot come before what each has on a disk of its own")

        if options.writes:
            self._keeper.keep_below(root, labels_of([level.path for level in self.levels[:-1]]))

        self._promotions = Promotions(self.levels, self._delete_what_goes)
        self.held = HeldSteps(self.levels)  #: the steps of all of them
        self.reading = self.levels[-1].opened.reading  #: threads for what only reads
        infos = partial(self.held.infos, _METRICS)
        self._ranked = [RankedMetrics(keep, infos, self._events) for keep in keeps]

    def _form_of(self, tier: Tier | None) -> SaveFormat | None:
        """Return how steps are stored in a tier, or in the root; None if they are so in all levels.

        The root has the codec that the format says, and a tier that it says itself: by default none, as a
        codec would cost the training what only the root is worth.

        Raises:
            SpecError: If a tier says a codec where there cannot be one of its own.
        """
        own = tier.codec if isinstance(tier, Disk) else None
        arrays, why = self._engine.written.arrays, "with this layout"
        if isinstance(arrays, OrbaxLayout):
            codec = arrays.save_format.codec if tier is None else own or "none"
            # Parts are encoded apart from each other: they would not come to the same choice.
            if not (self._engine.is_joint and AUTO in (codec, arrays.save_format.codec)):
                return replace(arrays.save_format, codec=codec)

            why = f"in a job of several processes that chooses codecs ({AUTO!r})"
        if own is not None:
            raise SpecError(f"a tier has no codec of its own {why}: {tier}")

        return None

    async def load(self) -> None:
        """List all levels again. In a job of several processes all of them call this."""
        for level in self.levels:
            await level.opened.load()

    @property
    def preempted(self) -> bool:
        """True if the process was asked to end."""
        return any(level.decisions.preempted for level in self.levels)

    def preempt(self) -> None:
        """Note that the process was asked to end. From any thread, or a signal handler."""
        for level in self.levels:
            level.decisions.preempt()

    @property
    def saving(self) -> Sequence[int]:
        """Steps that are being saved now."""
        return tuple(self._pending)

    @asynccontextmanager
    async def live(self, owned: Checkpointer | None, *, sigterm: bool) -> AsyncGenerator[None]:
        """Open it. Leaving waits for saves and deletions; leaving on an error cancels the saves.

        Args:
            owned: The Checkpointer, if it is entered and left with this.
            sigterm: Whether a SIGTERM counts as a preemption.
        """
        async with AsyncExitStack() as opened:
            if owned is not None:
                await opened.enter_async_context(owned)

            record = await self._open_tiers(opened)
            tasks = await opened.enter_async_context(self.levels[-1].opened.live(self._raise_on_leaving))
            if sigterm:
                await tasks.start(hear_sigterm, self.preempt)

            if record is not None:
                await self.levels[-1].name_tiers(record)

            self._tasks = tasks
            self._keeper.note(self._root, "opened", text=f"by process {os.getpid()} on {os.uname().nodename}")
            failure: BaseException | None = None
            try:
                if self._writes:
                    await self._use_parts()
                    self._promotions.start(tasks)
                    await self._promotions.resume()

                    await self._find_peers(opened, tasks)

                    newest = self.held.latest
                    source = self.levels[-1] if newest is None else self.held.holders(newest)[0]
                    for level in self.levels[:-1]:
                        tasks.start_soon(level.make_ready, source, newest)

                yield
                await self._wait_for_saves()
                await self._settle_peers()
                await self._promotions.settle()
            except BaseException as error:
                failure = error
                raise
            finally:
                self._tasks = None
                self._promotions.end(failure if isinstance(failure, PenstockError) else None)
                await self._promotions.close()
                self._keeper.note(self._root, "closed")
                del failure  # its traceback refers to this frame

    async def _open_tiers(self, opened: AsyncExitStack) -> TierRecord | None:
        """Open the tiers, but for those that a process of the job cannot use: the next tier does without.

        Returns:
            The record of all of them; None if there are none.
        """
        tiers = self.levels[:-1]
        if not tiers:
            return None

        engine = self._engine
        record = TierRecord(
            self._root,
            tuple([level.path for level in tiers]),
            self._names,
            tuple(engine.coordinator.processes) if engine.is_joint else (),
            engine.config.job.local_root if engine.is_joint else None,
            formats={
                level.path: asdict(level.form)
                for level in self.levels
                if level.form is not None and any(each.form != level.form for each in self.levels)
            },
        )

        async def prepare() -> Mapping[int, str]:
            absent: dict[int, str] = {}
            for number, level in enumerate(tiers):
                try:
                    await level.prepare(record)
                except KeeperLostError as error:
                    absent[number] = repr(error)

            return absent

        absent = dict(await absent_levels(self._operation("tiers"), prepare))
        failed: dict[int, PenstockError] = {}
        for number, level in enumerate(tiers):
            if number not in absent:
                try:
                    await opened.enter_async_context(level.opened.live())
                except (KeeperLostError, PeerError) as error:  # its own, or that of another process
                    failed[number] = error

        lost = {number: repr(error) for number, error in failed.items() if isinstance(error, KeeperLostError)}

        async def opened_here() -> Mapping[int, str]:
            return lost

        absent |= await absent_levels(self._operation("tiers"), opened_here)
        for number, level in enumerate(tiers):
            problem = absent.get(number)
            if number in failed and problem is None:
                raise failed[number]
            if problem is not None:
                self._events.warning("step.tier_absent", tier=level.path, error=problem)
                self.levels = self.held.levels = [each for each in self.levels if each is not level]
                self._promotions = Promotions(self.levels, self._delete_what_goes)

        return record

    async def _find_peers(self, opened: AsyncExitStack, tasks: TaskGroup) -> None:
        """Begin to send what is kept in memory to other hosts, and to take what they send, if asked to."""
        for level in self.levels[:-1]:
            if isinstance(level.tier, Memory) and level.tier.peers and self._engine.is_joint:
                from penstock.steps.peers import PeerCopies  # few jobs need them

                copies = PeerCopies(level.engine, level.path, level.names, level.host, level.tier.peers)
                await opened.enter_async_context(copies.live(partial(self._operation, "peers"), tasks))
                self._peers[level.path] = copies

    async def _settle_peers(self) -> None:
        for copies in self._peers.values():
            await copies.settle()

    def _operation(self, about: str) -> Operation:
        """Return what the processes agree by about all levels together."""
        if not self._writes and not any(level.is_local for level in self.levels):
            return SoleOperation()  # who only reads may be in one process alone

        return self._engine.coordinator.operation(f"{about} of {self._engine.agreed_name(self._root)}")

    async def _use_parts(self) -> None:
        """Put the newest step together, if its parts are not where these processes can restore them.

        If a part is damaged, another copy of it is used, or an older step.
        """
        tiers, root = self.levels[:-1], self.levels[-1]
        if not tiers or root.is_local:
            return

        found: dict[Level, list[FoundPart]] = {}
        damaged: set[str] = set()
        failure: PenstockError | None = None

        async def find() -> list[FoundPart]:
            if failure is not None:
                raise failure  # the others hear of it here

            for level in tiers:
                try:
                    found[level] = await level.opened.reading.run(level.parts_here)
                except KeeperLostError as error:  # since the tier was opened: what was there is gone
                    found[level] = []
                    self._events.warning("step.tier_absent", tier=level.path, error=repr(error))

            return [part for level in tiers for part in found[level] if part.path not in damaged]

        latest = -1 if self.held.latest is None else self.held.latest
        while (whole := await whole_step(self._operation("parts"), find, latest)) is not None:
            try:
                await self._promotions.put_together(whole)
            except (PeerFailedError, KeeperLostError):
                continue  # the process that failed says next what becomes of it, or what it still finds
            except CorruptCheckpointError as error:
                mine = whole.bring.get(self._engine.coordinator.process_index, {}).values()
                bad = {path for path in mine if error.path == path or error.path.startswith(f"{path}/")}
                damaged |= bad
                failure = None if bad else error
                self._events.error("step.damaged", path=error.path, error=repr(error))
            except PenstockError as error:
                failure = error
            else:
                break

        processes = self._engine.coordinator.processes if self._engine.is_joint else ()
        for level, parts in found.items():
            useless = superseded(parts, self.held.latest, root.catalogue.steps, processes)
            await level.opened.threads.run(level.remove_parts, useless)
            left = [part for part in parts if part not in useless]
            level.not_durable |= {part.step for part in left if os.path.dirname(part.path) == level.path}

    def check_open(self) -> None:
        """Raise `ClosedError` unless the manager is open."""
        self._running()

    def close(self) -> None:
        """Take no more calls."""
        self._tasks = None

    def should_save(self, step: int) -> bool:
        """True if `step` is newer than any other and the policy wants it, as this process asks it."""
        return step > self._newest() and any(level.decisions.says(step) for level in self.levels)

    async def admits(self, step: int, *, force: bool, overwrite: bool) -> Sequence[Level]:
        """Return where `step` is to be now, the nearest first, in all processes: all that want it, or all.

        Raises:
            StepExistsError, OlderStepError: As `check_order`.
            Exception: What failed in the background, and was not raised yet. The other processes hear of it,
                if they save this step; or what the policy raises.
            PeerSilentError: If process 0 of a job of several does not decide.
        """
        self.check_order(step, overwrite=overwrite)
        await self._leave_lost_tiers()
        wanted = [
            level
            for level in self.levels
            if not level.is_out and (force or await level.decisions.wanted(step))
        ]
        failure = self.take_unseen()
        if failure is not None:
            if wanted and isinstance(failure, Exception):
                await self._refuse(step, failure, wanted[0])

            raise failure

        return wanted

    async def _leave_lost_tiers(self) -> None:
        """After a joint save has failed in a tier: save there no more, if a process cannot use it."""
        doubtful, self._doubtful = self._doubtful, []
        if not doubtful:
            return

        async def check() -> Mapping[int, str]:
            lost: dict[int, str] = {}
            for number, level in enumerate(doubtful):
                try:
                    await level.check()
                except StorageError as error:
                    lost[number] = repr(error)

            return lost

        for number, problem in (await absent_levels(self._operation("tiers"), check)).items():
            doubtful[number].is_out = True
            self._events.warning("step.tier_absent", tier=doubtful[number].path, error=problem)

    def replaces(self, step: int) -> bool:
        """True if an existing step is saved again unasked, because its name may not be durable."""
        return any(step in level.not_durable for level in self.levels)

    def check_order(self, step: int, *, overwrite: bool) -> None:
        """Refuse a step that exists, or is older than the latest.

        Raises:
            StepExistsError: If it exists and may not be overwritten, or is being saved.
            OlderStepError: If it is older.
        """
        if step in self._pending or (step in self.held and not overwrite):
            raise StepExistsError(step, how_to_replace(self._engine.store), self._tier_of(step))
        if step < (newest := self._newest()) and not overwrite:
            raise OlderStepError(step, newest, self._tier_of(newest))

    def _tier_of(self, step: int) -> str:
        """Return the path of the tier that has a step which the root has not got; empty if there is none."""
        if step in self._pending:
            return ""

        holder = self.held.holders(step)[-1]
        return "" if holder.tier is None else holder.path

    async def begin(
        self,
        step: int,
        items: object,
        metrics: Mapping[str, Any] | None,
        request: SaveRequest,
        to: Sequence[Level],
    ) -> SaveFuture:
        """Start a save and return when it is staged; what follows from it goes on in the background.

        Args:
            step: Its number.
            items: A tree or a `Composite`.
            metrics: The caller's, not yet JSON.
            request: All options. Without a `base`, unchanged leaves are linked to a step known here.
            to: Where it goes, as `admits` says: it is saved into the first that takes it, and copied on.
        """
        tasks, was_newest = self._running(), step >= self._newest()
        pending = self._pending[step] = _Pending(to[0], was_newest)
        try:
            contents = await self._contents(step, items, metrics, to[0])
            begun_s = time.monotonic()
            future = await self._save_into_first(step, contents, request, to, pending)
        except BaseException:
            del self._pending[step]
            self._note_doubtful(pending.level)
            pending.ended.set()
            raise

        pending.future = future
        for level in to:
            level.decisions.note_begun(begun_s)

        tasks.start_soon(self._follow, step, pending, future)
        return future

    async def _contents(
        self, step: int, items: object, metrics: Mapping[str, Any] | None, level: Level
    ) -> Composite:
        """Return the contents of a step that is saved at a level."""
        try:
            if metrics is not None:
                given = metrics
                for ranked in self._ranked:
                    metrics = await self.reading.run(ranked.checked, given)

                self._keeper.note_metrics(self.levels[-1].catalogue.path(step), metrics)

            return step_items(items, metrics)
        except Exception as error:
            await self._refuse(step, error, level)
            raise

    async def _save_into_first(
        self, step: int, items: Composite, request: SaveRequest, to: Sequence[Level], pending: _Pending
    ) -> SaveFuture:
        """Save into the first level that takes the step. A tier that fails before it is staged is skipped."""
        for number, level in enumerate(to):
            pending.level = level
            further, path = to[number + 1 :], level.catalogue.path(step)
            take = partial(self._hand_on, step, pending, level, further)
            onward = Onward(further[-1].catalogue.path(step), take) if further else None
            try:
                await self._free(step, level, may_strand=bool(further))
                future = await self._save_with_room(level, step, items, replace(request, path=path), onward)
            except StorageError as error:
                if not further or self._engine.is_joint:  # the others have heard of it, and fail, too
                    raise

                self._events.warning("step.tier_failed", step=step, tier=level.path, error=repr(error))
            else:
                noted = partial(self._note_done, step, pending)
                future.add_done_callback(noted, milestone=Milestone.KEPT)
                return future

        raise AssertionError("the last level returns or raises")

    def _hand_on(
        self,
        step: int,
        pending: _Pending,
        level: Level,
        to: Sequence[Level],
        promise: SavePromise,
        report: SaveReport,
        build: BuildPlace,
        save: str,
    ) -> None:
        """Have a save brought further that is kept in a level, or would be, were its keeper not lost."""
        if build.stranded is not None:
            self._events.warning("step.tier_failed", step=step, tier=level.path, error=build.stranded)
            pending.is_stranded = True
            pending.ended.set()  # who waits for it waits for the promotions, too

        self._promotions.take(step, level, to, promise, report, build, save)

    async def _free(self, step: int, level: Level, *, may_strand: bool) -> None:
        """Hold a level, and return when no deletion at the path of a step is under way there.

        A process of a job whose keeper is lost goes on without: the others may have begun to save there.
        """
        try:
            await level.opened.root.hold()
            await level.retention.forget(step)
        except Exception as error:
            if may_strand and self._engine.is_joint and isinstance(error, KeeperLostError):
                return

            await self._refuse(step, error, level)
            raise

    async def _refuse(self, step: int, error: Exception, level: Level) -> None:
        """Tell the other processes, which would wait for this one, that it does not save a step there."""
        await self._engine.operation(level.catalogue.path(step)).refuse(error)

    async def best_step(self, metric: Metric, mode: Mode) -> int | None:
        """Return the step with the best metric, as the function of this name; its metrics are read first."""
        infos = partial(self.held.infos, _METRICS, self.held.snapshot())
        return await self.reading.run(lambda: best_step(infos(), metric, mode))

    def note_found(self, step: int, name: str) -> None:
        """Note a step that another process saved."""
        root = self.levels[-1]
        if step not in root.catalogue and step not in root.retention.deleter.waiting:
            root.catalogue.add(step, name)

    async def restore(self, step: int, read: Callable[[Operations, Threads, str], Awaitable[T]]) -> T:
        """Return what `read` returns of a step in the nearest level where it is whole.

        Raises:
            PenstockError: What the last level that has it fails with.
        """
        operations, tried = self._checkpointer.operations, list[Level]()
        while (
            level := next((each for each in self.held.holders(step) if each not in tried), None)
        ) is not None:
            path = level.catalogue.path(step)
            tried.append(level)
            try:
                found = await read(operations, self.reading, path)
            except NotOnThisDiskError:  # on another mesh than it was saved on
                if level is self.held.holders(step)[-1]:
                    await self._promotions.bring(step)
                if level is self.held.holders(step)[-1]:
                    raise
            except (CorruptCheckpointError, NotACheckpointError, StorageError) as error:
                if level is self.held.holders(step)[-1]:
                    raise

                self._events.error("step.damaged", path=path, error=repr(error))
            else:
                level.note_base(step)
                return found

        raise AssertionError("the last level returns or raises")

    async def delete(self, step: int) -> None:
        """Delete a step wherever it is, and copy it no further.

        Raises:
            PenstockError: As `Retention.delete`; the rest is deleted all the same.
        """
        await self._promotions.drop(step)
        failures: list[PenstockError] = []
        for level in self.held.holders(step):
            try:
                await level.retention.delete(step)
            except PenstockError as error:
                failures.append(error)

        if failures:
            try:
                raise failures[0]
            finally:
                failures.clear()  # their tracebacks refer to this frame

    async def settle(self) -> None:
        """Wait until no save and no promotion is under way, and try once to delete the steps due."""
        await self._wait_for_saves()
        await self._settle_peers()
        await self._promotions.settle()
        for level in self.levels:
            await level.retention.deleter.attempt()

        self.raise_unseen()

    async def _wait_for_saves(self) -> None:
        for pending in (*self._pending.values(), *self._followed):
            await pending.ended.wait()

    def cancel(self) -> None:
        """Ask every save to stop."""
        for pending in self._pending.values():
            if pending.future is not None:
                pending.future.cancel()

    def raise_unseen(self) -> None:
        """Raise, once, the error that a policy raised in the background."""
        failure = self.take_unseen()
        if failure is not None:
            raise failure

    def take_unseen(self) -> BaseException | None:
        """Return that error, once, to a caller that will raise it."""
        failure, self._failure = self._failure, None
        return failure

    async def _save_with_room(
        self, level: Level, step: int, items: Composite, request: SaveRequest, onward: Onward | None
    ) -> SaveFuture:
        """Save as `_save` does; if there is no room, once more after the steps due for deletion are gone.

        Not where several processes save: the others have heard of a failure, and do not save once more.
        """
        deleter = level.retention.deleter
        try:
            return await self._save(level, step, items, request, onward)
        except NoSpaceError:
            if self._engine.is_joint or not deleter.waiting:  # as above
                raise

        await deleter.attempt()
        return await self._save(level, step, items, request, onward)

    async def _save(
        self, level: Level, step: int, items: Composite, request: SaveRequest, onward: Onward | None
    ) -> SaveFuture:
        operations, known = self._checkpointer.operations, level.base(step) if self._link else None
        save = operations.save if level.form is None else self._operations_of(level.form.codec).save
        if request.base is None and known is not None:
            request = replace(request, base=BaseIfWhole(known))  # the new step does not need it

        return await save(request, items, onward)

    def _operations_of(self, codec: str) -> Operations:
        """Return what saves with a codec; the same each time, since it keeps what it knows of trees."""
        if codec not in self._savers:
            self._savers[codec] = self._checkpointer.operations.with_codec(codec)

        return self._savers[codec]

    def _note_done(self, step: int, pending: _Pending, future: SaveFuture) -> None:
        """Record the step before any task that awaits the save continues."""
        del self._pending[step]
        if pending.is_stranded:  # the promotion has noted where it is
            pending.done.set()
            return

        self._followed.append(pending)
        level, name = pending.level, pending.level.catalogue.name(step)
        if future.status != "failed":
            level.not_durable.clear()  # their names are in the same directory
            level.catalogue.add(step, name)
            level.note_base(step)
            if level.path in self._peers:
                self._peers[level.path].offer(step)
        elif future.published and not self._engine.is_joint:  # the other processes do not know
            level.not_durable.add(step)
            level.catalogue.add(step, name)
        elif level.opened.root.is_local:
            level.catalogue.remove([step])  # if it was to be overwritten, it may be on some disks

        if future.status == "failed":
            self._note_doubtful(level)

        pending.done.set()

    def _note_doubtful(self, level: Level) -> None:
        if self._engine.is_joint and level is not self.levels[-1]:  # it has failed in all processes
            self._doubtful.append(level)

    async def _follow(self, step: int, pending: _Pending, future: SaveFuture) -> None:
        try:
            await pending.done.wait()
            if future.status != "failed" and not pending.is_stranded:
                await self._delete_what_goes(pending.level, step, was_newest=pending.was_newest)
        finally:
            if pending in self._followed:
                self._followed.remove(pending)

            pending.ended.set()

    async def _delete_what_goes(self, level: Level, step: int, *, was_newest: bool = True) -> None:
        """Have the steps deleted that a level keeps no more, now that one has come, or has gone on."""
        try:
            latest = level.catalogue.latest
            is_overtaken = was_newest and latest is not None and step < latest
            await level.retention.apply(step, is_overtaken=is_overtaken)
        except Exception as error:  # from a policy, or from the medium while reading for it
            self._events.error("step.retention_failed", step=step, error=repr(error))
            if level is self.levels[-1] or not isinstance(error, StorageError):
                self._failure = error  # what a tier refuses, as a keeper that is lost, ends no training

    def _is_owed(self, path: str, step: int) -> bool:
        """True if a step stays at the level of this path, whatever its policy says."""
        if self._promotions.owes(step):
            return True

        copies = self._peers.get(path)
        if copies is None or not copies.owes(step):
            return False

        seen = [level.catalogue.latest for level in self.levels if not level.is_local]
        return not any(latest is not None and latest >= step for latest in seen)  # no lost host takes that

    def _running(self) -> TaskGroup:
        if self._tasks is None:
            raise ClosedError("the CheckpointManager is not open; use it inside its `async with`")

        return self._tasks

    def _raise_on_leaving(self, failure: BaseException | None) -> None:
        if failure is not None:
            self.cancel()

        failure = failure or self.take_unseen()
        if failure is not None:
            try:
                raise failure
            finally:
                del failure  # the traceback refers to this frame

    def _known_steps(self, level: Level) -> tuple[Sequence[int], bool]:
        coming = {*self._pending, *self._promotions.coming_to(level)}
        steps = level.durable()
        return (sorted({*steps, *coming}) if coming else steps), bool(coming)

    def _newest(self) -> int:
        latest = [steps[-1] for level in self.levels if (steps := level.durable())]
        return max([-1, *latest, *self._pending])

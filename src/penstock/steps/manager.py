"""A directory of steps: what a training loop saves into, and resumes from."""

from __future__ import annotations

__all__ = ("CheckpointManager",)

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from types import EllipsisType, TracebackType
from typing import (
    TYPE_CHECKING,
    Any,
    Final,
    Literal,
    SupportsIndex,
    TypeAlias,
    TypeVar,
    Unpack,
    cast,
    final,
    overload,
)

from penstock.checkpointer.checkpointer import NEEDED_TO_OPERATE, Checkpointer
from penstock.checkpointer.parts import CheckpointerKeywords
from penstock.event_loop.entered_once import AsyncOnly, EnteredOnce
from penstock.event_loop.imports import NeededModules, load
from penstock.handlers.stores.publishing.paths import path_or_url
from penstock.kernel.errors import NotACheckpointError, SpecError
from penstock.kernel.pipeline.failures import forget_on_error, short_tracebacks
from penstock.kernel.protocols.build_place import Overwrite
from penstock.kernel.words import near_steps
from penstock.steps.keep_policies import KeepPolicy, Metric, Mode, as_keep_policy, check_ranking, ranking_of
from penstock.steps.save_policies import SavePolicy, as_save_policy, awaits_preemption
from penstock.steps.step_names import NameFormat, StepNames, step_number
from penstock.steps.tiers import Disk, Memory, Tier, as_tiers, path_of

if TYPE_CHECKING:
    # As in `Checkpointer`: loaded on entering, in a worker thread.
    import jax

    from penstock.checkpointer.checkpointer import Path
    from penstock.checkpointer.parts import RestoreKeywords
    from penstock.checkpointer.save_future import SaveFuture
    from penstock.config.config import Config
    from penstock.handlers.coordinators.job_options import JobOptions
    from penstock.handlers.layouts.auto_layout import AutoLayout
    from penstock.handlers.leaves.handler_registry import HandlerRegistry
    from penstock.handlers.stores.publishing.reading import Reading
    from penstock.kernel.memory.regulator import MemoryRegulator
    from penstock.kernel.messages.restore import Only, Rename, Transform
    from penstock.kernel.pipeline.pipeline import Pipeline
    from penstock.kernel.pipeline.run_context import Compare, RestoreRun, SaveRun, ShowProgress, Staging
    from penstock.kernel.protocols.coordinator import Coordinator
    from penstock.kernel.protocols.layouts import Layout
    from penstock.kernel.protocols.leaf import KeyPath, LeafPredicate
    from penstock.kernel.protocols.save_format import SaveArgs, SaveFormat
    from penstock.kernel.protocols.stores import Store
    from penstock.kernel.rules import Rule
    from penstock.reports.report import RestoreReport
    from penstock.steps.save_queue import StepSaves
    from penstock.steps.step_contents import StepMetadata
    from penstock.steps.step_watch import Watch
    from penstock.telemetry.observers import Observer

T = TypeVar("T")
Step: TypeAlias = SupportsIndex | None
"""Its number; None for the latest."""

NEEDED_TO_MANAGE: Final[NeededModules] = {
    "penstock.stores.store_finder": "StoreFinder",
    "penstock.steps.save_queue": "StepSaves",
    "penstock.steps.step_watch": "Watch",
}


@short_tracebacks
@final
class CheckpointManager(AsyncOnly):
    """Saves steps into one directory by policy, keeps the ones worth keeping, and restores them.

    ```python
    async with penstock.CheckpointManager(
        "run", save_when=EverySteps(100) | OnPreemption(), keep=KeepLast(3) | KeepBest(2, "loss")
    ) as manager:
        state = await manager.restore(like=state) if manager.latest_step() is not None else state
        for step in range(...):
            state, loss = train(state)
            await manager.save(step, state, metrics={"loss": loss})   # staged, or not wanted now
    ```

    An async context manager. Leaving it waits for saves and deletions, and raises the failure of a save
    that was not awaited; leaving it on an error cancels the saves. One manager at a time saves into a
    root, and another is refused with a `RootInUseError`; any number may read it, with `read_only=True`.

    In a job of several processes each has one, and all call `save` with the same steps. Process 0 asks the
    policies, and the others do as it says; if it says nothing, they raise a `PeerSilentError`.

    Args:
        root: The directory of steps; made if it does not exist.
        save_when: Which of the steps offered to `save` are saved; `100` means `EverySteps(100)`.
        keep: Which steps stay once a new one is durable; the last one always does. `3` means `KeepLast(3)`.
        names: Names of step directories.
        trash: A folder in `root` that steps are moved to instead of being removed.
        metric: What `best_step` ranks by; by default what the first `KeepBest` in `keep` ranks by.
        mode: Whether the least or the greatest `metric` is best.
        metadata: The caller's own JSON values, kept with `root`; those of an existing root stay.
        read_only: Whether nothing is written or deleted.
        clean: Whether the leftovers of crashed saves are removed from `root` on opening.
        link: Whether arrays that an earlier step already holds are linked instead of written again.
        tiers: Where steps are saved first, and copied on from there to `root` in the background:
            `Disk("/nvme/run")`, `Memory()` (or `"memory"`), or several, the nearest first. By default those
            of the configuration, `[[tier]]`, and if it is `read_only` and there are none, those that the
            root names, as far as they are seen from here. `()` for none.
        sigterm: Whether SIGTERM triggers `OnPreemption` instead of ending the process; by default if
            `save_when` contains it.
        checkpointer: An open Checkpointer that saves and restores, to share its memory budget.
        config: As for `penstock.Checkpointer`, and so are all that follow. Not with a `checkpointer`,
            which has its own.

    Raises:
        SpecError, ConfigError: If an option does not fit; some are looked at on entering, see `Checkpointer`.
            On entering: PathError if `root` is a checkpoint.
    """

    def __init__(
        self,
        root: Path,
        *,
        save_when: SavePolicy | int | None = None,
        keep: KeepPolicy | int | None = None,
        names: NameFormat | None = None,
        trash: str | None = None,
        metric: Metric | None = None,
        mode: Mode = "min",
        metadata: Mapping[str, Any] | None = None,
        read_only: bool = False,
        clean: bool = True,
        link: bool = True,
        tiers: Tier | Iterable[Tier] | Literal["memory"] | None = None,
        sigterm: bool | None = None,
        checkpointer: Checkpointer | None = None,
        config: Config | Path | None = None,
        profile: str | None = None,
        registry: HandlerRegistry | None = None,
        save_pipeline: Pipeline[SaveRun] | None = None,
        restore_pipeline: Pipeline[RestoreRun] | None = None,
        store: Store | None = None,
        save_format: SaveFormat | None = None,
        layout: Layout | AutoLayout | None = None,
        coordinator: Coordinator | None = None,
        observers: Iterable[Observer] = (),
        job: JobOptions | None = None,
        memory_limit: int | str | None = None,
        save_device_host_concurrent_bytes: int | str | None = None,
        save_concurrent_bytes: int | str | None = None,
        restore_concurrent_bytes: int | str | None = None,
        memory: MemoryRegulator | None = None,
    ) -> None:
        options = CheckpointerKeywords(
            config=config,
            profile=profile,
            registry=registry,
            save_pipeline=save_pipeline,
            restore_pipeline=restore_pipeline,
            store=store,
            save_format=save_format,
            layout=layout,
            coordinator=coordinator,
            observers=observers,
            job=job,
            memory_limit=memory_limit,
            save_device_host_concurrent_bytes=save_device_host_concurrent_bytes,
            save_concurrent_bytes=save_concurrent_bytes,
            restore_concurrent_bytes=restore_concurrent_bytes,
            memory=memory,
        )
        when, kept = as_save_policy(save_when), as_keep_policy(keep)
        self._root, self._read_only = path_or_url(root), read_only
        self._names: NameFormat = StepNames() if names is None else names
        if not isinstance(cast("object", names), NameFormat | None):
            raise SpecError(f"names is a format such as StepNames('step'), not {names!r}")
        flags = {"read_only": read_only, "clean": clean, "link": link, "sigterm": sigterm or False}
        for name, value in flags.items():
            if not isinstance(cast("object", value), bool):
                raise SpecError(f"{name} is True or False, not {value!r}")
        if metadata is not None and not isinstance(cast("object", metadata), Mapping):
            raise SpecError(f"metadata is a mapping of JSON values, not {metadata!r}")

        check_ranking("loss" if metric is None else metric, mode)
        self._ranking = ranking_of(kept) if metric is None else (metric, mode)
        self._checkpointer, owned = _own_or_given(checkpointer, options)
        self._tiers = as_tiers(tiers, self._root, self._checkpointer.config.tier)
        self._finds_tiers = read_only and tiers is None and not self._tiers
        policies = [when, *[as_save_policy(tier.save_when) for tier in self._tiers]]
        self.awaits_preemption = any(
            map(awaits_preemption, policies)
        )  #: whether `save_when` has `OnPreemption`
        _check_trash(trash, self._names)
        self._policies, self._trash, self._link = (when, kept), trash, link
        self._made: StepSaves | None = None
        sigterm = self.awaits_preemption if sigterm is None else sigterm
        self._owned, self._sigterm = owned, sigterm
        self._metadata, self._clean = metadata, clean
        self._entered = EnteredOnce("CheckpointManager")

    async def __aenter__(self) -> CheckpointManager:
        await load({**NEEDED_TO_OPERATE, **NEEDED_TO_MANAGE}, self._checkpointer.config.loop)
        if self._finds_tiers and self._made is None:
            self._tiers = await self._found_tiers()

        await self._entered.enter(partial(self._saves.live, self._owned, sigterm=self._sigterm))
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc_val: BaseException | None,
        exc_tb: TracebackType | None,
    ) -> bool | None:
        return await self._entered.leave(exc_type, exc_val, exc_tb)

    @property
    def root(self) -> str:
        """The directory of steps."""
        return self._root

    @property
    def checkpointer(self) -> Checkpointer:
        """The Checkpointer that saves and restores."""
        return self._checkpointer

    @property
    def saving(self) -> Sequence[int]:
        """Steps that are being saved now."""
        return self._saves.saving

    @property
    def preempted(self) -> bool:
        """True if the process was asked to end, since the manager was opened.

        In a job of several processes with `OnPreemption`: whether any of them was, as of the last `save`. All
        see it after the same step.
        """
        return self._saves.preempted

    def preempt(self) -> None:
        """Note that the process was asked to end, as SIGTERM does. From any thread, or a signal handler."""
        self._saves.preempt()

    def should_save(self, step: SupportsIndex) -> bool:
        """True if `save` would save `step` now: it is newer than the latest and the policy wants it.

        In a job of several processes, process 0 decides, unless the policy looks at the step alone.
        """
        self._saves.check_open()
        return not self._read_only and self._saves.should_save(step_number(step))

    async def save(
        self,
        step: SupportsIndex,
        items: object,
        *,
        metrics: Mapping[str, Any] | None = None,
        custom_metadata: Mapping[str, Any] | None = None,
        force: bool = False,
        overwrite: Overwrite = False,
        prioritise: LeafPredicate | None = None,
        staging: Staging = "copy",
        pipeline: Pipeline[SaveRun] | None = None,
        save_args: SaveArgs | Callable[[KeyPath], SaveArgs | None] | object = None,
        base: Path | None = None,
        compare: Compare = "identity",
        progress: ShowProgress = False,
    ) -> SaveFuture | None:
        """Begin to save a step, if the policy wants it; return once it is staged.

        Args:
            step: Its number.
            items: A tree, or a `Composite` of named items.
            metrics: Numbers, by name, nested or not; kept with the step and ranked by `KeepBest`.
            custom_metadata: JSON values kept with the step.
            force: Save it, whatever the policy says.
            overwrite: Replace the step if it exists, and allow one older than the latest.
            prioritise: As for `Checkpointer.save`; and so is everything below.
            staging: When this returns: `"copy"` or `"overlap"`.
            pipeline: Stages for this save alone.
            save_args: How leaves are stored, where not as the format says.
            base: An earlier checkpoint that unchanged leaves are linked to; by default the last step whose
                values are known here, if the manager was made with `link`.
            compare: How an unchanged leaf is known.
            progress: Whether and how the progress is shown.

        Returns:
            The save in the background; None if the policy does not want it.

        Raises:
            StepExistsError: If the step exists or is being saved.
            OlderStepError: If it is older than the latest.
            RootInUseError: If this manager could not hold the root, as on a full disk, and another now does.
            SpecError, HandlerError, StorageError: As `Checkpointer.save`; also `UnknownMetricError`.
            PenstockError: If an earlier save failed and its failure was not raised yet.

        Cancellation:
            Cancels the save and returns when its temporary files are gone.
        """
        given = [items]
        del items  # neither a save in the background nor a failure keeps what the caller dropped
        number = self._writable(step, "saved")
        overwrite = overwrite or self._saves.replaces(number)
        to = await self._saves.admits(number, force=force, overwrite=bool(overwrite))
        if not to:
            return None

        from penstock.kernel.pipeline.run_context import SaveRequest  # it is loaded by now

        request = SaveRequest(
            path=to[0].catalogue.path(number),
            overwrite=overwrite,
            prioritise=prioritise,
            staging=staging,
            custom_metadata=custom_metadata,
            pipeline=pipeline,
            save_args=save_args,
            base=base,
            compare=compare,
            progress=progress,
        )
        with forget_on_error():
            return await self._saves.begin(number, given.pop(), metrics, request, to)

    @overload
    async def restore(
        self, step: Step = None, *, as_type: type[T], like: object = ..., **options: Unpack[RestoreKeywords]
    ) -> T: ...
    @overload
    async def restore(
        self, step: Step = None, *, like: EllipsisType = ..., **options: Unpack[RestoreKeywords]
    ) -> Any: ...
    @overload
    async def restore(self, step: Step = None, *, like: type[T], **options: Unpack[RestoreKeywords]) -> T: ...
    @overload
    async def restore(
        self, step: Step = None, *, like: jax.ShapeDtypeStruct, **options: Unpack[RestoreKeywords]
    ) -> jax.Array: ...
    @overload
    async def restore(self, step: Step = None, *, like: T, **options: Unpack[RestoreKeywords]) -> T: ...
    async def restore(  # noqa: D417  # what it does not describe is as for `Checkpointer.restore`
        self,
        step: Step = None,
        *,
        like: Any = ...,
        as_type: type[Any] | None = None,
        mmap: bool = False,
        verify: bool | None = None,
        split: str | None = None,
        item: str | None = None,
        prioritise: LeafPredicate | None = None,
        pipeline: Pipeline[RestoreRun] | None = None,
        on_report: Callable[[RestoreReport], object] | None = None,
        only: Only | None = None,
        rules: Sequence[Rule] | None = None,
        rename: Rename | None = None,
        transforms: Mapping[str, Transform] | None = None,
        transforms_default_to_original: bool = True,
        dtype: Any = None,
        strict: bool = True,
        on_missing: Literal["raise", "keep"] = "raise",
        on_unexpected: Literal["raise", "skip"] = "raise",
        max_expansion: int | None = None,
        replica_axis: str | None = None,
        primary_replica: int = 0,
        progress: ShowProgress = False,
    ) -> Any:
        """Return what was saved as a step. While it is read, no penstock on this machine deletes it.

        Args:
            step: Its number; by default the latest.
            like: As for `Checkpointer.restore`; or a `Composite` of such, where `...` means as it was saved.
            as_type: As for `Checkpointer.restore`, and so are all that follow, for each item.

        Returns:
            The tree, if the step holds one or `item` or one `like` is given; else a `Composite`.

        Raises:
            NotACheckpointError: If there is no such step. Others are those of `Checkpointer.restore`.
        """
        number = self._chosen(step)
        from penstock.checkpointer.operations import RestoreCall  # it is loaded by now
        from penstock.kernel.messages.restore import RestoreOptions
        from penstock.steps.step_contents import restore_step

        options = RestoreOptions(
            item=item,
            only=only,
            split=split,
            mmap=mmap,
            verify=verify,
            prioritise=prioritise,
            max_expansion=max_expansion,
            replica_axis=replica_axis,
            primary_replica=primary_replica,
            rules=rules,
            rename=rename,
            transforms=transforms,
            transforms_default_to_original=transforms_default_to_original,
            dtype=dtype,
            strict=strict,
            on_missing=on_missing,
            on_unexpected=on_unexpected,
        )

        call = RestoreCall(options, pipeline, on_report, progress)
        begin = self._saves.restore(number, partial(restore_step, like=like, call=call, as_type=as_type))
        del like
        with forget_on_error():
            return await begin

    def all_steps(self) -> Sequence[int]:
        """Every durable step that this manager knows, ascending; see `reload`."""
        self._saves.check_open()
        return self._saves.held.steps

    def latest_step(self) -> int | None:
        """The last durable step; None if there is none. Not awaited: the names of steps are known."""
        self._saves.check_open()
        return self._saves.held.latest

    async def best_step(self, metric: Metric | None = None, mode: Mode | None = None) -> int | None:
        """Return the step with the best metric, the latest of equals; None if none has a finite one.

        Awaited, unlike `latest_step`: it reads the metrics of steps that were not read yet.

        Args:
            metric: By default that of the manager.
            mode: Whether the least or the greatest is best; by default the least, and of the manager's metric
                as it says.

        Raises:
            SpecError: If no metric was named, here or to the manager.
            UnknownMetricError: If no step has a metric of this name, and there is one of nearly the same.
        """
        self._saves.check_open()
        ranking: tuple[Metric, Mode] | None = self._ranking if metric is None else (metric, "min")
        if ranking is None:
            raise SpecError("best by what? Name a metric, here or to the manager")
        if mode is not None:
            ranking = (ranking[0], mode)

        check_ranking(*ranking)
        return await self._saves.best_step(*ranking)

    async def metadata(self, step: Step = None) -> StepMetadata:
        """Say what a step holds, by default the latest, without reading arrays or touching a device.

        Raises:
            NotACheckpointError: If there is no such step, or none at all.
            CorruptCheckpointError: If a document is damaged.
        """
        from penstock.steps.step_contents import describe_step

        number = self._chosen(step)
        path = self._saves.held.path(number)
        engine, threads = self._checkpointer.engine.at(path), self._saves.reading

        async def describe(source: Reading) -> StepMetadata:
            run = engine.restore_run(path, threads, source.store)
            return await describe_step(run, path, number)

        return await engine.read_unchanged(path, threads, describe)

    async def root_metadata(self) -> Mapping[str, Any] | None:
        """Return what was given as `metadata` when the root was made; None if nothing was."""
        from penstock.steps import step_directory as on_disk

        self._saves.check_open()
        store = self._checkpointer.engine.at(self._root).store
        return await self._saves.reading.run(on_disk.read_root_metadata, store, self._root)

    async def delete(self, step: SupportsIndex) -> None:
        """Delete a step; return when it is gone. While somebody on this machine reads it, it stays.

        Raises:
            NotACheckpointError: If there is no such step.
            StorageError: If it could not be deleted; then it is still there.
            RootInUseError: As `save`.

        Cancellation:
            The step will be deleted nevertheless.
        """
        number = self._writable(step, "deleted")
        held = self._saves.held
        if number not in held:
            near = near_steps(number, held.steps)
            raise NotACheckpointError(held.path(number), f"there is no such step ({near})")

        await self._saves.delete(number)

    def pin(self, step: SupportsIndex) -> None:
        """Keep a step, whatever the policy says, until `unpin` or until this manager is left."""
        for level in self._saves.levels:
            level.retention.pins.add(step_number(step))

    def unpin(self, step: SupportsIndex) -> None:
        """Leave a step to the policy again."""
        for level in self._saves.levels:
            level.retention.pins.discard(step_number(step))

    async def reload(self) -> None:
        """List the root again, which others may have changed.

        In a job of several processes all call it, and get what process 0 finds.
        """
        self._saves.check_open()
        await self._saves.load()

    def watch(
        self,
        *,
        after: int | None = None,
        latest_only: bool = False,
        timeout_s: float | None = None,
        until: Callable[[], bool] | None = None,
        interval_s: float = 1.0,
    ) -> Watch:
        """Yield each step that becomes durable, saved by any process; arguments as for `penstock.watch`."""
        from penstock.steps.step_watch import Watch

        self._saves.check_open()
        return Watch(
            self._checkpointer.engine.at(self._root).store,
            self._saves.reading,
            self._root,
            self._names,
            after=after,
            latest_only=latest_only,
            timeout_s=timeout_s,
            until=until,
            interval_s=interval_s,
            on_step=self._saves.note_found,
        )

    async def wait(self) -> None:
        """Wait until no save is under way, and every step to be deleted is gone or being read.

        Raises:
            PenstockError: The first failure that was not raised yet.
        """
        self._saves.check_open()
        await self._saves.settle()
        await self._checkpointer.wait()

    async def close(self) -> None:
        """Wait as `wait` does; afterwards the manager takes no more calls and can only be left."""
        await self.wait()
        self._saves.close()

    async def _found_tiers(self) -> Sequence[Tier]:
        """Return the tiers that the root names, as far as they are seen from here: to read them."""
        from penstock.kernel.concurrency.threads import Threads
        from penstock.steps.tier_record import levels_of, record_of_root

        engine, threads = self._checkpointer.engine.at(self._root), Threads(1)
        if engine.is_joint or await threads.run(record_of_root, engine.store, self._root) is None:
            return ()

        levels = await threads.run(levels_of, engine.store, self._root)
        memory = path_of(Memory(), self._root)
        seen = [level.path for level in levels[:-1] if level.store is not None and level.steps]
        return [Memory() if path == memory else Disk(path) for path in seen]

    @property
    def _saves(self) -> StepSaves:
        if self._made is None:
            from penstock.steps.opened_root import RootOptions
            from penstock.steps.save_queue import StepSaves

            save_when, keep = self._policies
            options = RootOptions(
                self._metadata, keep, self._trash, writes=not self._read_only, clean=self._clean
            )
            self._made = StepSaves(
                self._checkpointer,
                self._root,
                self._names,
                save_when,
                options,
                self._tiers,
                link=self._link,
            )

        return self._made

    def _chosen(self, step: Step) -> int:
        self._saves.check_open()
        return self._saves.held.require_latest() if step is None else step_number(step)

    def _writable(self, step: SupportsIndex, what: str) -> int:
        self._saves.check_open()
        if self._read_only:
            raise SpecError(f"{self._root!r} was opened read_only; nothing can be {what} there")

        return step_number(step)


def _own_or_given(
    given: Checkpointer | None, options: CheckpointerKeywords
) -> tuple[Checkpointer, Checkpointer | None]:
    """Return the Checkpointer that was given, or a new one with the options; and that one if it is new.

    Raises:
        SpecError: If there is one and an option as well.
    """
    if given is None:
        made = Checkpointer(**options)
        return made, made
    if not isinstance(cast("object", given), Checkpointer):
        raise SpecError(f"checkpointer is a penstock.Checkpointer, not {given!r}")

    unused = [name for name, value in options.items() if value is not None and value != ()]
    if unused:
        raise SpecError(f"{', '.join(unused)}: an option of the checkpointer, which is given already")

    return given, None


def _check_trash(trash: str | None, names: NameFormat) -> None:
    """Refuse a name for the folder of deleted steps that is no plain name, or that of a step.

    Raises:
        SpecError: If it is one.
    """
    if not isinstance(cast("object", trash), str | None):
        raise SpecError(f"trash is the name of a folder, not {trash!r}")
    if trash is not None and (not trash or "/" in trash or names.step(trash) is not None):
        raise SpecError(f"a folder for deleted steps cannot be called {trash!r}")

"""The steps of a directory and the options of managers, for both APIs: an adapter of `penstock.steps`."""

from __future__ import annotations

__all__ = (
    "CheckpointInfo",
    "CheckpointManagerOptions",
    "ManagerSteps",
    "StepChange",
    "new_info",
)

import datetime
import math
import operator
import os
from collections.abc import (
    AsyncGenerator,
    Awaitable,
    Callable,
    Collection,
    Container,
    Generator,
    Mapping,
    Sequence,
)
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final, TypeVar, cast, final

from penstock import Checkpointer, kernel
from penstock.embedding import (
    OpenSteps,
    RootOptions,
    StepFiles,
    blocking,
    failures,
    file_names,
    limit_permissions,
    paths,
)
from penstock.embedding import step_directory as on_disk
from penstock.errors import ConfigError, NotACheckpointError, StorageError
from penstock.orbax.enclosing_save import StepLinks
from penstock.orbax.item_files import bucket_url, path_text, place_of, store_at
from penstock.orbax.logging import SaveTimes
from penstock.orbax.metadata import RootMetadata
from penstock.orbax.multihost import reached_preemption
from penstock.orbax.options import (
    AsyncOptions,
    AtomicityOptions,
    FileOptions,
    MultiprocessingOptions,
    job_options,
    saving_processes,
)
from penstock.orbax.policies import (
    AnyPreservationPolicy,
    AnySavePolicy,
    BestN,
    DecisionContext,
    EveryNSeconds,
    EveryNSteps,
    FixedIntervalPolicy,
    InitialSavePolicy,
    LatestN,
    PreemptionCheckpointingPolicy,
    PreservationPolicy,
    SaveDecisionPolicy,
    ShouldSaveFnPolicy,
    SpecificStepsPolicy,
    as_decision_policy,
    check_metrics,
    is_same_everywhere,
    to_delete,
)
from penstock.orbax.step import as_name_format, is_empty, standard_name_format
from penstock.steps import KeepPolicy, SavePolicy, StepInfo

T = TypeVar("T")

_WRITING = {
    "save_interval_steps": 0,
    "max_to_keep": None,
    "keep_time_interval": None,
    "keep_period": None,
    "create": False,
    "cleanup_tmp_directories": False,
    "save_on_steps": None,
    "todelete_subdir": None,
    "todelete_full_path": None,
    "should_save_fn": None,
}
"""The values of these options with `read_only`."""


@dataclass
class CheckpointManagerOptions:
    """The options of a manager: which steps it saves and keeps, and the way that it does.

    Attributes:
        save_interval_steps: Saves steps that are a multiple of it, and the first step.
        max_to_keep: How many steps to keep: the latest, or with `best_fn` the best. None for all.
        keep_time_interval: Also keeps one step per such interval.
        keep_period: Also keeps steps that are a multiple of it.
        best_fn: Turns the metrics of a step into a number.
        best_mode: `max` if the greatest number is best, `min` if the least is.
        keep_checkpoints_without_metrics: Whether steps without metrics are kept in addition to the best.
        step_prefix: What precedes the number of a step, followed by an underscore.
        step_format_fixed_length: The number of digits, filled up with zeros.
        step_name_format: How steps are named, in place of the other two; see `penstock.orbax.step`.
        create: Whether to create the directory if it does not exist.
        cleanup_tmp_directories: Whether to remove what crashed saves left.
        save_on_steps: More steps to save.
        single_host_load_and_broadcast: Has no effect: every process lists the directory.
        todelete_subdir: A folder that deleted steps are moved to; by default they are removed. In a bucket
            they always are, which is logged.
        todelete_full_path: Not supported: nothing is moved in a bucket.
        enable_background_delete: Whether old steps are removed in the background.
        num_deletion_threads: Has no effect.
        read_only: Whether nothing is saved or deleted.
        enable_async_checkpointing: Whether `save` returns when the objects have been copied.
        async_options: How saves work in the background.
        multiprocessing_options: Which processes save.
        should_save_fn: Decides from a step and the latest one whether to save, in place of other options.
        file_options: The permissions of directories.
        atomicity_options: How a step becomes visible.
        save_root_metadata: Whether the manager's `metadata` is written.
        temporary_path_class: Says the same as `atomicity_options`, and is stronger; see `path.atomicity`.
        save_decision_policy: Decides which steps are saved, in place of the other options; also one of
            penstock's own, as `penstock.steps.EverySteps`.
        preservation_policy: Decides which steps stay, in place of the other options; also one of penstock's
            own, as `penstock.steps.KeepLast`.
        prevent_write_metrics: Whether metrics are used but not written.
        enable_should_save_is_saving_in_progress_check: If False, policies do not see that a save runs.
        enable_per_process_directory_creation: Has no effect; needs a `primary_host` of None.
        lightweight_initialize: Whether to skip reading time and metrics of existing steps.

    Raises:
        ValueError: If options contradict each other.
    """

    save_interval_steps: int = 1
    max_to_keep: int | None = None
    keep_time_interval: datetime.timedelta | None = None
    keep_period: int | None = None
    best_fn: Callable[[Any], float] | None = None
    best_mode: str = "max"
    keep_checkpoints_without_metrics: bool = True
    step_prefix: str | None = None
    step_format_fixed_length: int | None = None
    step_name_format: Any = None
    create: bool = True
    cleanup_tmp_directories: bool = False
    save_on_steps: Container[int] | None = None
    single_host_load_and_broadcast: bool = False
    todelete_subdir: str | None = None
    todelete_full_path: str | None = None
    enable_background_delete: bool = False
    num_deletion_threads: int | None = None
    read_only: bool = False
    enable_async_checkpointing: bool = True
    async_options: AsyncOptions | None = None
    multiprocessing_options: MultiprocessingOptions = field(default_factory=MultiprocessingOptions)
    should_save_fn: Callable[[int, int | None], bool] | None = None
    file_options: FileOptions = field(default_factory=FileOptions)
    atomicity_options: AtomicityOptions | None = None
    save_root_metadata: bool = True
    temporary_path_class: Any = None
    save_decision_policy: SaveDecisionPolicy | SavePolicy | None = None
    preservation_policy: PreservationPolicy | KeepPolicy | None = None
    prevent_write_metrics: bool = False
    enable_should_save_is_saving_in_progress_check: bool = True
    enable_per_process_directory_creation: bool = False
    lightweight_initialize: bool = False

    def __post_init__(self) -> None:
        broadcast = bool(getattr(self.step_name_format, "single_host_load_and_broadcast", False))
        if self.step_name_format is not None and broadcast != self.single_host_load_and_broadcast:
            raise ConfigError(
                "single_host_load_and_broadcast", "is not the same here and in step_name_format"
            )
        if self.best_mode not in ("min", "max"):
            raise ConfigError("best_mode", f"must be 'min' or 'max', not {self.best_mode!r}")
        if self.preservation_policy is None and self.max_to_keep is not None and self.max_to_keep < 0:
            raise ConfigError("max_to_keep", f"must be None or not negative, not {self.max_to_keep}")

        if self.read_only:
            for name, value in _WRITING.items():
                setattr(self, name, value)
        if self.todelete_subdir is not None and self.todelete_full_path is not None:
            raise ConfigError("todelete_full_path", "cannot be set together with todelete_subdir")
        if (
            self.enable_per_process_directory_creation
            and self.multiprocessing_options.primary_host is not None
        ):
            raise ConfigError("enable_per_process_directory_creation", "needs a primary_host of None")

        steps: Any = self.save_on_steps or ()
        self.save_on_steps = frozenset(steps)


def save_policy_of(options: CheckpointManagerOptions) -> SaveDecisionPolicy:
    """Return the policy that the options describe. A function takes the place of the other options."""
    if options.save_decision_policy is not None:
        return as_decision_policy(options.save_decision_policy)
    if options.should_save_fn is not None:
        return AnySavePolicy([ShouldSaveFnPolicy(options.should_save_fn), PreemptionCheckpointingPolicy()])

    interval = cast("int | None", options.save_interval_steps)
    policies: list[SaveDecisionPolicy] = [] if interval is None else [FixedIntervalPolicy(interval)]
    policies.append(SpecificStepsPolicy(cast("Container[int]", options.save_on_steps)))
    return AnySavePolicy([*policies, PreemptionCheckpointingPolicy(), InitialSavePolicy()])


def _preservation_policy(options: CheckpointManagerOptions) -> PreservationPolicy | KeepPolicy:
    """Return the policy that the options describe.

    Raises:
        ConfigError: If both a preservation policy and other options say what stays.
    """
    if options.preservation_policy is not None:
        if options.keep_time_interval or options.max_to_keep or options.keep_period:
            raise ConfigError("preservation_policy", "excludes the other options that say what stays")

        return options.preservation_policy

    policies: list[PreservationPolicy] = []
    if options.keep_period is not None:
        policies.append(EveryNSteps(options.keep_period))
    if options.keep_time_interval is not None:
        policies.append(EveryNSeconds(interval_secs=int(options.keep_time_interval.total_seconds())))
    if options.best_fn is None:
        policies.append(LatestN(options.max_to_keep))
    else:
        best = BestN(
            get_metric_fn=options.best_fn,
            reverse=options.best_mode == "min",
            n=options.max_to_keep,
            keep_checkpoints_without_metrics=options.keep_checkpoints_without_metrics,
        )
        policies.append(best)

    return AnyPreservationPolicy(policies)


_LONG_AGO: Final = datetime.datetime.min.replace(tzinfo=datetime.UTC)

_EPOCH: Final = datetime.datetime.fromtimestamp(0, datetime.UTC)


@dataclass(unsafe_hash=True)
class CheckpointInfo:
    """A step as policies see it. Two are equal whose step and time are.

    Attributes:
        step: Its number.
        time: When it was complete; for a step that was just saved, when its save began.
        metrics: None if it has none.
        path: Its directory, or the one it will have; None for a step that is only being considered.
        is_readable: False if its time or its metrics are damaged, its time is unknown, or there is nothing in
            it. Such a step stays, and is not counted.
    """

    step: int
    time: datetime.datetime
    metrics: Any = field(default=None, compare=False)
    path: Any = field(default=None, compare=False)
    is_readable: bool = field(default=True, compare=False, repr=False)

    def __post_init__(self) -> None:
        self.step = operator.index(self.step)

    def __str__(self) -> str:
        return f"Checkpoint[step={self.step} | time={self.time}]"


def new_info(step: int, metrics: Any = None) -> CheckpointInfo:
    """Return what policies see of a step that is about to be saved."""
    return CheckpointInfo(step, datetime.datetime.now(tz=datetime.UTC), metrics)


@final
@dataclass(frozen=True)
class StepChange:
    """A step that is being saved, and the steps that are deleted once it is durable."""

    step: int
    overwrites: bool  #: whether there is such a step already
    replaced: Mapping[int, str]  #: the names of those, by number
    base: int | None = None  #: the step that it may share files with


@final
class ManagerSteps:
    """The steps of one directory. For one thread.

    `OpenSteps` lists them, holds the directory and deletes, in the event loop of a thread that runs from here
    to `close`. Policies and handlers are called in the thread of the caller, as in Orbax.

    Args:
        directory: Of the steps.
        options: Those of the manager.
        metadata: The caller's own JSON values, kept with the directory. Existing ones stay.

    Raises:
        ValueError: If options contradict each other, or steps cannot be named as they say.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        options: CheckpointManagerOptions,
        metadata: Mapping[str, Any] | None = None,
    ) -> None:
        if options.todelete_full_path is not None:
            raise ConfigError("todelete_full_path", "is not supported: nothing is moved in a bucket")

        self.directory: Any = place_of(directory)
        self._path = path_text(self.directory)
        if bucket_url(self._path) is not None and options.file_options.path_permission_mode is not None:
            raise ConfigError("file_options", "a bucket has no directories, and so no permissions of them")

        self._deciding, self.preserving = save_policy_of(options), _preservation_policy(options)
        self._options = options
        self._store = store_at(self._path)
        self._reader = on_disk.StepReader(self._store)
        self._files = _Files(self.directory, self._store, self._reader, options)
        self._events = kernel.get_logger()
        self._said: set[str] = set()  # events of which one is enough
        self._shown: dict[int, tuple[StepInfo, CheckpointInfo]] = {}  # with what each was made from
        trash = None if bucket_url(self._path) is not None else options.todelete_subdir
        if trash != options.todelete_subdir:
            self.warn_once("step.trash_ignored", root=self._path, trash=options.todelete_subdir)

        self._unwritten = self._prepare(metadata)
        kept = metadata if options.save_root_metadata else None
        root = RootOptions(
            kept,
            trash=trash,
            writes=not options.read_only,
            clean=options.cleanup_tmp_directories,
            creates=options.create,
            is_shared=True,
            by_number=False,
        )
        make = partial(_open, self._path, self._files, root, options.multiprocessing_options)
        self._loop = blocking.LoopThread(make, name="penstock.orbax")
        self._steps = self._loop.call(_itself)
        self._job, self._catalogue = self._steps.root.job, self._steps.catalogue
        self.is_alone = self._job.announcements is None  #: whether there are no other processes
        self._leave_out_gone()

    def _prepare(self, metadata: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
        """Set the mode of a new directory; return metadata that are not to be written."""
        mode = self._options.file_options.path_permission_mode
        if self._options.create and mode is not None and self._store.kind(self._path) is None:
            self._store.make_directory(self._path)
            limit_permissions(self._path, mode)

        has_some = self._store.kind(os.path.join(self._path, "metadata")) is not None
        return metadata if self._options.read_only and not has_some else None

    @property
    def infos(self) -> list[CheckpointInfo]:
        """Every step that is known: those found by number, then those saved, with the one being saved.

        A step has one description until the directory is listed again: metrics that a program notes there
        count, as in Orbax.
        """
        self._shown = {info.step: (info, self._describe(info)) for info in self._known()}
        return [shown for _, shown in self._shown.values()]

    @property
    def steps(self) -> Sequence[int]:
        """The numbers of the known steps."""
        return self._catalogue.steps

    def reload(self) -> None:
        """List the directory again, in this process alone. Steps that are being deleted are left out."""
        leaving = self._steps.retention.deleter.waiting
        found = self._files.find()
        self._catalogue.replace({step: name for step, name in found.items() if step not in leaving})
        self._leave_out_gone()

    def leave_only(self, steps: Collection[int]) -> None:
        """Count no other steps than these, until the directory is listed again."""
        others = [step for step in self.steps if step not in steps]
        if others:
            self._catalogue.remove(others)

    def exists(self, step: int) -> bool:
        """Return whether a step is there now."""
        return step in self._files.find()

    def _leave_out_gone(self) -> None:
        _ = self.infos  # a step may be deleted after it was listed and before it is read
        self._catalogue.remove(list(self._files.gone))

    def should_save(
        self,
        step: int,
        infos: Sequence[CheckpointInfo],
        *,
        is_saving: bool,
        reached_preemption: Callable[[int], bool] = reached_preemption,
    ) -> bool:
        """Return whether a step is newer than all others, and the policy asks for it."""
        if infos and infos[-1].step >= step:
            return False

        context = DecisionContext(
            is_saving_in_progress=is_saving,
            reached_preemption=reached_preemption(step),
            multiprocessing_options=self._options.multiprocessing_options,
        )
        return self._deciding.should_save(new_info(step), list(infos), context=context)

    def is_wanted(self, step: int, says: Callable[[int], bool]) -> bool:
        """Return whether a step is saved, the same in all processes.

        Args:
            step: Its number.
            says: Asks the policy. In all processes, since jax has them ask together whether the job ends.

        Raises:
            Exception: What the policy raises in the process that decides; in the others, as `agree_on`.
        """
        if self._options.read_only:
            return False

        own = _called(says, step)
        # One that says the same everywhere costs no call: most steps are not saved.
        return own() if is_same_everywhere(self._deciding) else self.agree_on(f"save {step}", own)

    def agree_on(self, name: str, decide: Callable[[], T]) -> T:
        """Return what `decide()` returns in the process that decides.

        Args:
            name: What it is about; the same in all processes.
            decide: Called in that process alone, in this thread; returns what JSON can hold.

        Raises:
            Exception: What `decide` raises; in the others, a `PeerFailedError` that names it.
            PeerSilentError: If process 0 does not say.
        """
        if self.is_alone:
            return decide()  # without a hop to the loop

        # In this thread, as a caller's policy expects; the others never call theirs.
        own = _called(decide) if self._job.coordinator.is_primary else decide

        async def decided() -> T:
            return own()

        found: T = self._loop.call(_call, self._job.decide, name, decided)
        return found

    @contextmanager
    def adding(
        self, step: int, metrics: Any, choose: Callable[[], list[int]], times: SaveTimes
    ) -> Generator[tuple[StepChange, Exception | None]]:
        """Count a step that is saved inside, and no more those that are deleted once it is durable.

        They are chosen before that step is saved: if the deciding process cannot say, the others do not wait.
        If the block raises, all is as it was.

        Args:
            step: Its number.
            metrics: Those of it.
            choose: Chooses them, of all steps with the new one: `to_delete`, or what a subclass has for it.
            times: Where it is noted how long that takes.

        Yields:
            The change, for `complete` or `undo`, and what `choose` raised: then none is deleted.

        Raises:
            ValueError: If a metric by which a policy of penstock's ranks is misspelt.
        """
        missing = check_metrics(self.preserving, metrics, self._known())
        if missing:
            self.warn_once("step.metric_missing", metrics=missing)

        overwrites, base = step in self._catalogue, self._catalogue.latest
        begun_s = (new_info(step).time - _EPOCH).total_seconds()
        doomed: list[int] = []
        failure: Exception | None = None
        with times.part("get_old_steps"):
            self._catalogue.add(step, self._files.name(step), StepInfo(step, begun_s, metrics))
            try:
                doomed = self.agree_on(f"delete after {step}", lambda: list(map(int, choose())))
            except Exception as error:
                failure = error

        change = StepChange(step, overwrites, self._catalogue.remove(doomed), base)
        try:
            yield change, failure
        except BaseException:
            self.undo(change)
            raise
        finally:
            del failure  # its traceback refers to this frame

    def to_delete(self) -> list[int]:
        """Return the steps that the policy does not keep."""
        shown = {one.step: one for one in self.infos}
        known = [replace(info, metrics=shown[info.step].metrics) for info in self._known()]
        return to_delete(self.preserving, known, lambda info: shown[info.step])

    def _known(self) -> list[StepInfo]:
        return self._catalogue.infos(self._catalogue.snapshot(), _EVERYTHING)

    def hold(self, step: int) -> None:
        """Hold the directory while a step is saved, and make sure that no deletion of that step comes later.

        Another manager that saves there is logged once, as Orbax allows one.

        Raises:
            ClaimLostError: In a bucket, if another manager took the hold over since the last save.
        """
        self._steps.root.hold_now()  # here: a trip to the loop takes the caller longer
        self._forget(step)

    def _forget(self, step: int) -> None:
        if step in self._steps.retention.deleter.waiting:
            self._loop.call(_forget, step)

    def undo(self, change: StepChange) -> None:
        """Drop a step whose save failed, and count the steps again that it would have replaced."""
        if change.overwrites:
            self._catalogue.add(change.step, self._files.name(change.step))
        else:
            self._catalogue.remove([change.step])
        for step, name in change.replaced.items():
            self._catalogue.add(step, name)

        self._catalogue.sort()
        self._steps.root.rest()

    def complete(self, change: StepChange) -> None:
        """Delete the steps that a durable step replaces; return when all processes know that it is done.

        In the background if the options say so. What is being read here is deleted later.
        """
        waits = not self._options.enable_background_delete
        delete = partial(self._loop.call, _delete, change.replaced, waits)
        try:
            if change.replaced:
                self.agree_on(f"deleted after {change.step}", delete)
        finally:
            self._steps.root.rest()

    def delete(self, step: int) -> None:
        """Delete a step, or move it away, in the process that deletes. It is gone when this returns.

        Raises:
            StorageError: If that failed, for instance because it is read on this machine.
            RootInUseError: If another manager saves there. Two of them may save, and only one deletes.
        """
        name = os.path.relpath(path_text(self.path(step)), self._path)
        self._loop.call(_call, self._steps.retention.deleter.delete, step, name)

    def forget(self, step: int) -> None:
        """Count a step no more that was deleted."""
        self._catalogue.remove([step])

    def close(self) -> None:
        """Try the deletions that are due once more, and let others write to the directory."""
        self._loop.close()

    def new_path(self, step: int, directory: Any = None) -> Any:
        """Return the path that a new step is saved to, here or in another directory."""
        return (self.directory if directory is None else place_of(directory)) / self._files.name(step)

    def path(self, step: int, directory: Any = None) -> Any:
        """Return the path of a step, here or in another directory.

        Raises:
            ValueError: If the step does not exist and a format of names was given.
        """
        return self._files.path(step, self.directory if directory is None else place_of(directory))

    def has_item(self, path: Any, name: str) -> bool:
        """Return whether a step has an item."""
        return self._store.kind(path_text(path / name)) is not None

    def check_content(self, path: Any) -> None:
        """Refuse an empty step.

        Raises:
            NotACheckpointError: If there is nothing. Deleting the step makes room for it.
        """
        if is_empty(self._store, path_text(path)):
            raise NotACheckpointError(path_text(path), "is empty; delete this step to save it")

    @contextmanager
    def reading(self, path: Any) -> Generator[None]:
        """Hold a step, so that no penstock on this machine deletes it meanwhile."""
        try:
            held = self._store.hold_reading(path_text(path))
        except StorageError:  # it is being deleted or does not exist: reading it says so
            yield
            return

        try:
            yield
        finally:
            held.release()

    @contextmanager
    def saving(self, step: int, base: int | None) -> Generator[Any]:
        """Let the step that is saved inside share files with another step, which is held meanwhile.

        Of several processes the one holds it that deletes steps: it might do so once all have written, while
        another one still comes back from here.
        """
        later = self.is_alone and bucket_url(self._path) is None  # no earlier than needed: it takes a while
        if later:
            self._forget(step)
        else:
            self.hold(step)

        path = self.new_path(step)
        before = None if base is None else path_text(self.new_path(base))
        hold = self._steps.root.hold_now if later else lambda: None
        links = StepLinks(path_text(path), before, hold)
        with self.reading((self._steps.root.holds and before) or path), links.in_force():
            yield path

    def latest_in(self, directory: Any) -> int | None:
        """Return the latest step in another directory."""
        return max((found.step for found in self._files.names.find_all(directory)), default=None)

    def metrics(self, step: int) -> Any:
        """Return the metrics of a step; None if it has none."""
        return self._reader.metrics(path_text(self.path(step)))

    def metadata(self) -> RootMetadata:
        """Return the metadata of the directory."""
        found = self._unwritten or on_disk.read_root_metadata(self._store, self._path)
        return RootMetadata(custom_metadata=dict(found or {}))

    def warn_once(self, event: str, **about: Any) -> None:
        """Log an event, unless it was logged before."""
        if event not in self._said:
            self._said.add(event)
            self._events.warning(event, **about)

    def _describe(self, info: StepInfo) -> CheckpointInfo:
        described, shown = self._shown.get(info.step, (None, None))
        if described is info and shown is not None:
            return shown

        is_known = info.is_readable and not math.isnan(info.time_s)
        moment = _EPOCH + datetime.timedelta(seconds=info.time_s) if is_known else _LONG_AGO
        path = self._files.known_path(info.step, self._catalogue.name(info.step))
        return CheckpointInfo(info.step, moment, info.metrics, path, info.is_readable)


_EVERYTHING: Final[Any] = frozenset({"time", "metrics"})


@final
class _Files(StepFiles):
    """Finds steps by a format of Orbax's kind, and reads what policies see of them.

    Attributes:
        names: The format.
        gone: Steps that were deleted after they had been listed.
    """

    def __init__(
        self,
        directory: Any,
        store: kernel.Store,
        reader: on_disk.StepReader,
        options: CheckpointManagerOptions,
    ) -> None:
        self._directory = directory
        self._path = path_text(directory)
        self._store = store
        self._reader = reader
        self._is_light = options.lightweight_initialize
        self._is_given = options.step_name_format is not None
        self.names = (
            as_name_format(options.step_name_format)
            if self._is_given
            else standard_name_format(
                step_prefix=options.step_prefix,
                step_format_fixed_length=options.step_format_fixed_length,
                single_host_load_and_broadcast=options.single_host_load_and_broadcast,
                atomicity_options=options.atomicity_options,
            )
        )
        self._found: dict[str, Any] = {}  # what the format found, by name
        self.gone: set[int] = set()

    def name(self, step: int, /) -> str:
        return self.names.build_name(step)

    def path(self, step: int, base: Any) -> Any:
        """Return the path of a step; with the standard format, whether there is such a step or not."""
        return self.names.find_step(base, step).path if self._is_given else base / self.name(step)

    def known_path(self, step: int, name: str) -> Any:
        """Return the path under which a step was found."""
        found = self._found.get(name)
        return self._directory / name if found is None else found.path

    def find(self, listed: Sequence[str] | None = None, /) -> Mapping[int, str]:
        """Every step; an empty directory that is named like a step is one, as in Orbax."""
        self._found, self.gone = {}, set()
        if self._store.kind(self._path) is None:
            return {}

        found = sorted(self.names.find_all(self._directory), key=lambda one: one.step)
        self._found = {os.path.relpath(path_text(one.path), self._path): one for one in found}
        return {one.step: name for name, one in self._found.items()}

    def leftovers(self, listed: Sequence[str], /) -> Sequence[str]:
        return [name for name in listed if file_names.TEMPORARY_SUFFIX in name]

    def info(self, step: int, name: str, needs: Any, /) -> StepInfo:
        """Return what policies see of a step.

        A damaged one is listed, too: one bit must not hide the others from a run that resumes.
        """
        if self._is_light:
            return StepInfo(step)

        try:
            # In a process that got the steps from another one, nothing was listed.
            found = self._found.get(name) or self.names.find_step(self._directory, step)
            path = path_text(found.path)
            if bucket_url(path) is not None:
                return self._reader.info(path, step, needs)

            moment, metrics = found.commit_timestamp, self._reader.metrics(path)
            is_readable = moment is not None and on_disk.step_at(self._store, path).state == "finished"
            return StepInfo(step, moment.timestamp() if moment else math.nan, metrics, is_readable)
        except (OSError, ValueError):
            if self._store.kind(os.path.join(self._path, name)) is not None:
                raise

            self.gone.add(step)
            return StepInfo(step, is_readable=False)


@asynccontextmanager
async def _open(
    path: str,
    files: StepFiles,
    options: RootOptions,
    processes: MultiprocessingOptions,
) -> AsyncGenerator[OpenSteps]:
    """Open the steps, for this process alone or for all that save together."""
    alone = len(saving_processes(processes)) == 1 or not options.writes
    by = Checkpointer(
        coordinator=kernel.SingleProcessCoordinator() if alone else None,
        job=None if alone else job_options(processes),
    )
    async with by as checkpointer:
        engine = checkpointer.engine.at(paths.path_or_url(path))
        steps = OpenSteps(engine, path, files, options)
        async with steps.live():
            yield steps


def _called(function: Callable[..., T], *args: Any) -> Callable[[], T]:
    """Call a function in this thread; return what gives its result, or raises its error, in any."""
    future: failures.FailureFuture[T] = failures.FailureFuture()
    try:
        future.set_result(function(*args))
    except Exception as error:
        future.set_exception(failures.without_frame(error))

    return future.result


async def _itself(steps: OpenSteps) -> OpenSteps:
    return steps


async def _call(steps: OpenSteps, method: Callable[..., Awaitable[T]], *args: Any) -> T:
    """Call a method of the steps, or of a part of them, in the loop."""
    return await method(*args)


async def _forget(steps: OpenSteps, step: int) -> None:
    await steps.retention.forget(step)


async def _delete(steps: OpenSteps, names: Mapping[int, str], waits: bool) -> None:
    steps.retention.deleter.ask(names)
    if waits:
        await steps.retention.deleter.attempt()

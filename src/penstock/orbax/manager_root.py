"""The directory that a manager keeps its steps in, and what the managers of a job decide. Blocking."""

from __future__ import annotations

__all__ = ("CheckpointInfo", "JobDecisions", "Root", "divided", "new_info")

import datetime
import errno
import json
import operator
import os
from collections.abc import AsyncGenerator, Callable, Generator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, TypeVar, cast, final

from anyio import create_task_group

from penstock import Checkpointer
from penstock.embedding import (
    Announcements,
    Leases,
    Leftovers,
    LoopThread,
    WriterHold,
    delete_step,
    deletion,
    file_names,
    follows_from_step,
    get_logger,
    is_checkpoint,
    kernel,
    paths,
    renewing_leases,
    start_thread,
)
from penstock.embedding import step_directory as on_disk
from penstock.errors import (
    ConfigError,
    CorruptCheckpointError,
    InUseError,
    NotACheckpointError,
    PeerFailedError,
    RootInUseError,
    StorageError,
)
from penstock.orbax.item_files import bucket_url, path_text, place_of, store_at
from penstock.orbax.joint_saves import active_processes, is_joint, job_options
from penstock.orbax.manager_options import CheckpointManagerOptions, own_policy_of
from penstock.orbax.multihost import process_index
from penstock.orbax.options import MultiprocessingOptions
from penstock.orbax.preservation_policy import PreservationContext, PreservationPolicy
from penstock.orbax.save_decision_policy import (
    AnySavePolicy,
    FixedIntervalPolicy,
    InitialSavePolicy,
    PreemptionCheckpointingPolicy,
    SaveDecisionPolicy,
    SpecificStepsPolicy,
)
from penstock.orbax.step import as_name_format, is_empty, standard_name_format
from penstock.orbax.step_links import StepLinks
from penstock.orbax.step_metadata import RootMetadata

_IN_USE: Final = "step.root_in_use"

_LONG_AGO: Final = datetime.datetime.min.replace(tzinfo=datetime.UTC)


@dataclass
class CheckpointInfo:
    """A step as policies see it.

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
    metrics: Any = None
    path: Any = None
    is_readable: bool = field(default=True, repr=False)

    def __post_init__(self) -> None:
        self.step = operator.index(self.step)


def new_info(step: int, metrics: Any = None) -> CheckpointInfo:
    """Return what policies see of a step that is about to be saved."""
    return CheckpointInfo(step, datetime.datetime.now(tz=datetime.UTC), metrics)


def divided(
    policy: PreservationPolicy, infos: Sequence[CheckpointInfo]
) -> tuple[list[CheckpointInfo], list[CheckpointInfo]]:
    """Return the steps that stay, and those that go.

    One that could not be read stays, and the policy is not shown it: damage must not delete it.
    """
    known = [info for info in infos if info.is_readable]
    stay = policy.should_preserve(known, context=PreservationContext())
    gone = [info for info, stays in zip(known, stay, strict=True) if not stays]
    steps = {info.step for info in gone}
    return [info for info in infos if info.step not in steps], gone


@final
class Root:
    """Lists the steps of a directory, reads what is kept with them, and deletes them.

    Args:
        directory: The directory of the steps.
        options: Those of the manager.
        is_primary: Whether this process writes and deletes, beside the steps; of several one does.

    Raises:
        ValueError: If steps cannot be named as the options say.
    """

    def __init__(
        self, directory: str | os.PathLike[str], options: CheckpointManagerOptions, *, is_primary: bool
    ) -> None:
        if options.todelete_full_path is not None:
            raise ConfigError("todelete_full_path", "is not supported: nothing is moved in a bucket")

        self.directory: Any = place_of(directory)
        self._path = path_text(self.directory)
        _check_place(self._path, options)
        self._options = options
        self._is_primary = is_primary
        self._store = store_at(self._path)
        self._reader = on_disk.StepReader(self._store)
        self._given = options.step_name_format is not None
        self._names = as_name_format(options.step_name_format) if self._given else _standard(options)
        self._unwritten: Mapping[str, Any] | None = None
        self._deletions: dict[Future[None], Sequence[int]] = {}
        self._left: set[int] = set()
        self._events = get_logger()
        self._writing = WriterHold(self._store, self._path)
        self._renewal: LoopThread[None] | None = None
        self._said: set[str] = set()  # events of which one is enough
        self._trash = None if bucket_url(self._path) is not None else options.todelete_subdir
        if self._trash != options.todelete_subdir:
            self.warn_once("step.trash_ignored", root=self._path, trash=options.todelete_subdir)

    def prepare(self, metadata: Mapping[str, Any] | None) -> None:
        """Create the directory and write its metadata, as the options say.

        Orbax opens a checkpoint as an empty directory of steps, and so does this. That is logged: a run that
        resumes from it would start over.
        """
        options = self._options
        if is_checkpoint(self._store, self._path):
            self.warn_once("step.root_is_checkpoint", root=self._path)
        if options.create and self._store.kind(self._path) is None:
            self._store.make_directory(self._path)  # which does nothing in a bucket
            if options.file_options.path_permission_mode is not None:
                os.chmod(self._path, options.file_options.path_permission_mode)
        if options.cleanup_tmp_directories and self._is_primary:
            self._clean_up()
        if options.read_only:
            folder = os.path.join(self._path, "metadata")
            self._unwritten = metadata if self._store.kind(folder) is None else None
        elif self._is_primary and metadata is not None and options.save_root_metadata:
            on_disk.write_root_metadata(self._store, self._path, metadata)

    def infos(self) -> list[CheckpointInfo]:
        """Return every durable step, ascending, with what policies see.

        An empty directory that is named like a step is one, as in Orbax.
        """
        if self._store.kind(self._path) is None:
            return []

        found = (self._info(one) for one in self._names.find_all(self.directory))
        return sorted((info for info in found if info is not None), key=lambda info: info.step)

    def new_path(self, step: int) -> Any:
        """Return the path that a new step is saved to."""
        return self.directory / self._names.build_name(step)

    def path(self, step: int, directory: Any = None) -> Any:
        """Return the path of a step, here or in another directory.

        Raises:
            ValueError: If the step does not exist and a format of names was given.
        """
        base = self.directory if directory is None else place_of(directory)
        return self._names.find_step(base, step).path if self._given else base / self._names.build_name(step)

    def has_item(self, path: Any, name: str) -> bool:
        """Return whether a step has an item."""
        return self._store.kind(path_text(path / name)) is not None

    def check_content(self, path: Any) -> None:
        """Refuse a step in which there is nothing.

        Raises:
            NotACheckpointError: If there is nothing. Deleting the step makes room for it.
        """
        if is_empty(self._store, path_text(path)):
            raise NotACheckpointError(path_text(path), "is empty; delete this step to save it")

    @contextmanager
    def reading(self, path: Any) -> Generator[None]:
        """Hold a step, so that no penstock on this machine deletes it meanwhile."""
        if not isinstance(self._store, kernel.ReadHolds):  # as a bucket: a reader there gets an error
            yield
            return

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

        Of several processes the primary holds it, which deletes steps: it might do so once all have written,
        while another one still comes back from here.
        """
        self.begin_writing()
        path = self.new_path(step)
        before = None if base is None else path_text(self.new_path(base))
        links = StepLinks(path_text(path), before)
        with self.reading((self._is_primary and before) or path), links.in_force():
            yield path

    def latest_in(self, directory: Any) -> int | None:
        """Return the latest step in another directory."""
        return max((found.step for found in self._names.find_all(directory)), default=None)

    def metrics(self, step: int) -> Any:
        """Return the metrics of a step; None if it has none."""
        return self._reader.metrics(path_text(self.path(step)))

    def metadata(self) -> RootMetadata:
        """Return the metadata of the directory."""
        found = self._unwritten or on_disk.read_root_metadata(self._store, self._path)
        return RootMetadata(custom_metadata=dict(found or {}))

    def delete(self, step: int) -> None:
        """Delete a step, or move it away. It is gone when this returns.

        Raises:
            StorageError: If that failed, for instance because it is read on this machine.
            RootInUseError: If another manager saves there. Two of them may save, and only one deletes.
        """
        self._writing.take()
        path = path_text(self.path(step))
        left = delete_step(self._store, os.path.dirname(path), os.path.basename(path), self._trash)
        if left is not None:  # it is no step any more
            self._events.warning("step.left_behind", path=left.path, error=repr(left))

    def delete_all(self, steps: Sequence[int]) -> None:
        """Delete steps, in the background if the options say so, and retry those that were being read before.

        Steps that could not be deleted are logged. Only the primary of several processes deletes.
        """
        if not self._is_primary:
            return
        if not self._options.enable_background_delete:
            self._delete_all(steps)
            return

        # Not a daemon: the steps are deleted even if the program ends without waiting.
        for done in [one for one in self._deletions if one.done()]:
            del self._deletions[done]

        self._deletions[start_thread(self._delete_all, steps, name="penstock.orbax.delete")] = steps

    def forget(self, step: int) -> None:
        """Make sure that a step that is about to be saved again is not deleted later."""
        wait([deletion for deletion, steps in self._deletions.items() if step in steps])
        self._left.discard(step)

    def close(self) -> None:
        """Wait for deletions, then retry the steps that were being read."""
        wait(tuple(self._deletions))
        self._delete_all(())
        self._writing.release()
        if self._renewal is not None:
            self._renewal.close()
            self._renewal = None

    def warn_once(self, event: str, **about: Any) -> None:
        """Log an event, unless it was logged before."""
        if event not in self._said:
            self._said.add(event)
            self._events.warning(event, **about)

    def begin_writing(self) -> None:
        """Hold the directory from the first save on. Log once that another manager saves, as Orbax allows.

        Raises:
            ClaimLostError: In a bucket, if another manager took the hold over since the last save.
        """
        if not self._is_primary:
            return

        try:
            self._writing.take_if_writable()
        except RootInUseError as error:
            self.warn_once(_IN_USE, root=self._path, more=error.more)
            return

        self._writing.confirm()
        if self._renewal is None and isinstance(self._store, Leases):
            renewing = partial(_renewing, self._store)
            self._renewal = LoopThread(renewing, name="penstock.orbax.leases").__enter__()

    def _delete_all(self, steps: Sequence[int]) -> None:
        for step in (*self._left, *steps):
            self._left.discard(step)
            try:
                self.delete(step)
            except (OSError, ValueError) as error:
                is_busy = isinstance(error, OSError) and error.errno == errno.EBUSY
                if is_busy or isinstance(error, RootInUseError):
                    self._left.add(step)

                self._events.warning("step.not_deleted", step=step, error=repr(error))

    def _info(self, found: Any) -> CheckpointInfo | None:
        """Return what policies see of a step that was listed; None if it has been deleted since.

        A damaged step is listed, too: one bit must not hide the others from a run that resumes.
        """
        if self._options.lightweight_initialize:
            return CheckpointInfo(found.step, _LONG_AGO, path=found.path)

        path = path_text(found.path)
        try:
            if bucket_url(path) is not None:
                return self._info_in_bucket(found, path)

            time, metrics = found.commit_timestamp, self._reader.metrics(path)
            is_readable = time is not None and on_disk.holds_checkpoint(self._store, path)
            return CheckpointInfo(found.step, time or _LONG_AGO, metrics, found.path, is_readable)
        except (FileNotFoundError, StorageError, CorruptCheckpointError) as error:
            if self._store.kind(path) is None:
                return None
            if not isinstance(error, CorruptCheckpointError):
                raise

            self._events.warning("step.unreadable", path=path, error=repr(error))
            return CheckpointInfo(found.step, _LONG_AGO, path=found.path, is_readable=False)

    def _info_in_bucket(self, found: Any, path: str) -> CheckpointInfo:
        about = self._reader.info(path, found.step, frozenset({"time", "metrics"}))
        time = datetime.datetime.fromtimestamp(about.time_s, datetime.UTC) if about.is_readable else _LONG_AGO
        return CheckpointInfo(found.step, time, about.metrics, found.path, about.is_readable)

    def _clean_up(self) -> None:
        if isinstance(self._store, Leftovers):
            self._store.collect(self._path)
            return

        for name in self._store.list_directory(self._path):
            if file_names.TEMPORARY_SUFFIX not in name:
                continue

            path = os.path.join(self._path, name)
            try:
                deletion.remove_abandoned(self._store, path)
            except InUseError:
                continue  # a live save holds what it builds
            except StorageError as error:
                self._events.warning("step.left_behind", path=path, error=repr(error))


@asynccontextmanager
async def _renewing(store: Leases) -> AsyncGenerator[None]:
    """Renew the hold of a manager, of which no call is under way between saves."""
    async with create_task_group() as tasks:
        with renewing_leases(tasks, lambda: [store], store.lease_s):
            yield


def _check_place(path: str, options: CheckpointManagerOptions) -> None:
    """Refuse options that a bucket cannot follow.

    Raises:
        ConfigError: If there is one. It is a ValueError.
    """
    if bucket_url(path) is None:
        return
    if options.file_options.path_permission_mode is not None:
        raise ConfigError("file_options", "a bucket has no directories, and so no permissions of them")


def _standard(options: CheckpointManagerOptions) -> Any:
    return standard_name_format(
        step_prefix=options.step_prefix,
        step_format_fixed_length=options.step_format_fixed_length,
        single_host_load_and_broadcast=options.single_host_load_and_broadcast,
        atomicity_options=options.atomicity_options,
    )


T = TypeVar("T")

_ALIKE = (FixedIntervalPolicy, SpecificStepsPolicy, InitialSavePolicy, PreemptionCheckpointingPolicy)


@final
class JobDecisions:
    """Has process 0 decide, and the others do as it says. All ask in the same order. Blocking.

    It owns an event loop in a thread, from the first decision until `close`. A process that works alone
    decides for itself, and has no such loop.

    Args:
        directory: Of the steps.
        options: Those of the manager. One that only reads decides nothing.
    """

    def __init__(self, directory: Any, options: CheckpointManagerOptions) -> None:
        processes = options.multiprocessing_options
        jointly = is_joint(processes) and not options.read_only
        self._primary = active_processes(processes)[0]
        make = partial(_announcements, paths.path_or_url(directory), processes)
        self._loop = LoopThread(make, name="penstock.orbax") if jointly else None
        self.is_alone = self._loop is None  #: whether there are no others
        self.is_primary = self.is_alone or process_index() == self._primary  #: whether this one decides

    def decided(self, name: str, decide: Callable[[], T]) -> T:
        """Return what `decide()` returns in the process that decides.

        Args:
            name: What it is about; the same in all processes.
            decide: Called in that process alone; returns what JSON can hold.

        Raises:
            Exception: What `decide` raises; in the others, a `PeerFailedError` that tells it.
            PeerSilentError: If process 0 does not say.
        """
        if self._loop is None:
            return decide()
        if not self.is_primary:
            found, problem = json.loads(self._loop.call(_hear, name))
            if problem is not None:
                raise PeerFailedError(self._primary, None, None, problem)

            return cast("T", found)

        try:
            own = decide()
        except Exception as error:
            self._tell_failure(name, error)
            raise

        self._loop.call(_tell, name, json.dumps([own, None]))
        return own

    def wanted(self, step: int, policy: SaveDecisionPolicy, says: Callable[[int], bool]) -> bool:
        """Return whether a step is saved.

        Args:
            step: Its number.
            policy: One that says the same everywhere is not asked about: most steps are not saved, and cost
                no call.
            says: Asks it. In all processes, since jax has them ask together whether the job is to end.

        Raises:
            Exception: What the policy raises in the process that decides; in the others, as `decided`.
        """
        own, is_alike = False, _says_alike(policy)
        try:
            own = says(step)
        except Exception as error:
            if not is_alike and self.is_primary:
                self._tell_failure(f"save {step}", error)
            if is_alike or self.is_primary:
                raise

        return own if is_alike else self.decided(f"save {step}", lambda: own)

    def opened(self, root: Root, metadata: Mapping[str, Any] | None) -> list[CheckpointInfo]:
        """Prepare a directory; return its steps, in all processes those that the deciding one found."""
        root.prepare(metadata)
        found = root.infos() if self.is_primary else []
        steps = self.decided("open", lambda: [info.step for info in found])
        return found if self.is_primary else [info for info in root.infos() if info.step in steps]

    def doomed(
        self, policy: PreservationPolicy, step: int, infos: Sequence[CheckpointInfo]
    ) -> tuple[list[int], Exception | None]:
        """Return which steps are to be deleted once a new one is durable; or none, and what a policy raises.

        Called before that step is saved: if the deciding process cannot say, the others do not wait for it.

        Args:
            policy: Which steps stay.
            step: The number of the new one.
            infos: All steps, with the new one.
        """

        def decide() -> list[int]:
            return [info.step for info in divided(policy, infos)[1]]

        try:
            return self.decided(f"delete after {step}", decide), None
        except Exception as error:
            return [], error

    def delete_after(self, step: int, root: Root, doomed: Sequence[int]) -> None:
        """Delete steps now that a new one is durable; return in all processes when that is done."""
        if doomed:
            self.decided(f"deleted after {step}", partial(root.delete_all, doomed))
        else:  # only those that were being read before
            root.delete_all(())

    def _tell_failure(self, name: str, error: Exception) -> None:
        if self._loop is not None:
            self._loop.call(_tell, name, json.dumps([None, f"{type(error).__name__}: {error}"]))

    def close(self) -> None:
        """End the thread."""
        if self._loop is not None:
            self._loop.close()


def _says_alike(policy: SaveDecisionPolicy) -> bool:
    """Return whether a policy decides by the steps alone, or by what jax says in all processes alike."""
    if type(policy) is AnySavePolicy:
        return all(map(_says_alike, policy.policies))

    own = own_policy_of(policy)
    return type(policy) in _ALIKE if own is None else follows_from_step(own)


@asynccontextmanager
async def _announcements(root: str, processes: MultiprocessingOptions) -> AsyncGenerator[Announcements]:
    async with Checkpointer(job=job_options(processes)) as checkpointer:
        announcements = checkpointer.engine.coordinator.announcements(f"the steps of {root}")
        assert announcements is not None, "there are other processes"
        try:
            yield announcements
        finally:
            await announcements.leave()


async def _tell(announcements: Announcements, name: str, value: str) -> None:
    await announcements.tell(name, value)


async def _hear(announcements: Announcements, name: str) -> str:
    return await announcements.hear(name)

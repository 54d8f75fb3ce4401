"""Checkpointers: they save through a handler, so that a checkpoint exists as a whole or not at all.

A handler writes into a directory that this publishes (`DirectoryBuild`). Several processes fill one together
(`JointSave`). Handlers of trees save whole checkpoints of a job, and all handlers that can do so to a bucket.
"""

from __future__ import annotations

__all__ = (
    "AbstractCheckpointer",
    "AsyncCheckpointer",
    "Checkpointer",
    "PyTreeCheckpointer",
    "StandardCheckpointer",
)

import abc
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError
from concurrent.futures import Future as ThreadFuture
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeAlias, TypeVar, cast, final

import jax

from penstock import Checkpointer as NativeCheckpointer
from penstock import JobOptions
from penstock import handlers as built_in
from penstock.embedding import (
    DirectoryBuild,
    JointBuild,
    SharedDirectory,
    blocking,
    failures,
    file_names,
    paths,
)
from penstock.errors import (
    ConfigError,
    IncompleteCheckpointError,
    NotACheckpointError,
    NoThreadError,
    PathError,
    SpecError,
)
from penstock.orbax.checkpoint_args import (
    AsyncCheckpointHandler,
    CheckpointHandler,
    construct_checkpoint_args,
    has_registered_args,
    is_durable,
    saves_together,
)
from penstock.orbax.composite_handler import CompositeCheckpointHandler, needs_event_loop
from penstock.orbax.enclosing_save import (
    JointDirectory,
    StepLinks,
    described_json,
    described_message,
    joint_place,
    links_in_force,
)
from penstock.orbax.future import ChainedFuture, Future, all_futures, cancel_all, remaining_secs, stopped
from penstock.orbax.installation import WarnsOfOverrides, stand_for
from penstock.orbax.item_files import bucket_url, handler_path, path_as_given, path_text
from penstock.orbax.logging import READ, WRITE, WRITE_ASYNC, record_async_save, recorded, timed
from penstock.orbax.metadata import (
    Composite,
    MetadataStore,
    StepMetadata,
    decode_step_metadata,
    encode_step_metadata,
    step_metadata_file_path,
)
from penstock.orbax.multihost import is_primary_host
from penstock.orbax.options import (
    AsyncOptions,
    AtomicityMode,
    AtomicityOptions,
    FileOptions,
    MultiprocessingOptions,
    check_processes,
    chosen_atomicity,
    is_in_place,
    job_options,
    saves_jointly,
    saving_processes,
)
from penstock.orbax.plain_handlers import JsonSaveArgs, ProtoSaveArgs, get_legacy_handler_wrapper
from penstock.orbax.pytree_handler import PyTreeCheckpointHandler
from penstock.orbax.standard_handler import StandardCheckpointHandler, StandardRestoreArgs, StandardSaveArgs

T = TypeVar("T")

_jax: Any = jax


@dataclass(frozen=True, kw_only=True)
class SaveContext:
    """Times that a manager measured before a save. Kept for Orbax's metrics; penstock has its own."""

    checkpoint_start_time: float
    start_sync_duration_secs: float = 0.0
    wait_prev_duration_secs: float = 0.0


class AbstractCheckpointer(abc.ABC):
    """Saves and restores one object, atomically."""

    @abc.abstractmethod
    def save(self, directory: Any, *args: Any, **kwargs: Any) -> Any:
        """Save an object to a directory that does not exist yet."""

    @abc.abstractmethod
    def restore(self, directory: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the object saved in a directory."""

    def metadata(self, directory: Any) -> Any | None:
        """Describe what is saved in a directory."""
        return None

    def close(self) -> None:  # noqa: B027  # not every checkpointer holds something
        """Release what is held."""


Building: TypeAlias = DirectoryBuild | SharedDirectory


@failures.short_tracebacks
class Checkpointer(WarnsOfOverrides, AbstractCheckpointer):
    """Saves and restores through a handler. A context manager that also works inside a running event loop.

    The handler writes into a temporary directory. When everything is written, the directory gets its own
    name, durably and in one step. If anything fails, it is removed.

    Args:
        handler: Saves and restores the object.
        multiprocessing_options: Which processes save.
        file_options: The permissions of directories.
        atomicity_options: How the checkpoint becomes visible.
        checkpoint_metadata_store: Writes the metadata of the checkpoint; its writes must block.
        temporary_path_class: Says the same as `atomicity_options`, and is stronger; see `path.atomicity`.

    Raises:
        ValueError: If writes of the metadata store do not block.
        ConfigError: If the `temporary_path_class` publishes by itself.
    """

    def __init__(
        self,
        handler: CheckpointHandler,
        *,
        multiprocessing_options: MultiprocessingOptions = MultiprocessingOptions(),
        file_options: FileOptions = FileOptions(),
        atomicity_options: AtomicityOptions | None = None,
        checkpoint_metadata_store: Any = None,
        temporary_path_class: type[Any] | None = None,
    ) -> None:
        self._handler: Any = handler if has_registered_args(handler) else get_legacy_handler_wrapper(handler)
        self._durable = is_durable(handler)
        self._processes = multiprocessing_options
        self._file_options = file_options
        self._atomicity_options = chosen_atomicity(temporary_path_class, atomicity_options)
        self._store = built_in.LocalStore()
        self._joint_loop = blocking.LoopThread(
            partial(_open_for_job, multiprocessing_options), name="penstock.orbax.joint"
        )
        self._callback: Callable[[], None] | None = None
        self._metadata_store = checkpoint_metadata_store or MetadataStore(enable_write=True)
        self._check_metadata_store()
        stand_for("Checkpointer", Checkpointer)
        stand_for("AsyncCheckpointer", AsyncCheckpointer)

    def _check_metadata_store(self) -> None:
        if not self._metadata_store.is_blocking_writer():
            raise ValueError("Checkpoint metadata store must be blocking writer.")

    @property
    def handler(self) -> Any:
        """The handler that saves and restores."""
        return self._handler

    def save(
        self,
        directory: str | os.PathLike[str],
        *args: Any,
        force: bool = False,
        custom_metadata: dict[str, Any] | None = None,
        save_context: SaveContext | None = None,
        **kwargs: Any,
    ) -> None:
        """Save an object; return when it is durable and visible.

        Args:
            directory: A path where nothing exists yet.
            *args: For the handler: a `CheckpointArgs`, or the arguments to make one.
            force: Whether to replace what exists there, in one step, when the new checkpoint is complete. In
                a bucket it is deleted first.
            custom_metadata: JSON values kept with the checkpoint.
            save_context: Has no effect.
            **kwargs: Likewise.

        Raises:
            ValueError: If something exists at `directory` and `force` is off; or if it is in a bucket, and
                the handler writes files itself.
            Exception: What the handler raises.
        """
        with recorded(WRITE):
            save = self._new_save(directory, args, kwargs, force=force, custom_metadata=custom_metadata)
            save.finish(save.stage(), None)

    def restore(self, directory: str | os.PathLike[str], *args: Any, **kwargs: Any) -> Any:
        """Return the object that is saved in a directory.

        Args:
            directory: The path of the checkpoint.
            *args: For the handler: a `CheckpointArgs`, or the arguments to make one.
            **kwargs: Likewise.

        Raises:
            FileNotFoundError: If there is no checkpoint.
            ValueError: If a save was interrupted there.
            Exception: What the handler raises.
        """
        with recorded(READ):
            url = bucket_url(directory)
            if url is not None:
                check_handler(self._handler, url)
                path = path_as_given(url)
            else:
                path = handler_path(directory)
                if not path.exists():
                    raise NotACheckpointError(path_text(path), "Checkpoint not found")
                if not self._is_finalized(path):
                    raise IncompleteCheckpointError(path_text(path), "Found incomplete checkpoint")

            ckpt_args = construct_checkpoint_args(self._handler, False, *args, **kwargs)
            return self._handler.restore(path, args=ckpt_args)

    def metadata(self, directory: str | os.PathLike[str]) -> StepMetadata:
        """Return the recorded metadata of a checkpoint, and what its handler knows of it."""
        url = bucket_url(directory)
        if url is not None:
            check_handler(self._handler, url)
            path = path_as_given(url)
        else:
            path = handler_path(directory)

        if isinstance(self._handler, CompositeCheckpointHandler):
            return self._handler.metadata(path)
        if url is not None:
            about = self._handler.about(url)
            return StepMetadata(
                item_handlers=self._handler.typestr(),
                item_metadata=self._handler.metadata(path),
                custom_metadata=dict(about.custom_metadata or {}),
                init_timestamp_nsecs=about.started_at_ns,
                commit_timestamp_nsecs=about.committed_at_ns,
            )

        found = decode_step_metadata(self._metadata_store.read(step_metadata_file_path(path)) or {})
        try:
            found.item_metadata = self._handler.metadata(path)
        except (FileNotFoundError, NotImplementedError, ValueError, TypeError):
            found.item_metadata = None  # the handler does not know

        return found

    def close(self) -> None:
        """Close the handler. Idempotent if the handler is."""
        with ExitStack() as ends:  # backwards; one that fails does not keep the others
            ends.callback(self._metadata_store.close)
            ends.callback(self._handler.close)
            ends.callback(self._joint_loop.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_val: BaseException | None,
        exc_tb: TracebackType | None,
    ) -> None:
        self.close()

    def _new_save(
        self,
        directory: str | os.PathLike[str],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        *,
        force: bool,
        custom_metadata: dict[str, Any] | None,
        in_background: bool = False,
    ) -> HandlerSave:
        """Return a save that may begin: by this process, with others, or of a whole checkpoint.

        Raises:
            ValueError: If something is there that may not be replaced, or it cannot be published as asked.
            PeerError: If other processes of the job save something else.
        """
        url = bucket_url(directory)
        if url is not None:
            check_handler(self._handler, url)
            check_options(self._processes, self._file_options, url)
            jointly = len(saving_processes(self._processes)) > 1
        else:
            mode = self._file_options.path_permission_mode
            jointly = saves_jointly(self._processes, self._atomicity_options, mode)

        if url is None and not jointly:
            return self._save_alone(directory, args, kwargs, force, custom_metadata, in_background)

        ckpt_args = construct_checkpoint_args(self._handler, True, *args, **kwargs)
        # Handlers of trees publish the checkpoint of a job themselves, and every handler does in a bucket.
        if url is not None or (not self._processes.active_processes and saves_together(self._handler)):
            place = JointDirectory(paths.path_or_url(directory), force, custom_metadata, jointly)
            return _WholeSave(self._handler, ckpt_args, place, self._callback)

        return self._save_with_others(directory, ckpt_args, force, custom_metadata)

    def _save_alone(
        self,
        directory: str | os.PathLike[str],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        force: bool,
        custom_metadata: dict[str, Any] | None,
        in_background: bool,
    ) -> HandlerSave:
        links = links_in_force()
        building = DirectoryBuild(
            self._store,
            path_text(handler_path(directory)),
            overwrite=force,
            in_place=is_in_place(self._atomicity_options),
            mode=self._file_options.path_permission_mode,
            before_publishing=None if links is None else links.complete,
        )
        building.check()
        ckpt_args = construct_checkpoint_args(self._handler, True, *args, **kwargs)
        begin = partial(self._begin, building, time.time_ns())
        complete = partial(self._complete, building, custom_metadata)
        return _DirectorySave(self._handler, ckpt_args, building, begin, complete, in_background)

    def _save_with_others(
        self,
        directory: str | os.PathLike[str],
        ckpt_args: Any,
        force: bool,
        custom_metadata: dict[str, Any] | None,
    ) -> HandlerSave:
        """Begin to save together with the other processes, by a handler that writes files."""
        begun_ns = time.time_ns()

        def complete(build: JointBuild) -> None:
            building = SharedDirectory(self._store, build.place)
            self._begin(building, begun_ns)
            self._complete(building, custom_metadata)

        asked = described_call(ckpt_args, custom_metadata)
        begin = partial(JointBuild.begin, overwrite=force)
        build = self._joint_loop.call(begin, path_text(handler_path(directory)), asked, complete)
        wrote = partial(self._complete_part, handler_path(build.place))
        return _JointSave(self._handler, ckpt_args, build, wrote, keep=self._joint_loop)

    def _complete_part(self, place: Any) -> None:
        """Make durable what this process wrote, as others do with theirs."""
        if isinstance(self._handler, CompositeCheckpointHandler):
            self._handler.complete_part()
        elif not self._durable:
            SharedDirectory(self._store, path_text(place)).sync()

    def _begin(self, building: Building, begun_ns: int) -> None:
        """Record the start of the save in the directory that is built."""
        about = encode_step_metadata(StepMetadata(init_timestamp_nsecs=begun_ns))
        self._metadata_store.write(step_metadata_file_path(handler_path(building.path)), about)

    def _complete(
        self,
        building: Building,
        custom_metadata: dict[str, Any] | None,
        check_time: Callable[[], object] | None = None,
    ) -> None:
        """Let the handler complete what it wrote, write the metadata, and publish."""
        path = handler_path(building.path)
        known = StepMetadata(custom_metadata=custom_metadata or {}, item_handlers=self._item_handlers(path))
        about = encode_step_metadata(known)
        file = step_metadata_file_path(path)
        recorded_now = {name: about[name] for name in ("item_handlers", "custom_metadata")}
        self._metadata_store.update(file, **recorded_now)
        self._handler.finalize(path)
        if check_time is not None:
            check_time()  # what the handler completed took time, too
        if self._callback is not None:
            self._callback()

        self._metadata_store.update(file, commit_timestamp_nsecs=time.time_ns())
        self._metadata_store.wait_until_finished()
        building.publish(synced=self._durable)

    def _item_handlers(self, path: Any) -> Any:
        if isinstance(self._handler, CompositeCheckpointHandler):
            return self._handler.metadata_from_temporary_paths(path).item_handlers

        return self._handler.typestr()

    def _is_finalized(self, path: Any) -> bool:
        if file_names.TEMPORARY_SUFFIX in path.name or not path.is_dir():
            return False

        options = self._atomicity_options
        if options is None or options.mode is not AtomicityMode.COMMIT_FILE:
            return True

        return bool((path / file_names.COMMIT_MARK).exists()) or options.allow_legacy_atomic_rename


@failures.short_tracebacks
class AsyncCheckpointer(Checkpointer):
    """A `Checkpointer` whose `save` returns when the object has been copied, and writes in the background.

    One save runs at a time; the next save and `restore` wait for it. The next of `save`,
    `wait_until_finished`, `check_for_errors`, `restore` and `close` raises its failure. The interpreter
    does not exit before a save is over.

    Args:
        handler: Saves and restores the object; it must have `async_save`.
        timeout_secs: How long a save may take after the copy, in seconds; overrides `async_options`. What a
            save wrote that takes longer is removed in the background; `close` waits for that.
        async_options: How saves work in the background.
        multiprocessing_options: Which processes save.
        file_options: The permissions of directories.
        atomicity_options: How the checkpoint becomes visible.
        checkpoint_metadata_store: Writes the metadata of the checkpoint.
        temporary_path_class: Says the same as `atomicity_options`, and is stronger; see `path.atomicity`.

    Raises:
        ValueError: If the timeout is not positive.
        SpecError: If the handler has no `async_save`.
    """

    def __init__(
        self,
        handler: AsyncCheckpointHandler,
        timeout_secs: int | None = None,
        *,
        async_options: AsyncOptions = AsyncOptions(),
        multiprocessing_options: MultiprocessingOptions = MultiprocessingOptions(),
        file_options: FileOptions | None = None,
        atomicity_options: AtomicityOptions | None = None,
        checkpoint_metadata_store: Any = None,
        temporary_path_class: type[Any] | None = None,
    ) -> None:
        super().__init__(
            handler,
            multiprocessing_options=multiprocessing_options,
            file_options=file_options or FileOptions(),
            atomicity_options=atomicity_options,
            checkpoint_metadata_store=checkpoint_metadata_store,
            temporary_path_class=temporary_path_class,
        )
        if not isinstance(self._handler, AsyncCheckpointHandler):
            raise SpecError(f"a {type(handler).__name__} has no async_save; save with a Checkpointer")

        self._timeout_s: float = timeout_secs or async_options.timeout_secs
        if self._timeout_s <= 0:
            raise ConfigError("timeout_secs", f"must be positive, but got {self._timeout_s} seconds.")

        self._callback = async_options.post_finalization_callback
        self._worker = blocking.Worker("penstock.orbax.save")
        self._pending: ThreadFuture[None] | None = None
        self._cleaning: ThreadFuture[bool] | None = None
        self._futures: Sequence[Future] = ()
        self._cancelled = False

    @property
    def timeout_s(self) -> float:
        """The seconds that a save may take after the copy."""
        return self._timeout_s

    def _check_metadata_store(self) -> None:
        """Accept any store: the background waits for its writes."""

    @blocking.caller_waits()
    def save(
        self,
        directory: str | os.PathLike[str],
        *args: Any,
        force: bool = False,
        custom_metadata: dict[str, Any] | None = None,
        save_context: SaveContext | None = None,
        **kwargs: Any,
    ) -> None:
        """Start to save an object; return when it has been copied. Waits for an earlier save first.

        Args:
            directory: See `Checkpointer.save`.
            *args: See `Checkpointer.save`.
            force: See `Checkpointer.save`.
            custom_metadata: See `Checkpointer.save`.
            save_context: Has no effect.
            **kwargs: See `Checkpointer.save`.

        Raises:
            ValueError: If something exists at `directory` and `force` is off.
            Exception: What the handler raises, or the failure of the earlier save.
        """
        begun = time.perf_counter()
        stand_for("AsyncCheckpointer", AsyncCheckpointer)  # the program may have imported Orbax meanwhile
        record_async_save()
        with timed(f"{WRITE}blocking_wait_prev_duration_secs"):
            self.wait_until_finished()

        with timed(*[f"{prefix}blocking_duration_secs" for prefix in WRITE_ASYNC]):
            save = self._new_save(
                directory,
                args,
                kwargs,
                force=force,
                custom_metadata=custom_metadata,
                in_background=True,
            )
            futures = save.stage()
            self._cancelled, self._futures = False, futures
            # The checkpoint is completed even if the program ends without waiting.
            self._pending = self.then(self._finish, save, futures, begun)

    def then(self, function: Callable[..., T], *args: Any) -> ThreadFuture[T]:
        """Call a function once the save that is under way is over, in the thread that finishes saves.

        Where there can be no more threads it is called here, and now.
        """
        try:
            return self._worker.call(function, *args)
        except NoThreadError:
            outcome: ThreadFuture[T] = ThreadFuture()
            try:
                outcome.set_result(function(*args))
            except Exception as error:
                outcome.set_exception(error)

            return outcome

    def restore(self, directory: str | os.PathLike[str], *args: Any, **kwargs: Any) -> Any:
        """Return the object saved in a directory. Waits for a running save first; see `Checkpointer`."""
        self.wait_until_finished()
        return super().restore(directory, *args, **kwargs)

    def check_for_errors(self) -> None:
        """Raise the failure of a save in the background, once. Does not wait."""
        pending = self._pending
        if pending is not None and pending.done():
            self._pending, self._futures = None, ()
            self._raise_from(pending)

    def wait_until_finished(self) -> None:
        """Wait until no save is running; raise the failure of the last one, once."""
        pending = self._pending
        if pending is not None:
            try:
                self._raise_from(pending)
            finally:
                if pending.done():  # and not interrupted
                    self._pending, self._futures = None, ()

    def cancel(self) -> None:
        """Ask the save in the background to stop. What it wrote is removed, and no error is raised."""
        self._cancelled = True
        for future in self._futures:
            future.cancel()

    def close(self) -> None:
        """Wait for a save, and close the handler."""
        try:
            self.wait_until_finished()
        finally:
            if self._cleaning is not None:
                self._cleaning.result()
            self._worker.close()
            super().close()

    def _raise_from(self, pending: ThreadFuture[None]) -> None:
        try:
            pending.result()
        except CancelledError:
            if not self._cancelled:
                raise
        except Exception:
            if not self._cancelled:
                raise

    def _finish(self, save: HandlerSave, futures: Sequence[Future], begun_s: float) -> None:
        """Wait until everything is written and visible. In the background.

        Args:
            save: The save.
            futures: What still writes.
            begun_s: When the save began, by `time.perf_counter`.
        """
        try:
            with timed(f"{WRITE}background_duration_secs"):
                save.finish(futures, self._timeout_s)
        finally:
            self._cleaning = save.cleaning or self._cleaning

        record_async_save(begun_s)


@failures.short_tracebacks
class PyTreeCheckpointer(Checkpointer):
    """A `Checkpointer` of trees: `PyTreeCheckpointer().save(path, tree)`.

    Args:
        primary_host: See `MultiprocessingOptions`.
        use_ocdbt: See `PyTreeCheckpointHandler`.
        use_zarr3: See `PyTreeCheckpointHandler`.
        use_compression: See `PyTreeCheckpointHandler`.
    """

    def __init__(
        self,
        primary_host: int | None = 0,
        use_ocdbt: bool = True,
        use_zarr3: bool = False,
        use_compression: bool = True,
    ) -> None:
        options = MultiprocessingOptions(primary_host=primary_host)
        handler = PyTreeCheckpointHandler(
            use_ocdbt=use_ocdbt,
            use_zarr3=use_zarr3,
            use_compression=use_compression,
            multiprocessing_options=options,
        )
        super().__init__(handler, multiprocessing_options=options)


@failures.short_tracebacks
class StandardCheckpointer(AsyncCheckpointer):
    """An `AsyncCheckpointer` of trees of arrays and numbers.

    Args:
        async_options: See `AsyncCheckpointer`.
        multiprocessing_options: See `AsyncCheckpointer`.
        file_options: See `AsyncCheckpointer`.
        atomicity_options: See `AsyncCheckpointer`.
        checkpoint_metadata_store: See `AsyncCheckpointer`.
        temporary_path_class: See `AsyncCheckpointer`.
        **kwargs: Those of `StandardCheckpointHandler`.
    """

    def __init__(
        self,
        *,
        async_options: AsyncOptions = AsyncOptions(),
        multiprocessing_options: MultiprocessingOptions = MultiprocessingOptions(),
        file_options: FileOptions = FileOptions(),
        atomicity_options: AtomicityOptions | None = None,
        checkpoint_metadata_store: Any = None,
        temporary_path_class: type[Any] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            StandardCheckpointHandler(multiprocessing_options=multiprocessing_options, **kwargs),
            async_options=async_options,
            multiprocessing_options=multiprocessing_options,
            file_options=file_options,
            atomicity_options=atomicity_options,
            checkpoint_metadata_store=checkpoint_metadata_store,
            temporary_path_class=temporary_path_class,
        )

    def save(  # type: ignore[override]  # as in Orbax, it takes the tree and no args object
        self,
        directory: str | os.PathLike[str],
        state: Any,
        *,
        save_args: Any = None,
        force: bool = False,
        custom_metadata: dict[str, Any] | None = None,
    ) -> None:
        """Start to save a tree; return when it has been copied.

        Args:
            directory: A path where nothing exists yet.
            state: A tree of arrays and numbers.
            save_args: A tree of `SaveArgs` like it.
            force: Whether to replace what exists there.
            custom_metadata: JSON values kept with the checkpoint.

        Raises:
            ValueError: If the tree cannot be saved, or something exists at `directory` and `force` is off.
        """
        super().save(
            directory, args=StandardSaveArgs(state, save_args), force=force, custom_metadata=custom_metadata
        )

    def restore(self, directory: str | os.PathLike[str], target: Any = None, *, strict: bool = True) -> Any:
        """Return the tree in a directory.

        Args:
            directory: The path of the checkpoint.
            target: See `StandardRestoreArgs.item`.
            strict: See `StandardRestoreArgs`.

        Raises:
            FileNotFoundError: If there is no checkpoint.
            ValueError: If the tree does not fit the target, or a save was interrupted there.
        """
        return super().restore(directory, args=StandardRestoreArgs(target, strict=strict))


def check_handler(handler: object, url: str) -> None:
    """Refuse a handler that needs a directory of the operating system. Items are looked at one by one, later.

    Raises:
        PathError: If it does. It is a ValueError.
    """
    if not (saves_together(handler) or isinstance(handler, CompositeCheckpointHandler)):
        name = type(handler).__name__
        raise PathError(
            url,
            f"is in a bucket, and a {name} reads and writes files by itself. The handlers of trees "
            "(StandardCheckpointHandler, PyTreeCheckpointHandler) save there, and several trees and JSON "
            "(CompositeCheckpointHandler)",
        )


def check_options(processes: MultiprocessingOptions, files: FileOptions, url: str) -> None:
    """Refuse what a save to a bucket cannot do.

    Raises:
        ConfigError: If directories are to have permissions, or some of a job's processes are to save
            together. It is a ValueError.
    """
    check_processes(processes)
    saving = saving_processes(processes)
    if 1 < len(saving) < int(_jax.process_count()):
        some = f"are {list(saving)}, and {url} is in a bucket"
        raise ConfigError("active_processes", f"{some}, where all processes of a job save together, or one")
    if files.path_permission_mode is not None:
        raise ConfigError("file_options", "a bucket has no directories, and so no permissions of them")


class HandlerSave(abc.ABC):
    """One save by a handler. `stage` is called in the thread of the caller, `finish` then in any.

    Attributes:
        cleaning: The removal of what a save wrote that took too long; None if there was none.
    """

    cleaning: ThreadFuture[bool] | None = None

    def __init__(self, handler: Any, args: Any) -> None:
        self.handler = handler
        self._args = args

    def take_args(self) -> Any:
        """Return the arguments, once: a save in the background must not keep alive what its caller drops."""
        args, self._args = self._args, None
        return args

    @abc.abstractmethod
    def stage(self) -> Sequence[Future]:
        """Have the handler copy the object; return the futures of what it writes in the background.

        Raises:
            Exception: What the handler raises, or what ended the save elsewhere. Nothing of it stays then.
        """

    @abc.abstractmethod
    def finish(self, futures: Sequence[Future], timeout_s: float | None) -> None:
        """Wait until the checkpoint is visible.

        Raises:
            TimeoutError: If it is not written within `timeout_s`.
            Exception: What the save failed with. Nothing of it stays then.
        """


@final
class _DirectorySave(HandlerSave):
    """Has a handler fill a directory, and publishes that. Every document is written in `finish`.

    Args:
        handler: Fills it.
        args: Of the handler.
        building: The directory.
        begin: Records that the save has begun.
        complete: Completes and publishes what was written; first calls what it is given.
        in_background: Whether the handler writes in the background.
    """

    def __init__(
        self,
        handler: Any,
        args: Any,
        building: DirectoryBuild,
        begin: Callable[[], None],
        complete: Callable[[Callable[[], object]], None],
        in_background: bool,
    ) -> None:
        super().__init__(handler, args)
        self._building = building
        self._begin = begin
        self._complete = complete
        self._in_background = in_background

    def stage(self) -> Sequence[Future]:
        self._building.create()
        place = handler_path(self._building.path)
        try:
            if self._in_background:
                args = self.take_args()
                needs_loop = needs_event_loop(self.handler, args)
                save = partial(self.handler.async_save, place, args=args)
                del args  # which the call is to let go of
                return all_futures(blocking.run_sync(save, needs_loop=needs_loop))

            self.handler.save(place, args=self.take_args())
        except BaseException:
            self._building.discard()
            raise

        return ()

    def finish(self, futures: Sequence[Future], timeout_s: float | None) -> None:
        started = time.monotonic()
        try:
            self._begin()
            with self._timed("background_ts_duration_secs"):
                ChainedFuture(futures, lambda: None).result(timeout_s)
            with self._timed("background_finalize_secs"):
                self._complete(lambda: remaining_secs(started, timeout_s))
        except BaseException as error:
            if isinstance(error, TimeoutError) and timeout_s is not None:
                # The caller gets the error now, and not when what takes too long has ended.
                self.cleaning = blocking.start_thread(
                    _clean_up, self._building, futures, name="penstock.orbax.cleaning"
                )
            elif not _clean_up(self._building, futures):
                place = handler_path(self._building.path)
                error.add_note(f"{place} is still being written, and was not removed")
            raise

    def _timed(self, name: str) -> AbstractContextManager[None]:
        return timed(WRITE + name) if self._in_background else nullcontext()


@final
class _WholeSave(HandlerSave):
    """Has a handler save and publish a whole checkpoint: with all processes of a job, or to a bucket.

    Args:
        handler: Saves it.
        args: Of the handler.
        place: Of the checkpoint.
        then: Called by the primary process when all is written.
    """

    def __init__(
        self, handler: Any, args: Any, place: JointDirectory, then: Callable[[], None] | None
    ) -> None:
        super().__init__(handler, args)
        self._place = place
        self._then = then

    def stage(self) -> Sequence[Future]:
        place = self._place
        try:
            return all_futures(
                blocking.run_sync(partial(self.handler.async_save, place, args=self.take_args()))
            )
        except Exception as error:
            if place.jointly and not place.begun.is_set():
                JointBuild.refuse(
                    place.path, error, JobOptions()
                )  # the other processes would wait for this one
            raise

    def finish(self, futures: Sequence[Future], timeout_s: float | None) -> None:
        try:
            ChainedFuture(futures, self._written).result(timeout_s)
        except BaseException:
            cancel_all(futures)
            raise

    def _written(self) -> None:
        if self._then is not None and is_primary_host(0):  # once for all processes
            self._then()


@final
class _JointSave(HandlerSave):
    """Has a handler write the part of this process, of a directory that all processes of a job fill.

    Args:
        handler: Writes it.
        args: Of the handler.
        build: The directory.
        wrote: Called when this process has written.
        keep: What must live as long as the save.
    """

    def __init__(
        self, handler: Any, args: Any, build: JointBuild, wrote: Callable[[], None], keep: object
    ) -> None:
        super().__init__(handler, args)
        self._build = build
        self._wrote = wrote
        self._keep = keep
        self._links = links_in_force() or StepLinks("", None)

    def stage(self) -> Sequence[Future]:
        place = handler_path(self._build.place)
        futures: list[Future] = []
        try:
            with joint_place(self._build):
                if isinstance(self.handler, AsyncCheckpointHandler):
                    work = partial(self.handler.async_save, place, args=self.take_args())
                    futures += all_futures(blocking.run_sync(partial(self._build.unless_ended, work)))
                else:
                    self.handler.save(place, args=self.take_args())
        except BaseException as error:
            self._end(error)

        self._build.when_ended(partial(cancel_all, futures))
        return futures

    def finish(self, futures: Sequence[Future], timeout_s: float | None) -> None:
        started = time.monotonic()
        try:
            ChainedFuture(futures, self._wrote).result(timeout_s)
        except BaseException as error:
            stopped(futures)
            self._end(error)

        self._links.written()
        self._build.complete()
        try:
            self._build.save.result(remaining_secs(started, timeout_s))
            self._links.published()
        except BaseException:
            self._build.save.cancel()  # if it goes on, this wait was interrupted or took too long
            raise
        finally:
            self._links.release()

        self._keep = None

    def _end(self, error: BaseException) -> None:
        """End the save for all processes, and raise what ended it: `error`, or what came before."""
        self._build.fail(error)
        if isinstance(error, Exception):
            self._build.wait_end()

        raise error


def _open_for_job(options: MultiprocessingOptions) -> NativeCheckpointer:
    return NativeCheckpointer(job=job_options(options))


def described_call(args: Any, custom_metadata: Mapping[str, Any] | None) -> list[str]:
    """Describe a call for comparison between processes: items, their types, and plain values.

    Trees compare their leaves themselves.
    """
    items = [f"item {name or 'of the checkpoint'}\t{text}" for name, text in sorted(_described("", args))]
    return [*items, f"option custom_metadata\t{described_json(custom_metadata)}"]


def _described(name: str, args: Any) -> Iterator[tuple[str, str]]:
    if isinstance(args, Composite):
        for item, one in cast("Mapping[str, Any]", args).items():
            yield from _described(f"{name}/{item}" if name else str(item), one)
    elif isinstance(args, JsonSaveArgs):
        yield name, described_json(args.item)
    elif isinstance(args, ProtoSaveArgs):
        yield name, described_message(args.item)
    else:
        yield name, type(args).__name__


def _clean_up(building: DirectoryBuild, futures: Sequence[Future]) -> bool:
    """Ask all work to stop, and remove its files; return whether both were done."""
    has_stopped = stopped(futures)
    if has_stopped:
        building.discard()
    else:
        building.release()

    return has_stopped

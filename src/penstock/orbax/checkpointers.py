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
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError
from concurrent.futures import Future as ThreadFuture
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeAlias, cast, final

import jax

from penstock import Checkpointer as NativeCheckpointer
from penstock import CheckpointMetadata, JobOptions
from penstock.embedding import (
    DirectoryBuild,
    LoopThread,
    SharedDirectory,
    built_in,
    file_names,
    paths,
    refuse_save,
    run_sync,
    start_thread,
)
from penstock.errors import ConfigError, IncompleteCheckpointError, NotACheckpointError, PathError, SpecError
from penstock.orbax.checkpoint_args import (
    AsyncCheckpointHandler,
    CheckpointHandler,
    construct_checkpoint_args,
    has_registered_args,
    is_durable,
    saves_together,
)
from penstock.orbax.composite_handler import CompositeCheckpointHandler
from penstock.orbax.future import ChainedFuture, Future, all_futures, cancel_all, remaining_secs, stopped
from penstock.orbax.item_files import bucket_url, handler_path, path_as_given, path_text
from penstock.orbax.joint_saves import (
    JointDirectory,
    active_processes,
    check_processes,
    check_publishing,
    described_json,
    described_message,
    is_joint,
    job_options,
    joint_place,
)
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
    is_in_place,
)
from penstock.orbax.plain_handlers import JsonSaveArgs, ProtoSaveArgs, get_legacy_handler_wrapper
from penstock.orbax.pytree_handler import PyTreeCheckpointHandler
from penstock.orbax.standard_handler import StandardCheckpointHandler, StandardRestoreArgs, StandardSaveArgs
from penstock.orbax.step_links import StepLinks, links_in_force

if TYPE_CHECKING:
    from penstock.embedding import JointBuild


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


class Checkpointer(AbstractCheckpointer):
    """Saves and restores through a handler. A context manager that also works inside a running event loop.

    The handler writes into a temporary directory. When everything is written, the directory gets its own
    name, durably and in one step. If anything fails, it is removed.

    Args:
        handler: Saves and restores the object.
        multiprocessing_options: Which processes save.
        file_options: The permissions of directories.
        atomicity_options: How the checkpoint becomes visible.
        checkpoint_metadata_store: Writes the metadata of the checkpoint; its writes must block.
        temporary_path_class: Not supported; use `atomicity_options`.

    Raises:
        ValueError: If writes of the metadata store do not block.
        ConfigError: If there is a `temporary_path_class`.
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
        if temporary_path_class is not None:
            raise ConfigError("temporary_path_class", "is not supported; use atomicity_options")

        self._handler: Any = handler if has_registered_args(handler) else get_legacy_handler_wrapper(handler)
        self._durable = is_durable(handler)
        self._processes = multiprocessing_options
        self._file_options = file_options
        self._atomicity_options = atomicity_options
        self._store = built_in.LocalStore()
        self._joint_saves = JointSaves(multiprocessing_options)
        self._metadata_store = checkpoint_metadata_store or MetadataStore(enable_write=True)
        self._check_metadata_store()

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
            if self._saves_whole(directory):
                ckpt_args = construct_checkpoint_args(self._handler, True, *args, **kwargs)
                self._save_jointly(directory, ckpt_args, custom_metadata, force)
                return

            building = self._building(directory, force=force)
            building.check()
            ckpt_args = construct_checkpoint_args(self._handler, True, *args, **kwargs)
            building.create()
            try:
                self._begin(building, time.time_ns())
                self._handler.save(handler_path(building.path), args=ckpt_args)
                self._complete(building, custom_metadata)
            except BaseException:
                building.discard()
                raise

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
            return metadata_in_bucket(self._handler, url)

        path = handler_path(directory)
        if isinstance(self._handler, CompositeCheckpointHandler):
            return self._handler.metadata(path)

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
            ends.callback(self._joint_saves.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_val: BaseException | None,
        exc_tb: TracebackType | None,
    ) -> None:
        self.close()

    def _building(self, directory: str | os.PathLike[str], *, force: bool) -> DirectoryBuild:
        links = links_in_force()
        return DirectoryBuild(
            self._store,
            path_text(handler_path(directory)),
            overwrite=force,
            in_place=is_in_place(self._atomicity_options),
            mode=self._file_options.path_permission_mode,
            before_publishing=None if links is None else links.complete,
        )

    def _saves_whole(self, directory: str | os.PathLike[str]) -> bool:
        """Return whether penstock builds the whole checkpoint: in a bucket, or with all processes of the job.

        Raises:
            PathError: If the handler cannot save to the bucket.
            ConfigError: If it is to be published in a way that is not possible there.
        """
        url = bucket_url(directory)
        if url is None:
            return self._is_joint()

        check_handler(self._handler, url)
        check_options(self._processes, self._file_options, url)
        return True

    def _is_joint(self) -> bool:
        """Return whether all processes of the job save together; False if this one saves by itself.

        Raises:
            ConfigError: If it is to be published in a way that several processes cannot.
        """
        check_processes(self._processes)
        if not is_joint(self._processes):
            return False

        check_publishing(self._atomicity_options, self._file_options.path_permission_mode)
        return True

    def _save_jointly(
        self,
        directory: str | os.PathLike[str],
        ckpt_args: Any,
        custom_metadata: dict[str, Any] | None,
        force: bool,
    ) -> None:
        if self._hands_on_whole(directory):
            joint = self._joint_directory(directory, force, custom_metadata)
            with self._refusal_to_others(joint):
                self._handler.save(joint, args=ckpt_args)
            return

        save = self._begin_jointly(directory, ckpt_args, custom_metadata, force)
        save.finish(save.call(self._handler, ckpt_args), None, self._complete_part)

    def _joint_directory(
        self, directory: str | os.PathLike[str], force: bool, custom_metadata: dict[str, Any] | None
    ) -> JointDirectory:
        jointly = is_joint(self._processes)
        return JointDirectory(paths.path_or_url(directory), force, custom_metadata, jointly)

    @contextmanager
    def _refusal_to_others(self, joint: JointDirectory) -> Generator[None]:
        """Tell the other processes of a failure before this one has begun: they would wait for it."""
        try:
            yield
        except Exception as error:
            if joint.jointly and not joint.begun.is_set():
                refuse_save(joint.path, error, JobOptions())
            raise

    def _hands_on_whole(self, directory: str | os.PathLike[str]) -> bool:
        """Return whether the handler publishes the checkpoint itself, as those of a tree do for a job."""
        if bucket_url(directory) is not None:
            return True

        return not self._processes.active_processes and saves_together(self._handler)

    def _begin_jointly(
        self,
        directory: str | os.PathLike[str],
        ckpt_args: Any,
        custom_metadata: dict[str, Any] | None,
        force: bool,
    ) -> JointSave:
        """Begin to save together with the other processes, by a handler that writes files."""
        begun_ns = time.time_ns()

        def complete(place: Any) -> None:
            building = SharedDirectory(self._store, path_text(place))
            self._begin(building, begun_ns)
            self._complete(building, custom_metadata)

        asked = described_call(ckpt_args, custom_metadata)
        return self._joint_saves.begin(path_text(handler_path(directory)), asked, complete, overwrite=force)

    def _complete_part(self, place: Any) -> None:
        """Make durable what this process wrote beside others."""
        if isinstance(self._handler, CompositeCheckpointHandler):
            self._handler.complete_part()
        elif not self._durable:
            SharedDirectory(self._store, path_text(place)).sync()

    def _begin(self, building: Building, begun_ns: int) -> None:
        """Record in what is built when its save began."""
        about = encode_step_metadata(StepMetadata(init_timestamp_nsecs=begun_ns))
        self._metadata_store.write(step_metadata_file_path(handler_path(building.path)), about)

    def _complete(self, building: Building, custom_metadata: dict[str, Any] | None) -> None:
        """Let the handler complete what it wrote, write the metadata, and publish."""
        path = handler_path(building.path)
        known = StepMetadata(custom_metadata=custom_metadata or {}, item_handlers=self._item_handlers(path))
        about = encode_step_metadata(known)
        file = step_metadata_file_path(path)
        recorded_now = {name: about[name] for name in ("item_handlers", "custom_metadata")}
        self._metadata_store.update(file, **recorded_now)
        self._handler.finalize(path)
        self._before_publishing()
        self._metadata_store.update(file, commit_timestamp_nsecs=time.time_ns())
        self._metadata_store.wait_until_finished()
        building.publish(synced=self._durable)

    def _before_publishing(self) -> None:
        """Called when everything is written."""

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
        temporary_path_class: Not supported; use `atomicity_options`.

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

        self._callback: Callable[[], None] | None = async_options.post_finalization_callback
        self._pending: ThreadFuture[None] | None = None
        self._cleaning: ThreadFuture[bool] | None = None
        self._waiting_since: float | None = None  # of a save that this process makes by itself
        self._futures: Sequence[Future] = ()
        self._cancelled = False

    @property
    def timeout_s(self) -> float:
        """The seconds that a save may take after the copy."""
        return self._timeout_s

    def _check_metadata_store(self) -> None:
        """Accept any store: the background waits for its writes."""

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
        record_async_save()
        with timed(f"{WRITE}blocking_wait_prev_duration_secs"):
            self.wait_until_finished()

        with timed(*[f"{prefix}blocking_duration_secs" for prefix in WRITE_ASYNC]):
            if self._saves_whole(directory):
                ckpt_args = construct_checkpoint_args(self._handler, True, *args, **kwargs)
                finish = self._staged_jointly(directory, ckpt_args, custom_metadata, force)
                self._pending = start_thread(self._await_joint, finish, begun, name="penstock.orbax.save")
                return

            building = self._building(directory, force=force)
            building.check()
            ckpt_args = construct_checkpoint_args(self._handler, True, *args, **kwargs)
            building.create()
            staged: ThreadFuture[Sequence[Future]] = ThreadFuture()
            try:
                # Not a daemon: the checkpoint is completed even if the program ends without waiting. Started
                # before other threads have work, which would make the caller wait for the interpreter.
                pending = start_thread(
                    self._commit,
                    building,
                    staged,
                    custom_metadata,
                    (begun, time.time_ns()),
                    name="penstock.orbax.save",
                )
                found = run_sync(
                    partial(self._handler.async_save, handler_path(building.path), args=ckpt_args)
                )
            except BaseException:
                staged.cancel()
                building.discard()
                raise

            self._cancelled, self._futures, self._pending = False, all_futures(found), pending
            staged.set_result(self._futures)

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

    def _commit(
        self,
        building: DirectoryBuild,
        staged: ThreadFuture[Sequence[Future]],
        custom_metadata: dict[str, Any] | None,
        begun: tuple[float, int],
    ) -> None:
        """Wait until everything is written, then publish it. Runs in a thread of its own.

        Every file that the checkpointer itself writes is written here: a caller waits for no disk.

        Args:
            building: The directory.
            staged: What `async_save` returns; cancelled if it fails, and then there is nothing to do.
            custom_metadata: See `Checkpointer.save`.
            begun: When the save began: by `time.perf_counter`, and by `time.time_ns`.
        """
        begun_s, begun_ns = begun
        try:
            futures = staged.result()
        except CancelledError:
            return

        self._waiting_since = time.monotonic()
        try:
            with timed(f"{WRITE}background_duration_secs"):
                self._begin(building, begun_ns)
                with timed(f"{WRITE}background_ts_duration_secs"):
                    ChainedFuture(futures, lambda: None).result(self._timeout_s)
                with timed(f"{WRITE}background_finalize_secs"):
                    self._complete(building, custom_metadata)
        except TimeoutError:
            # The caller gets the error now, and not when what takes too long has ended.
            self._cleaning = start_thread(_clean_up, building, futures, name="penstock.orbax.cleaning")
            raise
        except BaseException as error:
            if not _clean_up(building, futures):
                error.add_note(f"{handler_path(building.path)} is still being written, and was not removed")
            raise

        record_async_save(begun_s)

    def _staged_jointly(
        self,
        directory: str | os.PathLike[str],
        ckpt_args: Any,
        custom_metadata: dict[str, Any] | None,
        force: bool,
    ) -> Callable[[], None]:
        """Start to save together with the other processes. Returns what waits for it, once all is copied."""
        self._cancelled = False
        if not self._hands_on_whole(directory):
            save = self._begin_jointly(directory, ckpt_args, custom_metadata, force)
            self._futures = save.call(self._handler, ckpt_args)
            return partial(save.finish, self._futures, self._timeout_s, self._complete_part)

        joint = self._joint_directory(directory, force, custom_metadata)
        with self._refusal_to_others(joint):
            self._futures = all_futures(run_sync(partial(self._handler.async_save, joint, args=ckpt_args)))

        then = self._before_publishing if is_primary_host(0) else _nothing
        return partial(_await_all, self._futures, self._timeout_s, then)

    def _await_joint(self, finish: Callable[[], None], begun_s: float) -> None:
        """Wait until all processes have saved, and the checkpoint is visible. Runs in a thread of its own."""
        with timed(f"{WRITE}background_duration_secs"):
            finish()

        record_async_save(begun_s)

    def _before_publishing(self) -> None:
        if self._waiting_since is not None:
            remaining_secs(self._waiting_since, self._timeout_s)  # what the handler completed took time, too
        if self._callback is not None:
            self._callback()


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


_jax: Any = jax


class _Trees(Protocol):
    about: Callable[[Any], CheckpointMetadata]


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
    active = active_processes(processes)
    if is_joint(processes) and len(active) < int(_jax.process_count()):
        some = f"are {list(active)}, and {url} is in a bucket"
        raise ConfigError("active_processes", f"{some}, where all processes of a job save together, or one")
    if files.path_permission_mode is not None:
        raise ConfigError("file_options", "a bucket has no directories, and so no permissions of them")


def metadata_in_bucket(handler: Any, url: str) -> StepMetadata:
    """Return what a checkpoint in a bucket records of itself, and what its handler knows of the tree.

    Raises:
        FileNotFoundError: If there is none.
        ValueError: If it is damaged.
    """
    if isinstance(handler, CompositeCheckpointHandler):
        return handler.metadata(path_as_given(url))

    about = cast("_Trees", handler).about(url)
    return StepMetadata(
        item_handlers=handler.typestr(),
        item_metadata=handler.metadata(path_as_given(url)),
        custom_metadata=dict(about.custom_metadata or {}),
        init_timestamp_nsecs=about.started_at_ns,
        commit_timestamp_nsecs=about.committed_at_ns,
    )


@final
class JointSaves:
    """Begins such saves. It owns an event loop in a thread, from the first one until `close`.

    Args:
        options: Which processes save.
    """

    def __init__(self, options: MultiprocessingOptions) -> None:
        self._loop = LoopThread(partial(_opened, options), name="penstock.orbax.joint")

    def begin(
        self, path: str, asked: Sequence[str], complete: Callable[[Any], object], *, overwrite: bool
    ) -> JointSave:
        """Return once all processes want to save the same, and there is a place to write to.

        Args:
            path: Of the checkpoint.
            asked: See `JointBuild.begin`.
            complete: Writes into the place what is written once; see there, too.
            overwrite: Whether a checkpoint that is there may be replaced.

        Raises:
            PeerError: If the processes differ, or one of them does not come.
            ValueError: If something exists at `path` and `overwrite` is off.
        """
        from penstock.embedding import JointBuild

        def completed(build: JointBuild) -> None:
            complete(handler_path(build.place))

        begin = partial(JointBuild.begin, overwrite=overwrite)
        build = self._loop.call(begin, path, asked, completed)
        return JointSave(build, self._loop, links_in_force())

    def close(self) -> None:
        """End the thread."""
        self._loop.close()


@final
class JointSave:
    """One of them, for the threads that call handlers and wait for what those write.

    Args:
        build: The save.
        keep: What must live as long as the save.
        links: Of the step that it saves, if a manager does.
    """

    def __init__(self, build: JointBuild, keep: object, links: StepLinks | None = None) -> None:
        self._build = build
        self._keep = keep
        self._links = links or StepLinks("", None)

    def call(self, handler: Any, args: Any) -> Sequence[Future]:
        """Have a handler write this process's part; return the futures of what it writes in the background.

        Raises:
            Exception: What the handler raises, or what ended the save in another process. It is ended in all
                of them.
        """
        place = handler_path(self._build.place)
        futures: list[Future] = []
        try:
            with joint_place(self._build):
                if isinstance(handler, AsyncCheckpointHandler):
                    work = partial(handler.async_save, place, args=args)
                    futures += all_futures(run_sync(partial(self._build.unless_ended, work)))
                else:
                    handler.save(place, args=args)
        except BaseException as error:
            self._end(error)

        self._build.when_ended(partial(cancel_all, futures))
        return futures

    def finish(
        self, futures: Sequence[Future], timeout_s: float | None, wrote: Callable[[Any], object]
    ) -> None:
        """Wait until all is written here, call `wrote(place)`, and wait until the checkpoint is visible.

        Raises:
            TimeoutError: If this process has not written within `timeout_s`.
            Exception: What ended the save, here or in another process.
        """
        started = time.monotonic()
        try:
            ChainedFuture(futures, partial(wrote, handler_path(self._build.place))).result(timeout_s)
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


def _opened(options: MultiprocessingOptions) -> NativeCheckpointer:
    return NativeCheckpointer(job=job_options(options))


def described_call(args: Any, custom_metadata: Mapping[str, Any] | None) -> list[str]:
    """Return what must be the same in all processes: which items there are, of what, and plain values.

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
    """Ask all work to stop, and remove what it wrote; return whether it stopped, and that was done."""
    has_stopped = stopped(futures)
    if has_stopped:
        building.discard()
    else:
        building.release()

    return has_stopped


def _nothing() -> None:
    """Do what processes other than the primary do when all is written."""


def _await_all(futures: Sequence[Future], timeout_s: float, then: Callable[[], None]) -> None:
    try:
        ChainedFuture(futures, then).result(timeout_s)
    except BaseException:
        cancel_all(futures)
        raise

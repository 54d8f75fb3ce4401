"""Saves through a handler, so that a checkpoint exists as a whole or not at all."""

from __future__ import annotations

__all__ = ("AbstractCheckpointer", "Checkpointer", "SaveContext")

import abc
import os
import time
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self, TypeAlias

from penstock.handlers.formats.orbax.file_names import COMMIT_MARK, TEMPORARY_SUFFIX
from penstock.handlers.stores.local import LocalStore
from penstock.kernel.config.job_options import JobOptions
from penstock.kernel.errors import ConfigError, IncompleteCheckpointError, NotACheckpointError
from penstock.kernel.storage.paths import path_or_url
from penstock.orbax.common.handler_paths import bucket_url, handler_path, path_as_given, path_text
from penstock.orbax.joint.refused_saves import refuse_save
from penstock.orbax.joint.shared_directory import SharedDirectory
from penstock.orbax.v0.checkpointers.bucket_saving import check_handler, check_options, metadata_in_bucket
from penstock.orbax.v0.checkpointers.joint_saving import JointSave, JointSaves, described_call
from penstock.orbax.v0.common.checkpoint_args import construct_checkpoint_args, has_registered_args
from penstock.orbax.v0.common.joint_directory import (
    JointDirectory,
    check_processes,
    check_publishing,
    is_joint,
)
from penstock.orbax.v0.common.monitoring import READ, WRITE, recorded
from penstock.orbax.v0.common.step_metadata import (
    MetadataStore,
    StepMetadata,
    decode_step_metadata,
    encode_step_metadata,
    step_metadata_file_path,
)
from penstock.orbax.v0.common.temporary_directory import TemporaryDirectory
from penstock.orbax.v0.common.unchanged_links import links_in_force
from penstock.orbax.v0.common.v0_options import (
    AtomicityMode,
    AtomicityOptions,
    FileOptions,
    MultiprocessingOptions,
)
from penstock.orbax.v0.handlers.checkpoint_handler import CheckpointHandler, is_durable, saves_together
from penstock.orbax.v0.handlers.composite_handler import CompositeCheckpointHandler
from penstock.orbax.v0.handlers.legacy_handler import get_legacy_handler_wrapper

Building: TypeAlias = TemporaryDirectory | SharedDirectory


@dataclass(frozen=True, kw_only=True)
class SaveContext:
    """What a manager measured before a save. Kept for Orbax's metrics; penstock has its own."""

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
        self._store = LocalStore()
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
                self._handler.save(building.get(), args=ckpt_args)
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

    def _building(self, directory: str | os.PathLike[str], *, force: bool) -> TemporaryDirectory:
        return TemporaryDirectory(
            self._store,
            path_text(handler_path(directory)),
            overwrite=force,
            atomicity=self._atomicity_options,
            files=self._file_options,
            links=links_in_force(),
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

        check_publishing(self._atomicity_options, self._file_options)
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
            with self._told_to_others(joint):
                self._handler.save(joint, args=ckpt_args)
            return

        save = self._begin_jointly(directory, ckpt_args, custom_metadata, force)
        save.finish(save.call(self._handler, ckpt_args), None, self._complete_part)

    def _joint_directory(
        self, directory: str | os.PathLike[str], force: bool, custom_metadata: dict[str, Any] | None
    ) -> JointDirectory:
        jointly = is_joint(self._processes)
        return JointDirectory(path_or_url(directory), force, custom_metadata, jointly)

    @contextmanager
    def _told_to_others(self, joint: JointDirectory) -> Generator[None]:
        """Tell the other processes of a failure before this one has begun: they would wait for it."""
        try:
            yield
        except Exception as error:
            if joint.jointly and not joint.begun.is_set():
                refuse_save(joint.path, error, JobOptions())
            raise

    def _hands_on_whole(self, directory: str | os.PathLike[str]) -> bool:
        """Whether the handler publishes the checkpoint, too, as those of one tree do for a whole job."""
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
        self._metadata_store.write(step_metadata_file_path(building.get()), about)

    def _complete(self, building: Building, custom_metadata: dict[str, Any] | None) -> None:
        """Let the handler complete what it wrote, write the metadata, and publish."""
        path = building.get()
        known = StepMetadata(custom_metadata=custom_metadata or {}, item_handlers=self._item_handlers(path))
        about = encode_step_metadata(known)
        file = step_metadata_file_path(path)
        told = {name: about[name] for name in ("item_handlers", "custom_metadata")}
        self._metadata_store.update(file, **told)
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
        if TEMPORARY_SUFFIX in path.name or not path.is_dir():
            return False

        options = self._atomicity_options
        if options is None or options.mode is not AtomicityMode.COMMIT_FILE:
            return True

        return bool((path / COMMIT_MARK).exists()) or options.allow_legacy_atomic_rename

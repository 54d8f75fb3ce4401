"""Saves through a handler in the background."""

from __future__ import annotations

__all__ = ("AsyncCheckpointer",)

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError
from concurrent.futures import Future as ThreadFuture
from functools import partial
from typing import Any

from penstock.blocking.background import run_sync, start_thread
from penstock.kernel.errors import ConfigError, SpecError
from penstock.orbax.common.job_processes import is_primary_host
from penstock.orbax.v0.checkpointers.checkpointer import Checkpointer, SaveContext
from penstock.orbax.v0.common.checkpoint_args import construct_checkpoint_args
from penstock.orbax.v0.common.monitoring import WRITE, WRITE_ASYNC, tell_of_async_save, timed
from penstock.orbax.v0.common.save_future import (
    ChainedFuture,
    Future,
    all_futures,
    cancel_all,
    remaining_secs,
    stopped,
)
from penstock.orbax.v0.common.temporary_directory import TemporaryDirectory
from penstock.orbax.v0.common.v0_options import (
    AsyncOptions,
    AtomicityOptions,
    FileOptions,
    MultiprocessingOptions,
)
from penstock.orbax.v0.handlers.checkpoint_handler import AsyncCheckpointHandler


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
        """How long a save may take after the copy, in seconds."""
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
        tell_of_async_save()
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
                found = run_sync(partial(self._handler.async_save, building.get(), args=ckpt_args))
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
        building: TemporaryDirectory,
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
            # Who waits is told now, and not when what takes too long has ended.
            self._cleaning = start_thread(_clean_up, building, futures, name="penstock.orbax.cleaning")
            raise
        except BaseException as error:
            if not _clean_up(building, futures):
                error.add_note(f"{building.get()} is still being written, and was not removed")
            raise

        tell_of_async_save(begun_s)

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
        with self._told_to_others(joint):
            self._futures = all_futures(run_sync(partial(self._handler.async_save, joint, args=ckpt_args)))

        then = self._before_publishing if is_primary_host(0) else _nothing
        return partial(_await_all, self._futures, self._timeout_s, then)

    def _await_joint(self, finish: Callable[[], None], begun_s: float) -> None:
        """Wait until all processes have saved, and the checkpoint is visible. Runs in a thread of its own."""
        with timed(f"{WRITE}background_duration_secs"):
            finish()

        tell_of_async_save(begun_s)

    def _before_publishing(self) -> None:
        if self._waiting_since is not None:
            remaining_secs(self._waiting_since, self._timeout_s)  # what the handler completed took time, too
        if self._callback is not None:
            self._callback()


def _clean_up(building: TemporaryDirectory, futures: Sequence[Future]) -> bool:
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

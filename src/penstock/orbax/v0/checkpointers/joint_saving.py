"""Saves of one checkpointer that all processes of a job make together, each by its handlers."""

from __future__ import annotations

__all__ = ("JointSave", "JointSaves", "described_call")

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, cast, final

from penstock.blocking.background import run_sync
from penstock.blocking.loop_thread import LoopThread
from penstock.checkpointer.checkpointer import Checkpointer as NativeCheckpointer
from penstock.orbax.common.handler_paths import handler_path
from penstock.orbax.joint.joint_place import joint_place
from penstock.orbax.joint.plain_values import described_json, described_message
from penstock.orbax.v0.common.joint_directory import job_options
from penstock.orbax.v0.common.named_items import Composite
from penstock.orbax.v0.common.save_future import (
    ChainedFuture,
    Future,
    all_futures,
    cancel_all,
    remaining_secs,
    stopped,
)
from penstock.orbax.v0.common.unchanged_links import StepLinks, links_in_force
from penstock.orbax.v0.common.v0_options import MultiprocessingOptions
from penstock.orbax.v0.handlers.checkpoint_handler import AsyncCheckpointHandler
from penstock.orbax.v0.handlers.json_handler import JsonSaveArgs
from penstock.orbax.v0.handlers.proto_handler import ProtoSaveArgs

if TYPE_CHECKING:
    from penstock.orbax.joint.joint_build import JointBuild


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
            overwrite: Whether a checkpoint that lies there may be replaced.

        Raises:
            PeerError: If the processes differ, or one of them does not come.
            ValueError: If something exists at `path` and `overwrite` is off.
        """
        from penstock.orbax.joint.joint_build import JointBuild  # one process needs nothing of it

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
            self._build.save.result()

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

"""Watching a directory of steps: each step as it becomes durable."""

from __future__ import annotations

__all__ = (
    "Watch",
    "watch",
)

import math
import os
import time
from collections.abc import AsyncIterator, Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Final, final

from anyio import Event, create_task_group, move_on_after, sleep_forever
from anyio.lowlevel import checkpoint

from penstock.config.config import READ_S
from penstock.event_loop.imports import NeededModules, load
from penstock.event_loop.interpreter_settings import LoopOptions
from penstock.handlers.stores.publishing.paths import path_or_url, scheme_of
from penstock.kernel.concurrency.threads import Threads
from penstock.kernel.errors import SpecError
from penstock.kernel.pipeline.failures import short_tracebacks
from penstock.kernel.protocols.stores import Hold, NoHold, Store, take_hold
from penstock.steps.step_names import NameFormat, StepNames

SETTLING_MS = 50
"""Changes within this time count as one."""


def tells_changes() -> bool:
    """True if `watchfiles` is installed."""
    return find_spec("watchfiles") is not None


async def set_at_change(directory: str, changed: Event) -> None:
    """Set `changed` when an entry of the directory changes; return at once if it cannot be watched.

    It may never be set: network file systems do not report what other machines do.

    Cancellation:
        Takes effect within some tens of milliseconds.
    """
    watchfiles: Any = import_module("watchfiles")
    stop = Event()
    changes = watchfiles.awatch(
        directory,
        watch_filter=None,
        recursive=False,
        debounce=SETTLING_MS,
        step=SETTLING_MS,
        stop_event=stop,
    )
    async with create_task_group() as tasks:
        tasks.start_soon(_set_when_cancelled, stop)
        try:
            async for _ in changes:
                changed.set()
                break

            await changes.aclose()
        except (OSError, RuntimeError):  # it is not there (yet), or there are too many watches
            return
        finally:
            tasks.cancel_scope.cancel()


async def _set_when_cancelled(event: Event) -> None:
    """Wake the thread in which the library waits: it cannot be cancelled and would wait for seconds."""
    try:
        await sleep_forever()
    finally:
        event.set()


NEEDED_TO_WATCH: Final[NeededModules] = {
    "penstock.stores.store_finder": "StoreFinder",
    "penstock.steps.step_directory": "check_root",
}


def watch(
    root: str | os.PathLike[str],
    *,
    names: NameFormat | None = None,
    after: int | None = None,
    latest_only: bool = False,
    timeout_s: float | None = None,
    until: Callable[[], bool] | None = None,
    interval_s: float = 1.0,
) -> Watch:
    """Yield each step in `root` that becomes durable, ascending, beginning with the latest there is.

    ```python
    async for step in penstock.watch("run", timeout_s=600):
        state = await checkpointer.restore(f"run/{step}", like=state)
    ```

    While the body of the loop runs, no penstock on this machine deletes its step. Where the package
    `watchfiles` is installed (`penstock[watch]`) and the file system reports changes, a step is seen
    at once; in any case the root is listed every `interval_s`.

    Args:
        root: The directory of steps; it need not exist yet.
        names: Names of step directories.
        after: Begin with the first existing step after this one.
        latest_only: Skip steps that newer ones overtook while the body of the loop ran.
        timeout_s: End if no new step comes for this many seconds; by default, never.
        until: Called whenever there is no new step; the iteration ends once it returns True.
        interval_s: Seconds between two listings of the root.

    Raises:
        SpecError: If `interval_s` is not positive.
        PathError: If the root is itself a checkpoint.
        StorageError: If the root cannot be listed.

    Cancellation:
        At every wait.
    """
    return Watch(
        None,
        Threads(1).leaving_calls(READ_S),
        path_or_url(root),
        StepNames() if names is None else names,
        after=after,
        latest_only=latest_only,
        timeout_s=timeout_s,
        until=until,
        interval_s=interval_s,
    )


@short_tracebacks
@final
class Watch(AsyncIterator[int]):
    """Steps as they become durable; an async iterator. Each is held until the next one is requested.

    The loop may be left early: the hold ends with this object, or with `aclose`.

    Args:
        store: The one that `root` is in; None for that of the process's configuration.
        threads: For blocking calls.
        root: The directory of steps, in any store.
        names: The names of the steps.
        after: As for `watch`, like all that follow but the last.
        on_step: Called with each step and its name before it is yielded.
    """

    __slots__ = (
        "_held",
        "_interval_s",
        "_latest_only",
        "_on_step",
        "_timeout_s",
        "_until",
        "_watcher",
    )

    def __init__(
        self,
        store: Store | None,
        threads: Threads,
        root: str,
        names: NameFormat,
        *,
        after: int | None = None,
        latest_only: bool = False,
        timeout_s: float | None = None,
        until: Callable[[], bool] | None = None,
        interval_s: float = 1.0,
        on_step: Callable[[int, str], object] | None = None,
    ) -> None:
        if not interval_s > 0:
            raise SpecError(f"interval_s must be positive, not {interval_s}")

        self._watcher = _Watcher(store, threads, root, names, after)
        self._latest_only = latest_only
        self._timeout_s = math.inf if timeout_s is None else timeout_s
        self._until = until
        self._interval_s = interval_s
        self._on_step = on_step
        self._held: Hold = NoHold()

    async def __anext__(self) -> int:
        self._held.release()
        await load(NEEDED_TO_WATCH, LoopOptions())
        deadline = time.monotonic() + self._timeout_s
        while True:
            found = await self._watcher.next_step(latest_only=self._latest_only)
            if found is not None:
                step, name, self._held = found
                if self._on_step is not None:
                    self._on_step(step, name)

                return step

            if (self._until is not None and self._until()) or time.monotonic() >= deadline:
                raise StopAsyncIteration

            await self._watcher.wait(min(self._interval_s, deadline - time.monotonic()))

    async def aclose(self) -> None:
        """End the hold of the last step."""
        self._held.release()


@final
class _Watcher:
    """Finds the next step after those already seen."""

    __slots__ = ("_given", "_names", "_root", "_seen", "_threads")

    def __init__(
        self, store: Store | None, threads: Threads, root: str, names: NameFormat, after: int | None
    ) -> None:
        self._given = store
        self._threads = threads
        self._root = root
        self._names = names
        self._seen = after  # None: nothing yet; begin with the latest

    async def next_step(self, *, latest_only: bool) -> tuple[int, str, Hold] | None:
        """Return the next step, held; None if there is none yet."""
        while True:
            found = await self._threads.run(self._find, latest_only)
            if found is None:
                return None

            step, name = found
            path = os.path.join(self._root, name)
            held = await take_hold(self._store, self._threads, path)
            self._seen = step
            if await self._threads.run(self._is_published, path):
                return step, name, held

            held.release()  # it was deleted just now

    def _is_published(self, path: str) -> bool:
        from penstock.handlers.formats.orbax.discovery import step_at

        return step_at(self._store, path).is_published

    async def wait(self, most_s: float) -> None:
        """Return when the root may have changed, or after `most_s`."""
        changed = Event()
        with move_on_after(max(0.0, most_s)):
            if scheme_of(self._root) is not None or not tells_changes():
                await changed.wait()

            async with create_task_group() as tasks:
                tasks.start_soon(set_at_change, self._root, changed)
                await checkpoint()
                # A step that came between the last listing and the first event would be missed.
                if await self._threads.run(self._find, True) is None:
                    await changed.wait()

                tasks.cancel_scope.cancel()

    @property
    def _store(self) -> Store:
        if self._given is None:
            from penstock.config.config import Config
            from penstock.stores.store_finder import StoreFinder

            self._given = StoreFinder(None, Config.load().store).at(self._root)

        return self._given

    def _find(self, latest_only: bool) -> tuple[int, str] | None:
        from penstock.steps import step_directory as on_disk

        steps = on_disk.find_steps(self._store, self._root, self._names, after=self._seen)
        if not steps:
            on_disk.check_root(self._store, self._root)
            return None

        step = next(reversed(steps)) if latest_only or self._seen is None else next(iter(steps))
        return step, steps[step]

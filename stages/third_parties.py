"""What the stages of a save ask of handlers that third parties wrote, which write files of their own."""

from __future__ import annotations

__all__ = ("ThirdParties", "asking_third_parties", "finalize_handlers")

from collections.abc import AsyncGenerator, Iterable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import final

from anyio import Event, create_task_group, get_cancelled_exc_class, move_on_after, sleep_forever
from anyio.abc import TaskGroup

from penstock.kernel.adapter import AdaptedHandler
from penstock.kernel.capabilities import ItemsLayout
from penstock.kernel.messages import Background, Leaf, Pending
from penstock.kernel.run import SaveRun


@asynccontextmanager
async def asking_third_parties(run: SaveRun) -> AsyncGenerator[ThirdParties]:
    """Yield what has leaves saved by their handlers.

    Cancellation:
        A coroutine of theirs that withstands it is waited for: nobody can end it. After `run.undo_s`,
        `run.on_hang` is told of it.
    """
    async with create_task_group() as watch:
        yield ThirdParties(run, watch)
        watch.cancel_scope.cancel()


@final
class ThirdParties:
    """Asks the handlers of one save, one at a time."""

    __slots__ = ("_asked", "_items", "_run", "_watch")

    def __init__(self, run: SaveRun, watch: TaskGroup) -> None:
        self._run = run
        self._watch: TaskGroup | None = watch
        self._items = run.layout if isinstance(run.layout, ItemsLayout) else None
        self._asked: Background | None = None  # what is under way

    async def save(self, leaf: Leaf, handler: AdaptedHandler) -> Pending:
        """Have a leaf copied by its handler, which writes it into the directory of its item.

        Raises:
            HandlerFailedError: If the handler raised.
        """
        run, items, info = self._run, self._items, leaf.info
        folder = run.folder if items is None else items.folder(leaf)
        if items is not None:
            info = items.within(leaf)
        if self._watch is not None:
            self._watch.start_soon(self._tell_of_a_hang, name="penstock third parties")
            self._watch = None

        await run.workspace.open(folder)
        placed = replace(leaf, info=replace(info, directory=run.workspace.path(folder)))
        ended = Event()
        self._asked = Background(info.key_path, handler.name, "its serialize", ended.wait)
        try:
            pending = await handler.save(placed, run.threads, run.workspace)
        finally:
            self._asked = None
            ended.set()

        writes = "what it writes in the background"
        run.background.append(Background(info.key_path, pending.handler, writes, pending.wait))
        return pending

    async def _tell_of_a_hang(self) -> None:
        """Tell, once the save is given up, which coroutine does not come to its end."""
        try:
            await sleep_forever()
        except get_cancelled_exc_class():
            asked = self._asked
            if asked is not None:
                with move_on_after(self._run.undo_s, shield=True):
                    await asked.wait()

            if asked is not None and asked is self._asked and self._run.on_hang is not None:
                self._run.on_hang(asked)

            raise


async def finalize_handlers(run: SaveRun, leaves: Iterable[Leaf]) -> None:
    """Have third parties complete their files, once for each directory, and make those durable.

    Raises:
        HandlerFailedError: If a handler raised.

    Cancellation:
        A `finalize` that has begun goes on in its thread; it is among the run's background work.
    """
    items = run.layout if isinstance(run.layout, ItemsLayout) else None
    # One handler may serve several types. Keyed by identity: it need not be hashable.
    calls: dict[tuple[int, str], tuple[AdaptedHandler, str]] = {}
    for leaf in leaves:
        if isinstance(leaf.handler, AdaptedHandler):
            folder = run.folder if items is None else items.folder(leaf)
            calls.setdefault((id(leaf.handler.inner), folder), (leaf.handler, folder))

    for handler, folder in calls.values():
        call = handler.finalizing(run.workspace.path(folder), run.threads, run.workspace)
        run.background.append(call)
        await call.wait()

    # They need not sync what they wrote.
    await run.threads.run(run.store.sync_tree, run.workspace.temporary)

"""What the stages of a save ask of handlers that third parties wrote, which write files of their own."""

from __future__ import annotations

__all__ = ("finalize_handlers", "save_by_handler")

from collections.abc import Iterable
from dataclasses import replace

from anyio import Event, create_task_group, get_cancelled_exc_class, move_on_after, sleep_forever

from penstock.kernel.messages.save import Background, Leaf, Pending
from penstock.kernel.pipeline.run_context import SaveRun
from penstock.kernel.plugins.adapted_handler import AdaptedHandler
from penstock.kernel.protocols.layouts import ItemsLayout
from penstock.kernel.storage.foreign_files import foreign_files


async def save_by_handler(run: SaveRun, leaf: Leaf, handler: AdaptedHandler) -> Pending:
    """Have a leaf copied by its handler, which writes it into the directory of its item.

    Raises:
        HandlerFailedError: If the handler raised.
        UnsupportedByStoreError: If nobody but penstock can write files to the store.

    Cancellation:
        A coroutine that withstands it is waited for: nobody can end it. After `run.undo_s`,
        `run.on_hang` is told of it.
    """
    foreign_files(run.store, run.path)
    folder, info = run.folder, leaf.info
    if isinstance(run.layout, ItemsLayout):
        folder, info = run.layout.folder(leaf), run.layout.within(leaf)

    await run.workspace.open(folder)
    placed = replace(leaf, info=replace(info, directory=run.workspace.path(folder)))
    ended = Event()
    coroutine = Background(info.key_path, handler.name, "its serialize", ended.wait)
    pending: Pending | None = None
    failure: Exception | None = None
    async with create_task_group() as watch:
        watch.start_soon(_tell_of_a_hang, run, coroutine, name="penstock third party")
        try:
            pending = await handler.save(placed, run.threads, run.workspace)
        except Exception as error:
            failure = error  # raised below, as it is and not in a group
        finally:
            ended.set()

        watch.cancel_scope.cancel()

    if failure is not None:
        try:
            raise failure
        finally:
            del failure  # its traceback refers to this frame

    assert pending is not None, "a cancellation that the group was not asked for leaves it"
    writes = "what it writes in the background"
    run.background.append(Background(info.key_path, pending.handler, writes, pending.wait))
    return pending


async def _tell_of_a_hang(run: SaveRun, coroutine: Background) -> None:
    """Once the save is given up, tell of a coroutine that does not come to its end."""
    try:
        await sleep_forever()
    except get_cancelled_exc_class():
        with move_on_after(run.undo_s, shield=True) as waiting:
            await coroutine.wait()

        if waiting.cancelled_caught and run.on_hang is not None:
            run.on_hang(coroutine)

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
    place = run.workspace.temporary
    await run.threads.run(foreign_files(run.store, place).sync_tree, place)

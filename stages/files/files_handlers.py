"""Calls to handlers that write files of their own, for the stages of a save."""

from __future__ import annotations

__all__ = ("by_folder", "finalize_handlers", "save_by_handler")

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from anyio import Event, create_task_group, get_cancelled_exc_class, sleep_forever

from penstock.kernel.messages.save import Leaf, Pending
from penstock.kernel.pipeline.run_context import SaveRun
from penstock.kernel.protocols.files_handler import Background, FilesHandler
from penstock.kernel.protocols.store_capabilities import foreign_files


def by_folder(run: SaveRun, leaves: Iterable[Leaf]) -> Iterator[tuple[str, tuple[Leaf, ...]]]:
    """Yield the leaves of each directory, in order, with its name relative to the checkpoint."""
    items = run.layout.folders
    found: dict[str, list[Leaf]] = {}
    for leaf in leaves:
        found.setdefault(run.folder if items is None else items.folder(leaf), []).append(leaf)

    for folder, there in found.items():
        yield folder, tuple(there)


async def save_by_handler(
    run: SaveRun, leaves: Sequence[Leaf], handler: FilesHandler, folder: str
) -> Pending:
    """Have the handler copy leaves and write them into the directory `folder`.

    Raises:
        HandlerFailedError: If the handler raised.
        UnsupportedByStoreError: If only penstock itself can write files to the store.

    Cancellation:
        A handler's coroutine that resists it is waited for, because it cannot be ended. After a while
        the hang is reported.
    """
    foreign_files(run.store, run.path)
    await run.workspace.open(folder)
    directory = run.workspace.path(folder)
    items = run.layout.folders
    placed = [
        replace(leaf, info=replace(leaf.info if items is None else items.within(leaf), directory=directory))
        for leaf in leaves
    ]
    ended = Event()
    coroutine = Background(leaves[0].info.key_path, handler.name, "its serialize", ended.wait)
    writing: Background | None = None
    failure: Exception | None = None
    async with create_task_group() as watch:
        watch.start_soon(_tell_of_a_hang, run, coroutine, name="penstock third party")
        try:
            writing = await handler.save(placed, run.threads, run.workspace)
        except Exception as error:
            failure = error  # raised below, not wrapped in an exception group
        finally:
            ended.set()

        watch.cancel_scope.cancel()

    if failure is not None:
        try:
            raise failure
        finally:
            del failure  # its traceback refers to this frame

    assert writing is not None, "a cancellation from outside the group leaves it"
    run.handler_work.add(writing)
    staged = tuple([leaf.without_value() for leaf in leaves])
    return Pending(staged, handler, folder, writing)


async def _tell_of_a_hang(run: SaveRun, coroutine: Background) -> None:
    """Once the save is abandoned, report a coroutine that does not end."""
    try:
        await sleep_forever()
    except get_cancelled_exc_class():
        await run.handler_work.wait_for_coroutine(coroutine)
        raise


async def finalize_handlers(run: SaveRun, handled: Iterable[Pending]) -> None:
    """Have handlers complete their files, once per directory, and make the files durable.

    Raises:
        HandlerFailedError: If a handler raised.

    Cancellation:
        A `finalize` that has begun goes on in its thread; it is among the run's background work.
    """
    # One handler may serve several types. Keyed by identity: it need not be hashable.
    calls = {(id(each.handler.inner), each.folder): each for each in handled}
    for each in calls.values():
        call = each.handler.finalizing(run.workspace.path(each.folder), run.threads, run.workspace)
        run.handler_work.add(call)
        await call.wait()

    # Handlers need not sync what they wrote.
    place = run.workspace.temporary
    await run.threads.run(foreign_files(run.store, place).sync_tree, place)

"""Files besides array data: documents, what handlers write themselves, and how open files are closed."""

from __future__ import annotations

__all__ = (
    "by_folder",
    "closing",
    "commit_own",
    "finalize_handlers",
    "log_transfers",
    "opened",
    "save_by_handler",
    "write_documents",
    "write_each",
)

import json
import os
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final, Protocol, TypeVar

from anyio import Event, create_task_group, get_cancelled_exc_class, move_on_after, sleep_forever

from penstock.kernel.concurrency.threads import Threads
from penstock.kernel.errors import StorageError, UnsupportedByStoreError
from penstock.kernel.messages.save import Leaf, Leaves, Pending, SavePlan, WrittenBatch
from penstock.kernel.pipeline.run_context import SaveRun
from penstock.kernel.pipeline.together import MANY, at_once
from penstock.kernel.protocols.leaf import LeafSpec
from penstock.kernel.protocols.leaf_handlers import Background, FilesHandler
from penstock.kernel.protocols.stores import SystemFiles, Transfers
from penstock.kernel.protocols.written import STAGE_RECORD, Document
from penstock.stages.messages.batching import arrived_leaves

if TYPE_CHECKING:
    from structlog.stdlib import BoundLogger

# In a shield: a medium that hangs may not keep a cancelled save for ever.
CLOSING_S: Final = 30.0


async def commit_own(
    run: SaveRun, plan: SavePlan, batches: Sequence[WrittenBatch], marks: Sequence[Document] = ()
) -> int:
    """Compare what this process wrote with its plan, and write the documents of that.

    Args:
        run: Of the save.
        plan: Of the save.
        batches: What was written, and what the base holds.
        marks: Further documents at the root of the checkpoint.

    Returns:
        How many data files there are.
    """
    handled = [each for batch in batches for each in batch.handled]

    def checked() -> tuple[Leaves, int]:
        leaves = arrived_leaves(plan, batches)
        return leaves, 0 if handled else write_documents(run, leaves, plan, batches, marks)

    leaves, n_files = await run.threads.run(checked)
    if handled:  # they complete their files first
        await finalize_handlers(run, handled)
        n_files = await run.threads.run(write_documents, run, leaves, plan, batches, marks)

    return n_files


def write_documents(
    run: SaveRun,
    leaves: Leaves,
    plan: SavePlan,
    batches: Sequence[WrittenBatch],
    marks: Sequence[Document] = (),
) -> int:
    """Make the index, the metadata and, last, the commit mark durable, then the directories. Blocking.

    The names of files that other processes wrote are durable since those said so.

    Args:
        run: Of the save.
        leaves: All of them, as they were written.
        plan: Of the save.
        batches: What was written.
        marks: Further documents at the root of the checkpoint.

    Returns:
        How many data files there are.
    """
    files: set[str] = set()
    others: set[str] = set()
    for batch in batches:
        (others if batch.are_names_durable else files).update(batch.written.files)

    directories = dict.fromkeys(["", *map(os.path.dirname, sorted(files))])
    beside = [*plan.beside, *marks]
    if plan.changes and run.layout.places is None:
        beside.append(Document(os.path.join(run.folder, STAGE_RECORD), stage_record(plan)))
    for document in beside:
        _write_document(run, document, directories)

    documents = run.layout.documents(
        leaves,
        batches,
        started_ns=run.started_ns,
        custom_metadata=run.custom_metadata,
        digests=plan.digests,
        beside=beside,
    )
    write_each(documents, partial(_write_document, run, directories=directories))
    at_once(lambda name: run.store.sync_directory(run.workspace.path(name)), list(directories))
    return len(files | others)


_SMALL: Final = 64 * 2**10
"""Bytes of a document of which many are held at a time: those of arrays, where each is stored by itself."""
_TOGETHER: Final = 2 * MANY


def write_each(documents: Iterable[Document], write: Callable[[Document], object]) -> None:
    """Write documents, of many small ones several at a time. The last one is written last. Blocking.

    Args:
        documents: Made one after another; few are held at a time. The last one is the mark.
        write: Makes one of them durable.
    """
    waiting: list[Document] = []
    for document in documents:
        if len(document.data) < _SMALL:
            waiting.append(document)
        else:
            while waiting:
                write(waiting.pop(0))

            write(document)

        del document  # while the next one is made
        if len(waiting) > _TOGETHER:
            last = waiting.pop()
            at_once(write, waiting)
            waiting = [last]

    while waiting:
        write(waiting.pop(0))


def _write_document(run: SaveRun, document: Document, directories: dict[str, None]) -> None:
    directory = os.path.dirname(document.path)
    if directory not in directories:
        run.workspace.make_directory(directory)
        directories[directory] = None

    run.store.write_file(run.workspace.path(document.path), document.data)


def stage_record(plan: SavePlan) -> bytes:
    """Return the document of the changes that stages declared. Pure.

    A JSON object: for each changed leaf, by stored name, the stages in order, and the leaf before and after.
    Options of a stage are not recorded, because one may be a key.
    """
    leaves = {
        plan.infos[index].name: {
            "stages": list(change.stages),
            "before": _described(change.before),
            "after": _described(plan.specs[index]),
        }
        for index, change in plan.changes.items()
    }
    return json.dumps({"version": 1, "leaves": leaves}, separators=(",", ":")).encode()


def _described(spec: LeafSpec) -> dict[str, object]:
    found: dict[str, object] = {"dtype": spec.dtype, "shape": spec.shape}
    return found if spec.codec is None else {**found, "codec": spec.codec}


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
    if run.store.system_files is None:
        raise UnsupportedByStoreError("let a leaf handler write files at", run.path, run.store, SystemFiles)

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
    assert run.store.system_files is not None, "asked before a handler wrote"
    await run.threads.run(run.store.system_files.sync_tree, place)


class _File(Protocol):
    def close(self) -> None: ...


F = TypeVar("F", bound=_File)


@asynccontextmanager
async def closing(threads: Threads, files: Callable[[], Iterable[_File]]) -> AsyncGenerator[None]:
    """Close all of `files()` at the end of the block, even if closing one of them fails.

    Raises:
        StorageError: If a file could not be closed. If the body failed, its own error is raised instead:
            it came first, and the files no longer matter.

    Cancellation:
        The files are closed all the same, in at most `CLOSING_S` seconds.
    """
    try:
        yield
    except BaseException:
        with move_on_after(CLOSING_S, shield=True), suppress(StorageError):
            # In its own thread: all others may hang, as reads of a medium that does not answer.
            await Threads(1).leaving_calls(after_s=0.0).run(_close, files)

        raise

    with move_on_after(CLOSING_S, shield=True):
        await threads.run(_close, files)


@asynccontextmanager
async def opened(threads: Threads, open_file: Callable[[], F]) -> AsyncGenerator[F]:
    """Open a file in a thread, and close it at the end of the block, as `closing` does.

    Raises:
        StorageError: If the file could not be opened, or closed.

    Cancellation:
        A file that is being opened meanwhile is closed, too.
    """
    files: list[F] = []
    async with closing(threads, lambda: files):
        await threads.run(lambda: files.append(open_file()))
        yield files[0]


def _close(files: Callable[[], Iterable[_File]]) -> None:
    with ExitStack() as stack:
        for file in files():
            stack.callback(file.close)


class _CountedFile(Protocol):
    @property
    def transfers(self) -> Transfers: ...


def log_transfers(events: BoundLogger, event: str, files: Iterable[_CountedFile]) -> None:
    """Log one event with the sums over all files; none if there is no file.

    Args:
        events: Of the run.
        event: `data.read` or `data.written`.
        files: May be closed.
    """
    transfers = [file.transfers for file in files]
    if transfers:
        total = sum(transfers, Transfers())
        events.info(
            event,
            n_files=len(transfers),
            direct_bytes=total.direct_bytes,
            buffered_bytes=total.buffered_bytes,
        )

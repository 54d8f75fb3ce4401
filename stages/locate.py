"""The first stage of a restore: finds the checkpoint at a path and reads its documents."""

from __future__ import annotations

__all__ = (
    "Locate",
    "LocateOnce",
    "open_leased",
    "split_names",
)

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, TypeVar, cast, final

from penstock.kernel.errors import SpecError
from penstock.kernel.messages.restore import Located, RestoreRequest
from penstock.kernel.pipeline.run_context import RestoreRun
from penstock.kernel.pipeline.stage import Actor, Messages
from penstock.kernel.pipeline.statistics import Advice
from penstock.kernel.protocols.layouts import (
    ChecksummedCheckpoint,
    NamedTensors,
    Opening,
    StoredCheckpoint,
)
from penstock.kernel.rules import Rules
from penstock.stages.pytree.flattening import flatten_tree

T = TypeVar("T")


@final
@dataclass(frozen=True, slots=True)
class Locate:
    """Takes a `RestoreRequest`, yields a `Located`. Reads documents and index, no array bytes.

    What reading and decoding documents of more than 1 MiB takes is leased from the budget meanwhile.

    Raises:
        NotACheckpointError: If there is nothing to restore at the path.
        IncompleteCheckpointError: If a save was interrupted there.
        CorruptCheckpointError: If a document is damaged.
        SpecError: If names are to be split but cannot be.
    """

    messages: ClassVar[Messages] = {RestoreRequest: Located}
    advice: ClassVar[Advice] = Advice(
        "It reads the documents, which grow with the leaves and chunks of the checkpoint: keep "
        "one Checkpointer open, which remembers them.",
    )

    @asynccontextmanager
    async def open(self, run: RestoreRun, /) -> AsyncGenerator[Actor]:
        """Yield the actor of one restore."""
        yield partial(_locate, run)


async def _locate(run: RestoreRun, request: RestoreRequest) -> Located:
    finish = partial(_with_options, request)
    return Located(await open_leased(run, request.path, request.options.item, finish), request)


async def open_leased(
    run: RestoreRun, path: str, item: str | None, make: Callable[[StoredCheckpoint], T]
) -> T:
    """Open a checkpoint, and return what `make` makes of it.

    While long documents are read and decoded, what that takes is leased; more than the whole budget is
    admitted alone, with the event `memory.oversize`. What is kept of them does not count: a caller with a
    lease must not wait for another one, and the caller goes on to lease the bytes of arrays. For that
    reason the caller holds none yet.

    Args:
        run: Whose finder, store, threads and budget are used.
        path: As for `Layout.find`.
        item: As for `Layout.find`.
        make: Called in a worker thread, as long as the lease lasts.

    Raises:
        PenstockError: What the layout or `make` raises.

    Cancellation:
        The lease ends; a thread that still reads may be abandoned.
    """
    found, made = await run.threads.run(_opened_if_small, run, path, item, make)
    if not found.nbytes:
        return cast("T", made)

    with await run.lease(found.nbytes, "", prioritised=False, about={"documents_of": path}):
        return await run.threads.run(_opened, found, make)


def _opened_if_small(
    run: RestoreRun, path: str, item: str | None, make: Callable[[StoredCheckpoint], T]
) -> tuple[Opening, T | None]:
    found = run.finder.find(run.store, path, item)
    return found, None if found.nbytes else _opened(found, make)


def _opened(found: Opening, make: Callable[[StoredCheckpoint], T]) -> T:
    return make(found.open())


def _with_options(request: RestoreRequest, checkpoint: StoredCheckpoint) -> StoredCheckpoint:
    if request.options.verify is False and isinstance(checkpoint, ChecksummedCheckpoint):
        checkpoint = checkpoint.without_checksums()
    if request.options.split is not None:
        checkpoint = split_names(checkpoint, request.options.split)
    if request.options.rules is not None:
        from penstock.stages.rules.application import derive  # few restores have rules

        checkpoint = derive(Rules.of(request.options.rules), checkpoint, has_target=request.has_like)
    if request.has_like and isinstance(checkpoint, NamedTensors):
        flat, _ = flatten_tree(request.like)
        checkpoint = checkpoint.following([(leaf.info, leaf.value) for leaf in flat])

    return checkpoint


def split_names(checkpoint: StoredCheckpoint, separator: str) -> StoredCheckpoint:
    """Return a checkpoint of flat names as a tree, by splitting its names.

    Args:
        checkpoint: Of a format without structure, such as safetensors.
        separator: What separates the keys in a name, such as `"."`.

    Raises:
        SpecError: If the checkpoint has its own structure, or its names cannot be split.
    """
    if not separator:
        raise SpecError("split is empty; it must be the text that separates the keys in a name, such as '.'")
    if not isinstance(checkpoint, NamedTensors):
        raise SpecError(f"{checkpoint.path} has a structure of its own; split is only for safetensors")

    return checkpoint.split(separator)


@final
@dataclass(frozen=True, slots=True)
class LocateOnce:
    """Does what `locate` does, in all processes of a job at one time.

    Attributes:
        share: Gives every process the bytes that process 0 has. Called once.
        record: Returns a store that keeps its answers.
        answered: Returns a store that has them.
    """

    messages: ClassVar[Messages] = {RestoreRequest: Located}

    share: Callable[[bytes | None], Awaitable[bytes]]
    record: Callable[[Any], Any]
    answered: Callable[[Any, bytes], Any]

    @asynccontextmanager
    async def open(self, run: RestoreRun, /) -> AsyncGenerator[Actor]:
        """Yield the actor of one restore."""

        async def locate(request: RestoreRequest, /) -> Located:
            if run.coordinator.is_primary:  # one asks the store; the others get its answers
                recorder = self.record(run.store)
                located = await _locate(replace(run, store=recorder), request)
                await self.share(await run.threads.run(recorder.encoded))
                return located

            answers = await self.share(None)
            answered = await run.threads.run(self.answered, run.store, answers)
            del answers
            try:
                return await _locate(replace(run, store=answered), request)
            finally:
                answered.forget()

        yield locate

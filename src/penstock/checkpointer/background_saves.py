"""The background saves of one Checkpointer, and the failures that no caller has seen yet."""

from __future__ import annotations

__all__ = ("BackgroundSaves", "SaveOptions")

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final
from weakref import WeakValueDictionary

from anyio import Lock

from penstock.checkpointer.engine import Compare, Engine
from penstock.checkpointer.pipelines import First, fitting_pipeline, prioritised
from penstock.checkpointer.save_items import for_items
from penstock.checkpointer.save_task import SaveTask
from penstock.handlers.layouts.item_types import Composite
from penstock.kernel.concurrency.threads import Threads
from penstock.kernel.errors import SaveCancelledError
from penstock.kernel.messages.save import TreeToSave
from penstock.kernel.pipeline.pipeline import Pipeline
from penstock.kernel.pipeline.run_context import SaveRun
from penstock.kernel.storage.workspace import Overwrite


@final
@dataclass(frozen=True, slots=True)
class SaveOptions:
    """The options of `Checkpointer.save`, which says what they mean."""

    overwrite: Overwrite
    prioritise: First | None
    custom_metadata: Mapping[str, Any] | None
    pipeline: Pipeline[SaveRun] | None
    save_args: object
    base: str | os.PathLike[str] | None
    compare: Compare


@final
class BackgroundSaves:
    """Holds every save that is under way or failed unseen. Used in one event loop."""

    __slots__ = ("_saves", "_turns")

    def __init__(self) -> None:
        self._saves: list[SaveTask] = []
        # A lock lives as long as a save holds or awaits it, so paths do not pile up.
        self._turns: WeakValueDictionary[str, Lock] = WeakValueDictionary()

    def turn(self, path: str) -> Lock:
        """Return the lock that serialises saves to `path`."""
        return self._turns.setdefault(path, Lock(fast_acquire=True))

    async def make(
        self,
        threads: Threads,
        engine: Engine,
        pipeline: Pipeline[SaveRun],
        path: str,
        tree: object,
        options: SaveOptions,
    ) -> SaveTask:
        """Return a save that is not started yet. It alone holds the tree, once the caller lets go of it.

        Args:
            threads: For blocking calls.
            engine: What all saves share.
            pipeline: The stages, unless the options have others.
            path: The destination, absolute.
            tree: A tree, or a `Composite` of named items.
            options: What was asked for.

        Raises:
            SpecError: If the options do not fit, or the pipeline cannot work.
            PenstockError: If an earlier save failed and nobody was told yet.
        """
        self.raise_unseen()
        save_args, first = options.save_args, options.prioritise
        if isinstance(tree, Composite):
            engine, tree, save_args, first = await threads.run(for_items, engine, tree, save_args, first)

        run = engine.save_run(
            path,
            threads,
            overwrite=options.overwrite,
            custom_metadata=options.custom_metadata,
            save_args=save_args,
            base=options.base,
            compare=options.compare,
        )
        chosen = pipeline
        if options.pipeline is not None:
            chosen = fitting_pipeline(options.pipeline, engine.layout, joint=engine.is_joint)

        chosen = prioritised(chosen, first)
        if chosen is not pipeline:  # which was checked when the Checkpointer was made
            chosen.check(TreeToSave)

        undo_s = engine.config.stopping.undo_s
        message = TreeToSave(tree, chosen.spec_changes, chosen.codec_choice)
        return SaveTask(chosen, run, message, self.turn(path), undo_s)

    def add(self, save: SaveTask) -> None:
        """Add a save, and drop ended saves whose failure, if any, was seen."""
        self._saves = [other for other in self._saves if not other.future.done or other.promise.error_unseen]
        self._saves.append(save)

    @property
    def under_way(self) -> bool:
        """True if a save has not ended."""
        return any(not save.future.done for save in self._saves)

    def abandon(self) -> Sequence[str]:
        """Tell threads that wait for saves under way that they will not end; return where these were going.

        From any thread, once the event loop will never run again.
        """
        paths: list[str] = []
        for save in tuple(self._saves):
            path = save.future.path
            if not save.future.done:
                problem = f"the event loop ended in the middle of the save of {path!r}"
                save.promise.fail(SaveCancelledError(problem))
                paths.append(path)

        return paths

    async def wait_ended(self) -> None:
        """Wait until all saves that were added so far have ended."""
        for save in tuple(self._saves):
            await save.wait_ended()

    def raise_unseen(self) -> None:
        """Raise the first unseen failure, if there is one."""
        for save in self._saves:
            error = save.promise.take_unseen()
            if error is not None:
                try:
                    raise error
                finally:
                    del error  # the traceback refers to this frame

    def raise_on_leaving(self, failure: BaseException | None) -> None:
        """Raise `failure` or, without one, the first unseen failure, if any.

        Further unseen failures are added to it as notes.
        """
        unseen = self.take_unseen()
        failure = failure or next(iter(unseen.values()), None)
        if failure is None:
            return

        for path, other in unseen.items():
            if other is not failure:
                failure.add_note(f"the background save of {path!r} failed too: {other!r}")

        try:
            raise failure
        finally:
            del failure, unseen  # the traceback refers to this frame

    def take_unseen(self) -> dict[str, BaseException]:
        """Return every unseen failure, by path. The caller must raise or report them."""
        unseen: dict[str, BaseException] = {}
        for save in self._saves:
            error = save.promise.take_unseen()
            if error is not None:
                unseen.setdefault(save.future.path, error)

        return unseen

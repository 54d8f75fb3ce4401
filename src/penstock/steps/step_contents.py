"""The contents of a step: one tree or several items, and metrics."""

from __future__ import annotations

__all__ = ("StepMetadata", "describe_step", "item_names", "restore_step", "step_items")

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final

from penstock.checkpointer.description import CheckpointMetadata, describe_checkpoint
from penstock.checkpointer.operations import Operations, RestoreCall
from penstock.checkpointer.restores import result_check
from penstock.handlers.formats.orbax.checkpoint_documents import SealedDocuments
from penstock.handlers.formats.orbax.discovery import contents_of, nothing_at
from penstock.handlers.layouts.item_types import Composite, Json
from penstock.handlers.stores.publishing.reading import Reading
from penstock.kernel.concurrency.threads import Threads
from penstock.kernel.errors import NotACheckpointError, SpecError
from penstock.kernel.pipeline.run_context import RestoreRun
from penstock.kernel.protocols.stores import Store
from penstock.kernel.words import counted
from penstock.steps.step_directory import METRICS, TREE, StepReader


@final
@dataclass(frozen=True, slots=True)
class StepMetadata:
    """The content of a step."""

    step: int
    path: str
    items: Mapping[str, CheckpointMetadata] = field(repr=False)  #: by name; a single tree is called `default`
    metrics: Mapping[str, Any] | None = None
    custom_metadata: Mapping[str, Any] | None = None  #: the caller's metadata
    committed_at_ns: int | None = None  #: wall clock, nanoseconds since the epoch

    def __repr__(self) -> str:
        counts = {name: counted(len(held.leaves), "leaf", "leaves") for name, held in self.items.items()}
        items = ", ".join(f"{name} ({count})" for name, count in counts.items())
        metrics = "" if self.metrics is None else f", metrics={dict(self.metrics)!r}"
        return f"<StepMetadata step {self.step} {self.path!r}: {items}{metrics}>"

    @property
    def tree(self) -> Any:
        """The tree of a step that holds one, with a `LeafMetadata` for each leaf."""
        if len(self.items) != 1:
            raise SpecError(f"step {self.step} has the items {', '.join(self.items)}; use .items")

        return next(iter(self.items.values())).tree


def step_items(items: object, metrics: Mapping[str, Any] | None) -> Composite:
    """Return the value that is saved as a step.

    Raises:
        SpecError: If there are metrics and an item called `metrics`.
    """
    named = dict(items) if isinstance(items, Composite) else {TREE: items}
    if metrics is not None:
        if METRICS in named:
            raise SpecError(f"an item cannot be called {METRICS!r} when there are metrics")

        named[METRICS] = Json(metrics)

    return Composite(named)


def item_names(store: Store, path: str) -> list[str]:
    """Name the items of the step at `path`, without its metrics; none if the step is one tree. Blocking.

    Raises:
        NotACheckpointError: If there is no step.
    """
    kind = store.kind(path)
    if kind is None:
        raise nothing_at(store, path)
    if kind != "directory":
        raise NotACheckpointError(path, "is a file, and no step")

    return [name for name in contents_of(store, path).items if name != METRICS]


async def describe_step(run: RestoreRun, path: str, step: int) -> StepMetadata:
    """Describe a step: read the documents of every item, and nothing else.

    Raises:
        NotACheckpointError: If there is no such step.
        CorruptCheckpointError: If a document is damaged, or a link leads out of the step.
    """
    names = await run.threads.run(_inner_items, run.store, path)
    items = {name or TREE: await describe_checkpoint(run, path, name) for name in names}
    return await run.threads.run(_with_the_rest, run.store, path, step, items)


def _inner_items(store: Store, path: str) -> Sequence[str | None]:
    """Name the items of a step; one without a name is the step itself."""
    names = item_names(store, path)
    store.check_links(path, path)  # metrics and metadata are next to the items

    return names or [None]


def _with_the_rest(
    store: Store, path: str, step: int, items: Mapping[str, CheckpointMetadata]
) -> StepMetadata:
    """Add the metrics and metadata next to the items."""
    inside = store.list_directory(path)
    about = SealedDocuments.open(store, path, inside).about(inside)
    return StepMetadata(
        step,
        os.path.abspath(path),
        items,
        StepReader(store).metrics(path),
        about.custom_metadata,
        about.committed_at_ns,
    )


async def restore_step(
    operations: Operations, threads: Threads, path: str, like: Any, call: RestoreCall, as_type: object
) -> Any:
    """Return the tree of the step at `path`, if it holds one or one is asked for; else a `Composite`.

    Args:
        operations: Of a Checkpointer.
        threads: For blocking calls.
        path: Of the step.
        like: `...` for everything; a target of one tree; or a `Composite` of targets, which names the
            items wanted.
        call: The options, for each item. An `item` among them is restored alone.
        as_type: The class of the result, or None.
    """
    check = None if as_type is None else result_check(path, as_type)
    if call.options.item is not None or (like is not ... and not isinstance(like, Composite)):
        found = await operations.restore(path, like, call)
        if check is not None:
            check(found)

        return found

    async def read(source: Reading) -> Any:
        if like is not ...:
            return Composite(await operations.restore_items(path, like, list(like), call))

        names = await threads.run(item_names, source.store, path)
        if not names or TREE in names:
            return await operations.restore(path, ..., call)

        return Composite(await operations.restore_items(path, None, names, call))

    found = await operations.engine.at(path).read_unchanged(path, threads, read)
    if check is not None:
        check(found)

    return found

"""Writes stored checkpoints again, piece by piece: the common part of conversion, repair and encoding."""

from __future__ import annotations

__all__ = ("Limits", "Rewriting", "budget", "check_apart", "job_of")

import os
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, Final, TypeAlias, final

from penstock.checkpointer.checkpointer import Checkpointer, Path
from penstock.checkpointer.engine import coordinator_of_jax
from penstock.checkpointer.parts import MemoryKeywords, config_and_regulator
from penstock.checkpointer.pipelines import save_pipeline
from penstock.config.config import Config
from penstock.handlers.formats.orbax.orbax_layout import OrbaxLayout
from penstock.handlers.layouts.items_layout import CompositeLayout
from penstock.handlers.leaves.default_handlers import default_handlers
from penstock.handlers.leaves.handler_registry import HandlerRegistry
from penstock.handlers.leaves.stored_value import SourceFiles, StoredValue, StoredValueHandler
from penstock.handlers.stores.publishing.paths import scheme_of
from penstock.handlers.stores.publishing.reading import Reading
from penstock.kernel.concurrency.threads import Threads
from penstock.kernel.errors import PathError
from penstock.kernel.memory.regulator import MemoryRegulator
from penstock.kernel.messages.save import Committed, LeafBatch, SavePlan
from penstock.kernel.pipeline.pipeline import Pipeline
from penstock.kernel.pipeline.run_context import SaveRun, ShowProgress
from penstock.kernel.protocols.build_place import Overwrite
from penstock.kernel.protocols.coordinator import Coordinator
from penstock.kernel.protocols.layouts import Layout
from penstock.kernel.protocols.save_format import SaveFormat
from penstock.kernel.protocols.stores import Store
from penstock.kernel.protocols.written import Document
from penstock.reports.report import SaveReport
from penstock.rewriting.stored_items import StoredItems
from penstock.stages.device_to_host import DeviceToHost
from penstock.stages.files import closing
from penstock.stages.messages.batching import plan_of
from penstock.stages.resume import RECORD_BYTES, EndRecord, Record, Resume

_MOST_GATHERED: Final = 512 * 2**20

Limits: TypeAlias = "tuple[int | str | None, int | str | None, int | str | None, int | str | None]"
"""The four bounds of `MemoryKeywords`, in their order."""


def budget(
    config: Config | Path | None, limits: Limits, memory: MemoryRegulator | None
) -> tuple[Config, MemoryRegulator]:
    """Return the options and the budget that the keywords of a tool describe; see `config_and_regulator`."""
    keywords: MemoryKeywords = {
        "memory_limit": limits[0],
        "save_device_host_concurrent_bytes": limits[1],
        "save_concurrent_bytes": limits[2],
        "restore_concurrent_bytes": limits[3],
        "memory": memory,
    }
    return config_and_regulator(config, keywords)


def job_of(config: Config, given: Coordinator | None) -> tuple[Config, Coordinator]:
    """Return how the processes of this job agree, and the options of a Checkpointer that is given it.

    Args:
        config: Says which of them take part.
        given: By the caller; by default they agree by the service of `jax.distributed`.

    Raises:
        ConfigError: If a process was chosen that there is not.
    """
    if given is not None:
        return config, given

    coordinator = coordinator_of_jax(config.processes, config.job)
    chosen = replace(config.job, active_processes=None, key_prefix="")  # which the coordinator knows by now
    return replace(config, job=chosen), coordinator


def check_apart(source: str, destination: str) -> None:
    """Refuse to write into the source, or over a folder that contains it.

    Raises:
        PathError: If one of the paths is in the other.
    """
    for outer, inner in ((source, destination), (destination, source)):
        if inner.startswith(os.path.join(outer, "")):
            raise PathError(destination, f"cannot be written: {inner!r} lies in {outer!r}")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Rewriting:
    """Saves what was taken apart, from file to file.

    Args:
        store: Where the destination is.
        config: Options of the save.
        memory: The budget.
        coordinator: How the processes of a job agree; they divide the work.
        overwrite: Replace what is at the destination.
        save_format: How arrays are stored in Orbax's layout; by default in one OCDBT database, without a
            codec.
        source: Where the source is; None if in the same store.
        progress: As for `Checkpointer.save`.
    """

    store: Store
    config: Config
    memory: MemoryRegulator
    coordinator: Coordinator
    overwrite: Overwrite = False
    save_format: SaveFormat | None = None
    source: Store | None = None
    progress: ShowProgress = False

    @property
    def origin(self) -> Store:
        """The store of the source."""
        return self.store if self.source is None else self.source

    @asynccontextmanager
    async def source_files(
        self, threads: Threads, spill_directory: str | None = None
    ) -> AsyncGenerator[SourceFiles]:
        """Yield what opens the source's files, and close them at the end.

        Args:
            threads: That close them.
            spill_directory: Where temporary files are; None for the system's.
        """
        # As much as an eighth of the budget: two threads have four such pieces in hand, and their sources.
        gather_bytes = max(1, min(self.memory.limit // 8, _MOST_GATHERED))
        files = SourceFiles(self.origin, gather_bytes=gather_bytes, spill_directory=spill_directory)
        async with closing(threads, lambda: [files]):
            yield files

    async def save(
        self,
        source: Reading,
        final: str,
        items: StoredItems,
        layout: Layout | None = None,
        custom_metadata: Mapping[str, Any] | None = None,
        beside: Sequence[Document] = (),
        resume: Resume | None = None,
    ) -> SaveReport:
        """Save items at `final`, and publish them if their source is still the same.

        Args:
            source: Ends before the publication.
            final: Absolute.
            items: What to save.
            layout: The format; by default that of Orbax.
            custom_metadata: Added to that of the items.
            beside: Further documents of the checkpoint, named from it.
            resume: Records what is done, so that another save can go on if this one is killed. Of several
                processes it compares what they are asked.

        Raises:
            PenstockError: As `Checkpointer.save` raises it.

        Cancellation:
            Nothing is left at `final`.
        """
        layout = self._layout_of(items, final) if layout is None else layout
        custom = {**(items.custom_metadata or {}), **(custom_metadata or {})} or None
        async with Checkpointer(
            registry=_handlers(self.coordinator),
            save_pipeline=self._pipeline(source, beside, resume),
            layout=layout if items.parts is None else CompositeLayout(layout, items.parts),
            store=self.store,
            config=self.config,
            coordinator=self.coordinator,
            memory=self.memory,
        ) as checkpointer:
            save = await checkpointer.save(
                final,
                items.tree,
                overwrite=self.overwrite,
                custom_metadata=custom,
                staging="overlap",
                progress=self.progress,
            )
            return await save

    def _layout_of(self, items: StoredItems, final: str) -> Layout:
        scheme = scheme_of(final)
        return OrbaxLayout(
            self.save_format,
            plain_chunk=None if scheme is None else self.config.store.of_scheme(scheme).file_bytes,
            tree_custom_metadata=items.tree_custom_metadata,
        )

    def _pipeline(
        self, source: Reading, beside: Sequence[Document], resume: Resume | None
    ) -> Pipeline[SaveRun]:
        async def unchanged(committed: Committed, /) -> Committed:
            await source.end()
            return committed

        pipeline = _short_queues(save_pipeline())
        # What is stored is read into memory that is counted, by as many threads as there are processors.
        pipeline = pipeline.replace("device_to_host", DeviceToHost(one_thread_below_bytes=0))
        pipeline = pipeline.insert_before("finalize", unchanged, called="unchanged")
        if beside:
            pipeline = pipeline.insert_after("flatten", _adding(beside), called="beside")
        if resume is not None:
            pipeline = (
                pipeline.insert_before("prioritise", resume, called="resume")
                .insert_before("commit", Record(min(RECORD_BYTES, self.memory.limit)), called="record")
                .insert_before("finalize", EndRecord(), called="end_record")
            )

        return pipeline


def _short_queues(pipeline: Pipeline[SaveRun]) -> Pipeline[SaveRun]:
    """Read little ahead of the writing: nothing waits for a conversion to be staged."""
    return Pipeline(tuple(replace(slot, queue=1) if slot.queue else slot for slot in pipeline))


def _adding(documents: Sequence[Document]) -> Callable[[LeafBatch], Awaitable[LeafBatch]]:
    """Return a stage that has documents written next to what is saved."""
    plans: list[SavePlan] = []  # one for all batches

    async def add(batch: LeafBatch, /) -> LeafBatch:
        if not plans:
            plans.append(replace(plan_of([batch]), beside=documents))

        return replace(batch, plan=plans[0])

    return add


def _handlers(coordinator: Coordinator) -> HandlerRegistry:
    registry = default_handlers(entry_points=False)
    active, index = list(coordinator.processes), coordinator.process_index
    rank = active.index(index) if index in active else 0  # one that takes no part is refused by the save
    registry.register(StoredValue, StoredValueHandler(rank=rank, count=len(active)))
    return registry

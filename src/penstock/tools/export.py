"""Writing a tree as safetensors."""

from __future__ import annotations

__all__ = ("export_safetensors",)

from collections.abc import Mapping
from typing import Any

from penstock.checkpointer.checkpointer import Checkpointer, Path
from penstock.config.config import Config
from penstock.handlers.formats.safetensors.safetensors_layout import SafetensorsLayout
from penstock.handlers.leaves.handler_registry import HandlerRegistry
from penstock.kernel.memory.regulator import MemoryRegulator
from penstock.kernel.pipeline.failures import short_traceback
from penstock.kernel.pipeline.pipeline import Pipeline
from penstock.kernel.pipeline.run_context import SaveRun
from penstock.kernel.protocols.coordinator import Coordinator
from penstock.kernel.protocols.stores import Store
from penstock.reports.report import SaveReport
from penstock.rewriting.rewriting import budget


@short_traceback
async def export_safetensors(
    tree: object,
    destination: Path,
    *,
    max_shard_bytes: int | None = None,
    overwrite: bool = False,
    custom_metadata: Mapping[str, Any] | None = None,
    config: Config | Path | None = None,
    registry: HandlerRegistry | None = None,
    store: Store | None = None,
    save_pipeline: Pipeline[SaveRun] | None = None,
    coordinator: Coordinator | None = None,
    memory_limit: int | str | None = None,
    save_device_host_concurrent_bytes: int | str | None = None,
    save_concurrent_bytes: int | str | None = None,
    restore_concurrent_bytes: int | str | None = None,
    memory: MemoryRegulator | None = None,
) -> SaveReport:
    """Write a tree as safetensors, atomically and durably.

    The keys to each leaf, joined by `.`, are its tensor's name. Strings, None, empty containers, lists
    and PRNG keys are noted in `__metadata__`; shardings are not kept.

    Args:
        tree: Any PyTree of handled leaf types.
        destination: A file that ends in `.safetensors`, or a folder.
        max_shard_bytes: In a folder, most bytes of data in a file, before another begins; by default 5 GB.
        overwrite: Replace what is there, if it is safetensors and nothing else.
        custom_metadata: JSON values for `__metadata__`; texts are written as they are.
        config: As for `Checkpointer`, and so are all that follow.
        registry: Handlers for leaf types.
        store: Where `destination` is.
        save_pipeline: The stages of the save.
        coordinator: How the processes of a job agree.
        memory_limit: Host bytes that may be held.
        save_device_host_concurrent_bytes: Of these, how many may be staged.
        save_concurrent_bytes: Bytes that may be on their way to storage at once.
        restore_concurrent_bytes: Has no effect on a save; part of a budget.
        memory: The budget of a Checkpointer, to share it.

    Raises:
        InvalidLeafError: If safetensors has no such element type, as for int4 and complex128.
        DuplicateNameError: If two leaves would have one name; it has both key paths.
        PenstockError: As `Checkpointer.save` raises it. Nothing is left on disk, or if it is cancelled.
    """
    limits = (
        memory_limit,
        save_device_host_concurrent_bytes,
        save_concurrent_bytes,
        restore_concurrent_bytes,
    )
    options, memory = budget(config, limits, memory)
    layout = SafetensorsLayout(max_shard_bytes)
    async with _writing(layout, options, registry, store, save_pipeline, coordinator, memory) as writer:
        save = await writer.save(
            destination, tree, overwrite=overwrite, custom_metadata=custom_metadata, staging="overlap"
        )
        return await save


def _writing(
    layout: SafetensorsLayout,
    config: Config,
    registry: HandlerRegistry | None,
    store: Store | None,
    save_pipeline: Pipeline[SaveRun] | None,
    coordinator: Coordinator | None,
    memory: MemoryRegulator,
) -> Checkpointer:
    return Checkpointer(
        layout=layout,
        config=config,
        registry=registry,
        store=store,
        save_pipeline=save_pipeline,
        coordinator=coordinator,
        memory=memory,
    )

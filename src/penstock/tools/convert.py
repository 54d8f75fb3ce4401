"""Conversion from one format to another, piece by piece: nothing is restored, no device is touched."""

from __future__ import annotations

__all__ = ("Format", "convert", "export_safetensors")

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias, final

from penstock.checkpointer.checkpointer import Checkpointer, Path
from penstock.checkpointer.pipelines import save_pipeline as default_save_pipeline
from penstock.handlers.formats.auto_layout import AutoLayout
from penstock.handlers.formats.orbax.orbax_layout import OrbaxLayout
from penstock.handlers.formats.safetensors.file_set import SUFFIX
from penstock.handlers.formats.safetensors.safetensors_layout import SafetensorsLayout
from penstock.handlers.leaves.default_handlers import default_handlers
from penstock.handlers.leaves.stored_value import SourceFiles, StoredValue, StoredValueHandler
from penstock.handlers.stores.local import LocalStore
from penstock.kernel.concurrency.threads import Threads
from penstock.kernel.config.config import Config
from penstock.kernel.errors import PathError, SpecError, StorageError
from penstock.kernel.memory.regulator import MemoryRegulator
from penstock.kernel.messages.save import Committed, SaveReport
from penstock.kernel.pipeline.pipeline import Pipeline
from penstock.kernel.pipeline.run_context import SaveRun
from penstock.kernel.plugins.handler_registry import HandlerRegistry
from penstock.kernel.protocols.checkpoints import NamedTensors, StoredCheckpoint
from penstock.kernel.protocols.coordinator import Coordinator
from penstock.kernel.protocols.layouts import Layout
from penstock.kernel.protocols.leaf import StoredLeaf
from penstock.kernel.protocols.stores import Store
from penstock.kernel.storage.paths import absolute_path
from penstock.stages.files.file_closing import closing
from penstock.stages.locate import split_names
from penstock.stages.pytree.flattening import nest

Format: TypeAlias = Literal["orbax", "safetensors"]


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
        max_shard_bytes: In a folder, a file that would hold more data is followed by another one, and
            an index says what lies where; by default 5 GB.
        overwrite: Replace what is there, if it is safetensors and nothing else.
        custom_metadata: JSON values for `__metadata__`; texts are written as they are.
        config: As for `Checkpointer`, and so are all that follow.
        registry: Handlers for leaf types.
        store: Where `destination` lies.
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
        PenstockError: As `Checkpointer.save` raises it.

    Cancellation:
        Nothing is left on disk.
    """
    async with Checkpointer(
        layout=SafetensorsLayout(max_shard_bytes),
        config=config,
        registry=registry,
        store=store,
        save_pipeline=save_pipeline,
        coordinator=coordinator,
        memory_limit=memory_limit,
        save_device_host_concurrent_bytes=save_device_host_concurrent_bytes,
        save_concurrent_bytes=save_concurrent_bytes,
        restore_concurrent_bytes=restore_concurrent_bytes,
        memory=memory,
    ) as checkpointer:
        return await (
            await checkpointer.save(
                destination, tree, overwrite=overwrite, custom_metadata=custom_metadata, staging="overlap"
            )
        )


async def convert(
    source: Path,
    destination: Path,
    *,
    format: Format | None = None,  # noqa: A002  # what everybody calls it
    split: str | None = ".",
    item: str | None = None,
    max_shard_bytes: int | None = None,
    overwrite: bool = False,
    custom_metadata: Mapping[str, Any] | None = None,
    config: Config | Path | None = None,
    store: Store | None = None,
    coordinator: Coordinator | None = None,
    memory_limit: int | str | None = None,
    save_device_host_concurrent_bytes: int | str | None = None,
    save_concurrent_bytes: int | str | None = None,
    restore_concurrent_bytes: int | str | None = None,
    memory: MemoryRegulator | None = None,
) -> SaveReport:
    """Write what is saved at `source` to `destination`, in the same or another format.

    Leaves are read and written piece by piece under the memory budget. Bytes whose checksum is known
    are checked. The source is left as it is, and must not change meanwhile.

    Args:
        source: Anything that can be restored.
        destination: Where it goes.
        format: `"orbax"` or `"safetensors"`; by default the latter for a destination that ends in
            `.safetensors`, else the former.
        split: Of a safetensors source: what separates the keys in its names; None: one flat dict.
        item: Which item of the source, by its name; by default the one that holds the tree.
        max_shard_bytes: As for `export_safetensors`.
        overwrite: Replace what is at `destination`, atomically, if it is of the format written.
        custom_metadata: Added to that of the source.
        config: As for `Checkpointer`, and so are all that follow.
        store: Where both lie.
        coordinator: How the processes of a job agree.
        memory_limit: Host bytes that may be held.
        save_device_host_concurrent_bytes: Of these, how many may be staged.
        save_concurrent_bytes: Bytes that may be on their way to storage at once.
        restore_concurrent_bytes: Bytes that may be on their way from storage at once.
        memory: The budget of a Checkpointer, to share it.

    Raises:
        SpecError: If the destination cannot hold the source: as for `export_safetensors`, or names that
            cannot be split.
        CorruptCheckpointError: If the source is damaged.
        StorageError: If the medium refuses, or the source was replaced meanwhile.

    Cancellation:
        Nothing is left on disk.
    """
    start, final = absolute_path(source), absolute_path(destination)
    layout = _layout(format, final, max_shard_bytes)
    _check_apart(start, final)
    store = LocalStore() if store is None else store
    threads = Threads()
    unchanged = _Unchanged(store, threads, start, await threads.run(store.identity, start))
    opened = await threads.run(_open, store, start, split, item)
    pipeline = _unhurried(default_save_pipeline(layout)).insert_before(
        "finalize", unchanged, called="unchanged"
    )
    custom = {**(opened.custom_metadata or {}), **(custom_metadata or {})} or None
    files = SourceFiles(store)
    async with (
        closing(threads, lambda: [files]),
        Checkpointer(
            registry=_handlers(),
            save_pipeline=pipeline,
            layout=layout,
            store=store,
            config=config,
            coordinator=coordinator,
            memory_limit=memory_limit,
            save_device_host_concurrent_bytes=save_device_host_concurrent_bytes,
            save_concurrent_bytes=save_concurrent_bytes,
            restore_concurrent_bytes=restore_concurrent_bytes,
            memory=memory,
        ) as checkpointer,
    ):
        tree = await threads.run(_tree, files, opened)
        save = await checkpointer.save(
            final, tree, overwrite=overwrite, custom_metadata=custom, staging="overlap"
        )
        return await save


@final
@dataclass(frozen=True, slots=True)
class _Unchanged:
    """Called before a conversion is published; raises if its source was replaced."""

    store: Store
    threads: Threads
    path: str
    identity: object

    async def __call__(self, committed: Committed, /) -> Committed:
        if self.identity != await self.threads.run(self.store.identity, self.path):
            raise StorageError("read", self.path, "was replaced while it was being converted")

        return committed


def _layout(written: Format | None, destination: str, max_shard_bytes: int | None) -> Layout:
    if written == "safetensors" or (written is None and destination.endswith(SUFFIX)):
        return SafetensorsLayout(max_shard_bytes)
    if written not in (None, "orbax"):
        raise SpecError(f"there is no format {written!r}; use 'orbax' or 'safetensors'")
    if max_shard_bytes is not None:
        raise SpecError("max_shard_bytes is for safetensors; pass format='safetensors'")
    if destination.endswith(SUFFIX):
        raise PathError(destination, "is the name of a safetensors file, but the requested format is 'orbax'")

    return OrbaxLayout()


def _unhurried(pipeline: Pipeline[SaveRun]) -> Pipeline[SaveRun]:
    """Read little ahead of the writing: nothing waits for a conversion to be staged."""
    return Pipeline(tuple(replace(slot, queue=1) if slot.queue else slot for slot in pipeline))


def _check_apart(source: str, destination: str) -> None:
    """Refuse to write into the source, or over a folder that contains it."""
    for outer, inner in ((source, destination), (destination, source)):
        if inner.startswith(os.path.join(outer, "")):
            raise PathError(destination, f"cannot be written: {inner!r} lies in {outer!r}")


def _open(store: Store, path: str, split: str | None, item: str | None) -> StoredCheckpoint:
    opened = AutoLayout().open(store, path, item)
    return split_names(opened, split) if split is not None and isinstance(opened, NamedTensors) else opened


def _handlers() -> HandlerRegistry:
    registry = default_handlers(entry_points=False)
    registry.register(StoredValue, StoredValueHandler())
    return registry


def _tree(files: SourceFiles, opened: StoredCheckpoint) -> object:
    leaves = list(opened.leaves)
    return nest([leaf.info for leaf in leaves], [_value(files, opened, leaf) for leaf in leaves])


def _value(files: SourceFiles, opened: StoredCheckpoint, leaf: StoredLeaf) -> object:
    """Return a `StoredValue`, or another value that is saved as the leaf is stored."""
    match leaf.spec.typestr:
        case "None" | "NamedTuple":
            return None
        case "Dict":
            return {}
        case "List":
            return []
        case "Tuple":
            return ()
        case _:
            return StoredValue(files, opened, leaf) if leaf.spec.text is None else leaf.spec.text

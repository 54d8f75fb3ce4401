"""What a tree handler has its loop do: open Checkpointers, save, restore and describe with them."""

from __future__ import annotations

__all__ = (
    "Limit",
    "Resources",
    "Serving",
    "Within",
    "describe",
    "open_checkpointers",
    "restore_value",
    "save_limit",
    "start_joint_save",
    "start_save",
    "with_type_handlers",
)

from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from penstock.checkpointer.checkpointer import Checkpointer
from penstock.checkpointer.description import CheckpointMetadata
from penstock.handlers.coordinators.jax_processes import processes_of_jax
from penstock.handlers.formats.orbax.orbax_layout import OrbaxLayout, TreeLayout
from penstock.handlers.formats.orbax.storage_choice import CODED_CHUNK
from penstock.handlers.layouts.auto_layout import AutoLayout
from penstock.kernel.config.save_format import SaveFormat
from penstock.kernel.errors import ConfigError, CorruptCheckpointError, StorageError
from penstock.kernel.memory.regulator import Flow
from penstock.kernel.pipeline.futures import SaveFuture
from penstock.kernel.protocols.coordinator import SingleProcessCoordinator
from penstock.kernel.storage.paths import bucket_of
from penstock.kernel.storage.workspace import Overwrite
from penstock.orbax.common.byte_limiters import Limiters
from penstock.orbax.v0.common.joint_directory import JointDirectory
from penstock.orbax.v0.common.v0_options import MemoryLimitOptions
from penstock.orbax.v0.leaf_handlers.stage_workers import StageRegistry, StageWorkers

if TYPE_CHECKING:  # one process needs nothing of it
    from penstock.orbax.joint.joint_build import JointBuild

Limit: TypeAlias = int | None
Serving: TypeAlias = Callable[[Checkpointer, Flow], Checkpointer]
"""Gives a Checkpointer the type handlers of one save or restore."""


@dataclass(frozen=True, slots=True)
class Resources:
    """What saves, and what restores: the same if both have one budget."""

    form: SaveFormat  #: how arrays are stored
    save: Checkpointer
    restore: Checkpointer
    together: Checkpointer | None  #: saves with the other processes of the job, if there are any
    within: Checkpointer | None  #: likewise, into a directory of a checkpoint that they build
    receiving: Checkpointer | None = None  #: restores with them what one replica reads


def save_limit(
    concurrent: int | None, device_host: int | Literal["auto"] | None, options: MemoryLimitOptions | None
) -> int | None:
    """Return the host bytes that saves may hold, as three options say; None if none does.

    Raises:
        ValueError: If `"auto"` is given without its upper limit.
    """
    most = (
        None
        if options is None or options.max_transfer_concurrent_gb is None
        else options.max_transfer_concurrent_gb
    )
    if device_host == "auto":
        if most is None:
            raise ValueError(
                "memory_limit_options with max_transfer_concurrent_gb must be provided if the limit of "
                'transfers from devices is "auto"'
            )
        device_host = None

    given = [limit for limit in (concurrent, device_host) if limit is not None]
    if most is not None:
        given.append(int(most * 10**9))

    return min(given) if given else None


@dataclass(frozen=True, slots=True)
class Within:
    """A directory of a checkpoint that all processes build."""

    path: str
    build: JointBuild


@asynccontextmanager
async def open_checkpointers(
    layout: TreeLayout, limits: tuple[Limit, Limit], form: SaveFormat
) -> AsyncGenerator[Resources]:
    """Yield the Checkpointers of a tree handler.

    Args:
        layout: Of trees in given directories.
        limits: Host bytes that saves may hold, and restores.
        form: How arrays are stored in whole checkpoints.
    """
    chosen = AutoLayout(layout)
    async with AsyncExitStack() as stack:
        opened: list[Checkpointer] = []
        for limit in dict.fromkeys(limits):
            alone = SingleProcessCoordinator()  # a save of several processes needs the whole of it
            checkpointer = Checkpointer(layout=chosen, memory_limit=limit, coordinator=alone)
            opened.append(await stack.enter_async_context(checkpointer))

        together: Checkpointer | None = None
        within: Checkpointer | None = None
        receiving: Checkpointer | None = None
        if processes_of_jax()[1] > 1:
            memory = opened[0].engine.memory
            joint = Checkpointer(save_format=form, memory=memory)
            together = await stack.enter_async_context(joint)
            parallel = TreeLayout(replace(form, replica_parallel=True), single=layout.single)
            item = Checkpointer(layout=AutoLayout(parallel), memory=memory)
            within = await stack.enter_async_context(item)
            receiving = await stack.enter_async_context(Checkpointer(layout=chosen, memory_limit=limits[1]))

        yield Resources(form, opened[0], opened[-1], together, within, receiving)


async def start_save(
    resources: Resources, serves: Serving, path: str, item: Any, keywords: dict[str, Any]
) -> SaveFuture:
    """Begin to save; unchanged leaves are linked to `keywords["base"]`, if that is still whole."""
    base = keywords.pop("base", None)
    checkpointer = serves(resources.save, "save")
    if base is not None:
        try:
            return await checkpointer.save(path, item, overwrite=True, base=base, **keywords)
        except (CorruptCheckpointError, StorageError) as error:
            if not error.path.startswith(base):
                raise  # otherwise the base is gone or damaged, and the save works without it

    return await checkpointer.save(path, item, overwrite=True, **keywords)


async def start_joint_save(
    resources: Resources,
    registry: Any,
    workers: StageWorkers,
    place: JointDirectory | Within,
    item: Any,
    keywords: dict[str, Any],
) -> SaveFuture:
    """Begin to save together with the other processes: a whole checkpoint, or into a directory of one.

    In a bucket a process that saves alone saves a whole checkpoint, too.

    Raises:
        ConfigError: If there were none yet when this handler was first used.
    """
    if isinstance(place, JointDirectory) and bucket_of(place.path) is not None:
        return await _start_in_bucket(resources, registry, workers, place, item, keywords)

    chosen = _joined(resources.within if isinstance(place, Within) else resources.together)
    limiters = Limiters.of(chosen.engine.memory, "save")
    handlers = StageRegistry(registry, replace(workers, limiters=limiters))
    if isinstance(place, Within):
        chosen = chosen.with_handlers(handlers, coordinator=place.build.nested_coordinator())
        begin = partial(chosen.save, place.path, item, overwrite=True, **keywords)
        return await place.build.begin_within(begin)

    chosen = chosen.with_handlers(handlers)
    place.begun.set()
    about: dict[str, Any] = {"overwrite": place.overwrite, "custom_metadata": place.custom_metadata}
    return await chosen.save(place.path, item, **about, **keywords)


async def _start_in_bucket(
    resources: Resources,
    registry: Any,
    workers: StageWorkers,
    place: JointDirectory,
    item: Any,
    keywords: dict[str, Any],
) -> SaveFuture:
    """Begin to save a whole checkpoint to a bucket, where no handler can write files by itself.

    A checkpoint that may be replaced is deleted first, as Orbax does: a bucket cannot replace in one step.
    """
    chosen = _joined(resources.together) if place.jointly else resources.save
    engine = chosen.engine
    bucket = bucket_of(place.path)
    assert bucket is not None, "the caller has looked"
    layout = OrbaxLayout(
        replace(resources.form, replica_parallel=place.jointly),
        min(CODED_CHUNK, engine.memory.limit // 4),
        plain_chunk=engine.config.store.of_scheme(bucket[0]).file_bytes,
    )
    limiters = Limiters.of(engine.memory, "save")
    handlers = StageRegistry(registry, replace(workers, limiters=limiters))
    chosen = chosen.with_handlers(handlers, AutoLayout(layout))
    overwrite: Overwrite = "delete-first" if place.overwrite else False
    place.begun.set()
    return await chosen.save(
        place.path, item, overwrite=overwrite, custom_metadata=place.custom_metadata, **keywords
    )


def _joined(checkpointer: Checkpointer | None) -> Checkpointer:
    """Return what saves with other processes.

    Raises:
        ConfigError: If there were none yet when the handler was first used.
    """
    if checkpointer is None:
        problem = "must be initialised before the first save of a checkpointer"
        raise ConfigError("jax.distributed", problem)

    return checkpointer


async def restore_value(resources: Resources, serves: Serving, path: str, keywords: dict[str, Any]) -> Any:
    """Return the tree at `path`; with `replica_axis`, together with the other processes of the job."""
    together = resources.receiving if "replica_axis" in keywords else None
    return await serves(together or resources.restore, "restore").restore(path, **keywords)


def with_type_handlers(
    registry: Any, workers: StageWorkers, layout: TreeLayout, checkpointer: Checkpointer, flow: Flow
) -> Checkpointer:
    """Return the Checkpointer with the type handlers of one save or restore.

    What lies where only such a handler finds it is then not taken for missing.
    """
    limiters = Limiters.of(checkpointer.engine.memory, flow)
    handlers = StageRegistry(registry, replace(workers, limiters=limiters))
    own_files = handlers.own_files()
    if not own_files:
        return checkpointer.with_handlers(handlers)

    return checkpointer.with_handlers(handlers, AutoLayout(layout.with_foreign(own_files)))


async def describe(resources: Resources, serves: Serving, path: str) -> CheckpointMetadata:
    """Say what the tree at `path` is."""
    return await serves(resources.restore, "restore").metadata(path)

"""One save, one restore, one look, for callers who need a `Checkpointer` only once; and loading it first."""

from __future__ import annotations

__all__ = (
    "Checkpointer",
    "metadata",
    "restore",
    "restore_items",
    "save",
    "verify",
    "warm_up",
)

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from importlib import import_module
from types import EllipsisType
from typing import TYPE_CHECKING, Any, Literal, TypeVar, Unpack, overload

from penstock.checkpointer.checkpointer import NEEDED_TO_OPERATE, Checkpointer
from penstock.config.config import Config
from penstock.event_loop.imports import import_beside_the_loop
from penstock.handlers.stores.publishing.paths import path_to_save_to
from penstock.kernel.concurrency.threads import Threads
from penstock.kernel.pipeline.failures import forget_on_error, short_traceback
from penstock.steps.manager import NEEDED_TO_MANAGE

if TYPE_CHECKING:
    import jax

    from penstock.checkpointer.checkpointer import Path
    from penstock.checkpointer.description import CheckpointMetadata
    from penstock.checkpointer.parts import RestoreOnceKeywords
    from penstock.kernel.messages.restore import Only, Rename, Transform
    from penstock.kernel.pipeline.pipeline import Pipeline
    from penstock.kernel.pipeline.run_context import Compare, RestoreRun, SaveRun, ShowProgress, Staging
    from penstock.kernel.protocols.build_place import Overwrite
    from penstock.kernel.protocols.leaf import KeyPath, LeafPredicate
    from penstock.kernel.protocols.save_format import SaveArgs
    from penstock.kernel.rules import Rule
    from penstock.reports.report import RestoreReport, SaveReport
    from penstock.telemetry.observers import Observer
    from penstock.verification.verify import VerifyReport


T = TypeVar("T")


@short_traceback
async def save(
    path: Path,
    tree: object,
    *,
    overwrite: Overwrite = False,
    prioritise: LeafPredicate | None = None,
    staging: Staging = "copy",
    custom_metadata: Mapping[str, Any] | None = None,
    pipeline: Pipeline[SaveRun] | None = None,
    save_args: SaveArgs | Callable[[KeyPath], SaveArgs | None] | object = None,
    base: Path | None = None,
    compare: Compare = "identity",
    progress: ShowProgress = False,
    observers: Iterable[Observer] = (),
) -> SaveReport:
    """Save `tree` at `path` and return when it is durable and visible.

    Takes and raises what `Checkpointer.save` does, where each argument is described, and `observers` as
    `Checkpointer` does.

    Cancellation:
        Cancels the save, and removes what it wrote.
    """
    given = [tree]
    del tree  # a failure keeps nothing that the caller gave
    async with Checkpointer(observers=observers) as checkpointer:
        from penstock.kernel.pipeline.run_context import SaveRequest  # it is loaded by now

        request = SaveRequest(
            path=path_to_save_to(path),
            overwrite=overwrite,
            prioritise=prioritise,
            staging=staging,
            custom_metadata=custom_metadata,
            pipeline=pipeline,
            save_args=save_args,
            base=base,
            compare=compare,
            progress=progress,
        )
        begin = checkpointer.operations.save(request, given.pop())
        with forget_on_error():
            future = await begin

        return await future


@overload
async def restore(
    path: Path, *, as_type: type[T], like: object = ..., **options: Unpack[RestoreOnceKeywords]
) -> T: ...
@overload
async def restore(path: Path, *, like: EllipsisType = ..., **options: Unpack[RestoreOnceKeywords]) -> Any: ...
@overload
async def restore(path: Path, *, like: type[T], **options: Unpack[RestoreOnceKeywords]) -> T: ...
@overload
async def restore(
    path: Path, *, like: jax.ShapeDtypeStruct, **options: Unpack[RestoreOnceKeywords]
) -> jax.Array: ...
@overload
async def restore(path: Path, *, like: T, **options: Unpack[RestoreOnceKeywords]) -> T: ...
@short_traceback
async def restore(
    path: Path,
    *,
    like: Any = ...,
    as_type: type[Any] | None = None,
    mmap: bool = False,
    verify: bool | None = None,
    split: str | None = None,
    item: str | None = None,
    prioritise: LeafPredicate | None = None,
    pipeline: Pipeline[RestoreRun] | None = None,
    on_report: Callable[[RestoreReport], object] | None = None,
    only: Only | None = None,
    rules: Sequence[Rule] | None = None,
    rename: Rename | None = None,
    transforms: Mapping[str, Transform] | None = None,
    transforms_default_to_original: bool = True,
    dtype: Any = None,
    strict: bool = True,
    on_missing: Literal["raise", "keep"] = "raise",
    on_unexpected: Literal["raise", "skip"] = "raise",
    max_expansion: int | None = None,
    replica_axis: str | None = None,
    primary_replica: int = 0,
    progress: ShowProgress = False,
    observers: Iterable[Observer] = (),
) -> Any:
    """Return the tree saved at `path`: a checkpoint, an item in it, or a directory of steps.

    Where the run has tiers, and its root is no bucket, a step is read from the nearest that has it.

    Takes, raises and does on cancellation what `Checkpointer.restore` does, where each argument is
    described; and `observers` as `Checkpointer` does.
    """
    async with Checkpointer(observers=observers) as checkpointer:
        from penstock.checkpointer.operations import RestoreCall  # it is loaded by now
        from penstock.kernel.messages.restore import RestoreOptions

        options = RestoreOptions(
            item=item,
            only=only,
            split=split,
            mmap=mmap,
            verify=verify,
            prioritise=prioritise,
            max_expansion=max_expansion,
            replica_axis=replica_axis,
            primary_replica=primary_replica,
            rules=rules,
            rename=rename,
            transforms=transforms,
            transforms_default_to_original=transforms_default_to_original,
            dtype=dtype,
            strict=strict,
            on_missing=on_missing,
            on_unexpected=on_unexpected,
        )
        call = RestoreCall(options, pipeline, on_report, progress)
        path = await _nearest(path, checkpointer)
        begin = checkpointer.operations.restore(path, like, call, as_type)
        del like  # a failure keeps nothing that the caller gave
        with forget_on_error():
            return await begin


@short_traceback
async def restore_items(
    path: Path,
    *,
    like: Mapping[str, Any] | None = None,
    items: Iterable[str] | None = None,
    mmap: bool = False,
    progress: ShowProgress = False,
    observers: Iterable[Observer] = (),
) -> dict[str, Any]:
    """Return the values of the items of the checkpoint at `path`, by name, all of one checkpoint.

    Trees, JSON, arrays and random keys come back as they were saved; a protobuf message as its text.

    Args:
        path: A checkpoint of several items, or a directory of steps, whose latest finished one is taken.
        like: Targets as for `restore`, by item; for a protobuf message its class, or a message. Items
            without a target, or with `...`, are restored as they were saved.
        items: Names of the items wanted; by default all.
        mmap: As for `restore`.
        progress: As for `restore`; each item has its own bar.
        observers: As for `Checkpointer`.

    Raises:
        UnsupportedFormatError: If the checkpoint has no items, or one that penstock cannot read.
        NotACheckpointError: If it does not have all that are asked for.
        SpecError: If `like` names an item that is not among `items`.
        PenstockError: What `Checkpointer.restore` raises.

    Cancellation:
        Stops reading and gives back every byte.
    """
    async with Checkpointer(observers=observers) as checkpointer:
        path = await _nearest(path, checkpointer)
        return await checkpointer.restore_items(path, like=like, items=items, mmap=mmap, progress=progress)


@short_traceback
async def metadata(path: Path, *, item: str | None = None) -> CheckpointMetadata:
    """Say what the checkpoint at `path` holds, without reading array data or touching a device.

    Raises:
        PenstockError: What `Checkpointer.metadata` raises.
    """
    async with Checkpointer() as checkpointer:
        return await checkpointer.metadata(await _nearest(path, checkpointer), item=item)


@short_traceback
async def verify(path: Path, *, item: str | None = None) -> VerifyReport:
    """Compare all that is at and below `path`, at rest, with the checksums that were recorded of it.

    Args:
        path: A checkpoint, an item of one, a directory of steps, or a folder of these: every step and every
            item of it is compared.
        item: Compare only this item of the checkpoint.

    Returns:
        What is damaged, unreadable, absent or without a checksum, with the leaves concerned. Nothing is
        raised for what is found: `report.status` sums it up.
    """
    async with Checkpointer() as checkpointer:
        return await checkpointer.verify(path, item=item)


@short_traceback
async def warm_up() -> None:
    """Load everything that a first call would load, so that no later call imports anything.

    ```python
    async def main():
        await penstock.warm_up()   # while the server starts
    ```

    Entering a `Checkpointer` does the part that it needs, so this only moves that time to where it does
    not matter: 0.3 to 0.9 s in a process that has imported jax. `penstock.orbax` is loaded, too, where it was
    imported. The event loop runs meanwhile; it stops for at most some milliseconds, unless jax or
    another native library is imported for the first time: see docs/howto/serve-without-a-stall.md.
    TensorStore is loaded by the first checkpoint that needs it, also in a worker thread.

    Cancellation:
        Delivered once the imports are done.
    """
    await import_beside_the_loop(_import_everything, Config.load(None).loop)


async def _nearest(path: Path, checkpointer: Checkpointer) -> str:
    """Return the path of the checkpoint that is meant; a step of a run with tiers may be in a tier alone."""
    tiers = "penstock.steps.tier_record"
    await import_beside_the_loop(partial(import_module, tiers), checkpointer.config.loop)
    from penstock.steps.tier_record import nearest_checkpoint

    return await Threads(1).run(nearest_checkpoint, path)


def _import_everything() -> None:
    for needed in (*NEEDED_TO_OPERATE, *NEEDED_TO_MANAGE):
        import_module(needed)
    for face in ("penstock", "penstock.orbax", "penstock.orbax.v1"):
        module = sys.modules.get(face)
        for name in () if module is None else module.__all__:
            getattr(module, name)  # imports its module

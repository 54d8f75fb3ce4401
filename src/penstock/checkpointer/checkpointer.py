"""The async face: one object that owns the budget, the threads and the background saves."""

from __future__ import annotations

__all__ = ("Checkpointer",)

import copy
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from types import EllipsisType, TracebackType
from typing import (
    TYPE_CHECKING,
    Any,
    Final,
    Literal,
    TypeAlias,
    TypeVar,
    Unpack,
    cast,
    final,
    overload,
)

from penstock.checkpointer.parts import CheckpointerParts, MemoryKeywords, config_and_regulator
from penstock.config.config import Config
from penstock.event_loop.entered_once import AsyncOnly, EnteredOnce
from penstock.event_loop.imports import NeededModules, load
from penstock.handlers.coordinators.job_options import JobOptions
from penstock.handlers.stores.publishing.paths import path_to_save_to
from penstock.kernel.errors import SpecError
from penstock.kernel.memory.regulator import MemoryRegulator, RegulatorStatistics
from penstock.kernel.pipeline.failures import forget_on_error, short_tracebacks
from penstock.kernel.protocols.build_place import Overwrite
from penstock.kernel.protocols.save_format import SaveArgs, SaveFormat
from penstock.telemetry.observers import Observer

if TYPE_CHECKING:
    # What a first save needs is loaded on entering, in a worker thread. Nothing here may import it sooner:
    # this module is loaded by `import penstock`.
    import jax

    from penstock.checkpointer.description import CheckpointMetadata
    from penstock.checkpointer.engine import Engine
    from penstock.checkpointer.operations import Operations
    from penstock.checkpointer.parts import RestoreKeywords
    from penstock.checkpointer.process_exit import Stopping
    from penstock.checkpointer.restores import LeafStream
    from penstock.checkpointer.save_future import SaveFuture
    from penstock.handlers.layouts.auto_layout import AutoLayout
    from penstock.kernel.messages.restore import Only, Order, Rename, RestoreOptions, Transform
    from penstock.kernel.pipeline.pipeline import Pipeline
    from penstock.kernel.pipeline.run_context import Compare, RestoreRun, SaveRun, ShowProgress, Staging
    from penstock.kernel.protocols.coordinator import Coordinator
    from penstock.kernel.protocols.layouts import Layout
    from penstock.kernel.protocols.leaf import KeyPath, LeafPredicate
    from penstock.kernel.protocols.leaf_handlers import HandlerLookup
    from penstock.kernel.protocols.stores import Store
    from penstock.kernel.rules import Rule
    from penstock.reports.report import RestoreReport
    from penstock.verification.verify import VerifyReport

Path: TypeAlias = str | os.PathLike[str]
T = TypeVar("T")
NEEDED_TO_OPERATE: Final[NeededModules] = {"penstock.checkpointer.operations": "Operations"}


@short_tracebacks
@final
class Checkpointer(AsyncOnly):
    """Saves and restores PyTrees under one memory budget. An async context manager.

    ```python
    async with penstock.Checkpointer() as checkpointer:
        save = await checkpointer.save(path, state)   # staged: the state may change now
        report = await save                           # durable and visible
        state = await checkpointer.restore(path, like=state)
    ```

    Leaving the context waits for background saves, and raises the failure of one that was not
    awaited. Leaving it on an error cancels them and removes what they wrote.

    Args:
        config: Options, or the path of a TOML file that holds them; by default as `Config.load` finds one.
        profile: A profile in that file; by default the one that `PENSTOCK_PROFILE` names, if any.
        registry: Handlers for leaf types; by default those that come with penstock.
        save_pipeline, restore_pipeline: The stages of saves, and of restores.
        store: Where checkpoints are; by default the local file system, with the options of the config.
        save_format: How arrays are stored; overrides that of the config.
        layout: The format on disk; by default Orbax's is written, with `save_format`, and every format
            that penstock knows is read.
        coordinator: How the processes of a job agree; by default by the service of `jax.distributed`.
        observers: Observe every save and restore, as do those that the config names.
        job: Which of them save together, and on which disks; overrides that of the config.
        memory_limit: Host bytes that all saves and restores may hold, or `"auto"`; overrides the config, as
            the next three do. All are numbers or texts such as `"2GiB"`.
        save_device_host_concurrent_bytes: Of these, how many saves may hold staged; by default all.
        save_concurrent_bytes, restore_concurrent_bytes: Bytes that may be under way to or from storage.
        memory: The budget of another Checkpointer, to share it; instead of the four above.

    Raises:
        ConfigError: If an option is unknown or does not fit; on entering, one of a stage, format or store.
        SpecError: If an observer lacks a method.
    """

    def __init__(
        self,
        *,
        config: Config | Path | None = None,
        profile: str | None = None,
        registry: HandlerLookup | None = None,
        save_pipeline: Pipeline[SaveRun] | None = None,
        restore_pipeline: Pipeline[RestoreRun] | None = None,
        store: Store | None = None,
        save_format: SaveFormat | None = None,
        layout: Layout | AutoLayout | None = None,
        coordinator: Coordinator | None = None,
        observers: Iterable[Observer] = (),
        job: JobOptions | None = None,
        memory_limit: int | str | None = None,
        save_device_host_concurrent_bytes: int | str | None = None,
        save_concurrent_bytes: int | str | None = None,
        restore_concurrent_bytes: int | str | None = None,
        memory: MemoryRegulator | None = None,
    ) -> None:
        budget = MemoryKeywords(
            memory_limit=memory_limit,
            save_device_host_concurrent_bytes=save_device_host_concurrent_bytes,
            save_concurrent_bytes=save_concurrent_bytes,
            restore_concurrent_bytes=restore_concurrent_bytes,
            memory=memory,
        )
        _check_parts(
            registry=registry,
            save_pipeline=save_pipeline,
            restore_pipeline=restore_pipeline,
            store=store,
            save_format=save_format,
            layout=layout,
            coordinator=coordinator,
            job=job,
            memory=memory,
        )
        options, regulator = config_and_regulator(config, budget, profile)
        self._parts = CheckpointerParts(
            options if job is None else replace(options, job=job),
            regulator,
            registry,
            save_pipeline,
            restore_pipeline,
            store,
            save_format,
            layout,
            coordinator,
            _checked(observers),
        )
        self._made: Operations | None = None
        self._entered = EnteredOnce("Checkpointer")

    async def __aenter__(self) -> Checkpointer:
        await load(NEEDED_TO_OPERATE, self.config.loop)
        from penstock.checkpointer.engine import needed_besides  # it is loaded by now

        await load(needed_besides(self.config), self.config.loop)
        await self._entered.enter(self.operations.life.live)
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc_val: BaseException | None,
        exc_tb: TracebackType | None,
    ) -> bool | None:
        if not self.stopping.home.is_here:
            return None  # a fork has a copy of this object; the tasks behind it belong to its parent

        return await self._entered.leave(exc_type, exc_val, exc_tb)

    async def save(
        self,
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
    ) -> SaveFuture:
        """Begin to save `tree` at `path`; return once it is staged.

        Either the whole checkpoint becomes visible, durably and in one step, or nothing does. Saves
        to one path follow each other; saves to different paths run together.

        Args:
            path: A directory that does not exist yet; its parents may be missing.
            tree: Any PyTree of handled leaf types, or a `Composite` of named items.
            overwrite: Replace what is there, in one step, at the end. In a bucket only `"delete-first"` does.
            prioritise: Says which leaves are staged first and completely, by key path.
            staging: `"copy"` returns when the tree may be mutated, deleted or donated;
                `"overlap"` when it is planned: await `save.staged()` before changing it.
            custom_metadata: JSON values kept with the checkpoint, as they are now.
            pipeline: Stages for this save alone.
            save_args: How leaves are stored, where not as the format says: a `SaveArgs` for all; a tree
                of them, each for every leaf at or below its place; or a function from the tuple of a
                leaf's stored keys to one or None.
            base: An earlier checkpoint. Leaves that have not changed since, and have no codec, are linked
                and not written; each checkpoint is whole by itself, whichever is deleted first.
            compare: How an unchanged leaf is known. `"identity"`: it is the very jax.Array that this
                Checkpointer saved there. `"digest"`: its bytes have the SHA-256 that a save with
                `"digest"` recorded there.
            progress: Shows a bar: True, `"rich"` or `"tqdm"`; or a function of the bytes done and all bytes.

        Returns:
            The save in the background. Await it for the durable checkpoint.

        Raises:
            SpecError: If the tree or the path cannot be saved; nothing was written.
            HandlerError: If no handler takes a leaf's type; nothing was written.
            StorageError: If the medium refused.
            PenstockError: If an earlier background save failed, and no caller has seen that yet.

        Cancellation:
            Cancels the save and returns when its temporary files are gone.
        """
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
        begin = self.operations.save(request, tree)
        del tree  # neither a save in the background nor its failure keeps what the caller dropped
        with forget_on_error():
            return await begin

    @overload
    async def restore(
        self, path: Path, *, as_type: type[T], like: object = ..., **options: Unpack[RestoreKeywords]
    ) -> T: ...
    @overload
    async def restore(
        self, path: Path, *, like: EllipsisType = ..., **options: Unpack[RestoreKeywords]
    ) -> Any: ...
    @overload
    async def restore(self, path: Path, *, like: type[T], **options: Unpack[RestoreKeywords]) -> T: ...
    @overload
    async def restore(
        self, path: Path, *, like: jax.ShapeDtypeStruct, **options: Unpack[RestoreKeywords]
    ) -> jax.Array: ...
    @overload
    async def restore(self, path: Path, *, like: T, **options: Unpack[RestoreKeywords]) -> T: ...
    async def restore(
        self,
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
    ) -> Any:
        """Return the tree saved at `path`.

        Without `like`, a jax.Array that was saved over devices of which some are not here, or of 64 bits
        where these are disabled, becomes a NumPy array. Options from `only` on let the result differ from
        what is stored (docs/howto/restore-onto-something-else.md); without them a difference is an error.

        Args:
            path: A checkpoint, an item in it, or a directory of steps, whose latest finished one is taken.
            like: A tree of the structure wanted, whose leaves are concrete values,
                `jax.ShapeDtypeStruct`s or types; for a protobuf message, one or its class. The result
                has exactly its node types, dtypes and shardings. Without it (`...`) the result is made of
                dicts and lists, on the devices it was saved from where they are here.
            as_type: The class of the result, where `like` does not tell it; checked at its root alone.
            mmap: Whether leaves live in the page cache where they can: NumPy arrays, read-only, and
                jax.Arrays on CPU devices, in time that does not depend on size. The files must not change.
            verify: Whether bytes are compared with their recorded checksums: by default all that are
                read, as whole pieces; with True, those that are mapped, too; with False none.
            split: For safetensors: what separates keys in names, as in `"."`, for a result of nested dicts.
            item: Which item of the checkpoint, by its name; by default the one that holds the tree.
            prioritise: Says which leaves are read first, by stored key path.
            pipeline: Stages for this restore alone.
            on_report: Called with the `RestoreReport` when the result is complete.
            only: Which leaves are restored: shell patterns over dotted names, key paths, or a function.
            rules: What becomes of the stored leaves (`penstock.rules`); the options after it see the results.
            rename: Stored names or key paths to names in the result; None leaves out.
            transforms: Regular expressions over key paths to `penstock.Transform`s.
            transforms_default_to_original: Whether leaves without a transform come from the checkpoint.
            dtype: What arrays are cast to: a dtype, `"like"`, or a mapping from patterns to dtypes.
            strict: If False, arrays are padded or cut off to the shapes of `like`.
            on_missing: `"keep"` keeps leaves of `like` that the checkpoint does not have.
            on_unexpected: `"skip"` leaves out what the checkpoint has and `like` has not.
            max_expansion: How many times the bytes stored a result without `like` may take; by default 1,000,
                and 32,768 for chunks with a codec.
            replica_axis: Of meshes, along which replicas are: one reads, and the others receive.
            primary_replica: Which one reads.
            progress: As for `save`.

        Raises:
            SpecError: If the options contradict each other, or need a `like`.
            StructureMismatchError: If `like` does not fit; it lists every difference.
            ResultTypeError: If the result is not an `as_type`.
            HandlerFailedError: If one of the functions given raises.
            NotACheckpointError: If there is none at `path`, or no such item.
            IncompleteCheckpointError: If a save was interrupted there.
            CorruptCheckpointError: If a document or a data file is damaged.

        Cancellation:
            Stops reading and gives back every byte, within `[stopping] read_s` even if the disk hangs.
        """
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
        begin = self.operations.restore(path, like, call, as_type)
        del like
        with forget_on_error():
            return await begin

    async def restore_with(self, path: Path, like: Any, options: RestoreOptions) -> Any:
        """Return the tree saved at `path` as `restore` does, by options that are one value."""
        from penstock.checkpointer.operations import RestoreCall  # it is loaded by now

        begin = self.operations.restore(path, like, RestoreCall(options))
        del like
        with forget_on_error():
            return await begin

    async def restore_items(
        self,
        path: Path,
        *,
        like: Mapping[str, Any] | None = None,
        items: Iterable[str] | None = None,
        mmap: bool = False,
        progress: ShowProgress = False,
    ) -> dict[str, Any]:
        """Return the values of the items of the checkpoint at `path`; see `penstock.restore_items`."""
        from penstock.checkpointer.operations import RestoreCall  # it is loaded by now
        from penstock.kernel.messages.restore import RestoreOptions

        call = RestoreCall(RestoreOptions(mmap=mmap), progress=progress)
        return await self.operations.restore_items(path, like, items, call)

    def with_handlers(
        self,
        registry: HandlerLookup,
        layout: Layout | AutoLayout | None = None,
        coordinator: Coordinator | None = None,
    ) -> Checkpointer:
        """Return this Checkpointer with other parts, which has its budget, and is open as long as it is."""
        other = copy.copy(self)
        other._made = self.operations.with_handlers(registry, layout, coordinator)
        return other

    def stream(
        self,
        path: Path,
        *,
        like: Any = ...,
        order: Order | None = None,
        only: Only | None = None,
        item: str | None = None,
        pipeline: Pipeline[RestoreRun] | None = None,
    ) -> LeafStream:
        """Restore leaf by leaf: `async for key_path, value in checkpointer.stream(path)`.

        Args:
            path: As for `restore`.
            like: As for `restore`.
            order: Which leaves come first: shell patterns over dotted names, where the first pattern
                ranks before the second; or a function that gives sort keys. By default as each is complete.
            only: As for `restore`.
            item: As for `restore`.
            pipeline: Stages for this restore alone; its `assemble` and `prioritise` are replaced.

        Raises:
            ClosedError: If the Checkpointer is not open. What `restore` raises comes with the first value.
        """
        return self.operations.stream(path, like, order, only, item, pipeline)

    async def metadata(self, path: Path, *, item: str | None = None) -> CheckpointMetadata:
        """Say what the checkpoint at `path` holds. Reads no array data and touches no device.

        Raises:
            NotACheckpointError: If there is none at `path`, or no such item.
            IncompleteCheckpointError: If a save was interrupted there.
            CorruptCheckpointError: If a document is damaged.
        """
        return await self.operations.metadata(path, item)

    async def verify(self, path: Path, *, item: str | None = None) -> VerifyReport:
        """Compare all that is at and below `path`, at rest, with its checksums; see `penstock.verify`."""
        return await self.operations.verify(path, item)

    @property
    def config(self) -> Config:
        """Its options."""
        return self._parts.config

    @property
    def engine(self) -> Engine:
        """The parts that all its saves and restores share."""
        return self.operations.engine

    @property
    def stopping(self) -> Stopping:
        """Its care for the end of the process; `stopping.sigterm_came` informs a training loop."""
        return self.operations.life.stopping

    async def wait(self) -> None:
        """Wait until no save is under way; raise the first failure that no caller has seen yet."""
        await self.operations.life.wait()

    def statistics(self) -> RegulatorStatistics:
        """Return the state of the memory budget."""
        return self._parts.memory.statistics()

    @property
    def operations(self) -> Operations:
        """The same calls for the other faces of penstock, which take options as one value."""
        if self._made is None:
            # Imported here because it imports jax and numpy; entering has loaded it by now.
            from penstock.checkpointer.operations import Operations

            self._made = Operations(self._parts)

        return self._made


# What a part must be, and a member that says so: the modules of most are loaded on entering.
_PARTS: Final = {
    "registry": ("a penstock.HandlerRegistry", "lookup"),
    "save_pipeline": ("a penstock.Pipeline", "slots"),
    "restore_pipeline": ("a penstock.Pipeline", "slots"),
    "store": ("a store, whose class derives from penstock.kernel.Store", "free_bytes"),
    "save_format": ("a penstock.SaveFormat", "codec"),
    "layout": ("a layout such as penstock.handlers.OrbaxLayout()", "find"),
    "coordinator": ("a coordinator, see penstock.kernel.Coordinator", "operation"),
    "job": ("a penstock.JobOptions", "local_name"),
    "memory": ("a penstock.MemoryRegulator", "limit_of"),
}


def _check_parts(**parts: object) -> None:
    """Refuse a part of another kind now, and not at the first save.

    Raises:
        SpecError: If it is one.
    """
    for name, value in parts.items():
        what, member = _PARTS[name]
        if value is not None and not hasattr(value, member):
            raise SpecError(f"{name} must be {what}, not {value!r}")


def _checked(observers: Iterable[Observer]) -> tuple[Observer, ...]:
    """Return the observers.

    Raises:
        SpecError: If it is no iterable, or one of them is no observer.
    """
    try:
        given = tuple(observers)
    except TypeError as error:
        raise SpecError(f"observers must be a list or a tuple, not {observers!r}") from error

    for each in given:
        if not isinstance(cast("object", each), Observer):
            raise SpecError(f"an observer has the methods `observing` and `watching`, and {each!r} has not")

    return given

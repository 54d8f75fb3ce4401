"""Saving one tree, or several named objects, as one checkpoint.

Handlers fill a directory that is published as a whole, by one process or by all of a job. To a bucket,
penstock builds the whole checkpoint, and no handler writes files.
"""

from __future__ import annotations

__all__ = (
    "ItemsSave",
    "begin_save",
    "check_state",
    "prepare_save",
    "save",
    "save_async",
    "save_checkpointables",
    "save_checkpointables_async",
    "save_pytree",
    "save_pytree_async",
    "wait_until_staged",
)

import os
import time
import warnings
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, Final, final

from anyio import fail_after, move_on_after
from jax import tree_util

from penstock import Checkpointer, kernel
from penstock import handlers as built_in
from penstock.embedding import (
    DirectoryBuild,
    JointBuild,
    SharedDirectory,
    checkpoint_metadata,
    failures,
    file_names,
    limit_permissions,
    paths,
)
from penstock.errors import ConfigError, NoHandlerError, PathError
from penstock.items import Composite as Items
from penstock.items import Json, PyTree
from penstock.orbax.enclosing_save import described_json, joint_place
from penstock.orbax.future import together
from penstock.orbax.leaf_args import items_first
from penstock.orbax.options import job_options, saves_jointly
from penstock.orbax.v1.handler_registration import (
    METRICS,
    STATE,
    Checkpointable,
    check_item_names,
    resolve_handler_for_save,
    typestr,
)
from penstock.orbax.v1.handlers import JsonHandler, MetricsHandler
from penstock.orbax.v1.operation import (
    AsyncResponse,
    BackgroundOperation,
    begin,
    give_up,
    share_loop,
    wait_for,
)
from penstock.orbax.v1.options import Context, get_context
from penstock.orbax.v1.path import PathLike, PendingPath
from penstock.orbax.v1.pytree_handler import CustomLeaves, PyTreeHandler, save_format_of
from penstock.orbax.v1.serialization import StandardLeafHandlerRegistry, UnregisteredTypeError
from penstock.orbax.v1.tree import JsonType, Leaf, PyTreeOf, is_supported_leaf

CLEANING_S = 60.0

_PLAIN: Final = (JsonHandler, MetricsHandler)


@failures.short_traceback
def save(
    path: PathLike,
    state: PyTreeOf,
    *,
    checkpointable_name: str = STATE,
    overwrite: bool = False,
    custom_metadata: JsonType | None = None,
) -> None:
    """Save a tree; return when it is durable and visible. Works inside a running event loop, too.

    Args:
        path: The directory of the checkpoint, which does not exist yet.
        state: A PyTree of arrays, numbers and strings.
        checkpointable_name: The name of the item that holds the tree.
        overwrite: Whether to replace the checkpoint at `path`, atomically, when the new one is complete.
        custom_metadata: JSON values kept with the checkpoint.

    Raises:
        ValueError: If the tree cannot be saved, or something exists at `path` and `overwrite` is off.
        PenstockError: What `penstock.save` raises.
    """
    check_state(state)
    items = {checkpointable_name: state}
    wait_for(begin_save(path, items, overwrite=overwrite, custom_metadata=custom_metadata))


@failures.short_traceback
def save_checkpointables(
    path: PathLike,
    checkpointables: dict[str, Checkpointable],
    *,
    overwrite: bool = False,
    custom_metadata: JsonType | None = None,
) -> None:
    """Save named objects as one checkpoint: trees, JSON, and anything else that has a handler.

    Args:
        path: As for `save`.
        checkpointables: The objects by name. Each gets a directory of that name.
        overwrite: As for `save`.
        custom_metadata: As for `save`.

    Raises:
        ValueError: As for `save`, or if a name is not allowed.
        NoEntryError: If an object has no handler. It is a KeyError.
        PenstockError: What `penstock.save` raises.
    """
    wait_for(begin_save(path, checkpointables, overwrite=overwrite, custom_metadata=custom_metadata))


@failures.short_traceback
def save_async(
    path: PathLike,
    state: PyTreeOf,
    *,
    checkpointable_name: str = STATE,
    overwrite: bool = False,
    custom_metadata: JsonType | None = None,
) -> AsyncResponse[None]:
    """Start to save a tree; return when it may be changed, deleted or donated.

    See `save` for the arguments and errors. The result can be awaited, too.
    """
    check_state(state)
    items = {checkpointable_name: state}
    return wait_until_staged(begin_save(path, items, overwrite=overwrite, custom_metadata=custom_metadata))


@failures.short_traceback
def save_checkpointables_async(
    path: PathLike,
    checkpointables: dict[str, Checkpointable],
    *,
    overwrite: bool = False,
    custom_metadata: JsonType | None = None,
) -> AsyncResponse[None]:
    """Start to save named objects; return when they may be changed. See `save_checkpointables`."""
    return wait_until_staged(
        begin_save(path, checkpointables, overwrite=overwrite, custom_metadata=custom_metadata)
    )


def save_pytree(*args: Any, **kwargs: Any) -> None:
    """Do what `save` does. Deprecated: use `save`."""
    warnings.warn("Use `save` instead.", DeprecationWarning, stacklevel=2)
    save(*args, **kwargs)


def save_pytree_async(*args: Any, **kwargs: Any) -> AsyncResponse[None]:
    """Do what `save_async` does. Deprecated: use `save_async`."""
    warnings.warn("Use `save_async` instead.", DeprecationWarning, stacklevel=2)
    return save_async(*args, **kwargs)


def begin_save(
    path: PathLike,
    checkpointables: Mapping[str, Checkpointable],
    *,
    overwrite: bool,
    custom_metadata: JsonType | None,
    metrics: JsonType | None = None,
    is_step: bool = False,
) -> BackgroundOperation[None]:
    """Start to save named objects. Raises errors of the arguments at once; see `save_checkpointables`.

    Args:
        path: As for `save_checkpointables`.
        checkpointables: Likewise.
        overwrite: Likewise.
        custom_metadata: Likewise.
        metrics: Those of a step, which are an item of their own; None if it has none.
        is_step: Whether it is a step of a manager: then each item gets a commit mark, too, as Orbax's have.
    """
    saving = prepare_save(
        path, checkpointables, overwrite=overwrite, custom_metadata=custom_metadata, metrics=metrics
    )
    saving.marks_items = is_step
    return begin(f"save of {saving.path!r}", saving)


def prepare_save(
    path: PathLike,
    checkpointables: Mapping[str, Checkpointable],
    *,
    overwrite: bool,
    custom_metadata: JsonType | None,
    metrics: JsonType | None = None,
) -> ItemsSave:
    """Check the arguments of a save; see `begin_save`."""
    if not checkpointables:
        raise ValueError(f"`checkpointables` must not be empty, but got {checkpointables!r}")

    check_item_names(checkpointables, "checkpointables")
    context = get_context()
    registry = context.checkpointables.registry
    items = {**checkpointables, **({METRICS: metrics} if metrics else {})}
    handlers = {name: resolve_handler_for_save(registry, item, name=name) for name, item in items.items()}
    return ItemsSave(paths.path_to_save_to(path), items, handlers, context, overwrite, custom_metadata)


def check_state(state: Any) -> None:
    """Refuse leaves of types that `save` does not support.

    Raises:
        ValueError: If there is such a leaf.
    """
    unknown = next((leaf for leaf in tree_util.tree_leaves(state) if not is_supported_leaf(leaf)), None)
    if unknown is not None:
        raise ValueError(
            f"Unsupported leaf type for saving: `{type(unknown)}`. Supported leaf types are: {Leaf}."
        )


@final
class ItemsSave:
    """One save: creates the directory, lets the handlers fill it, completes and publishes it.

    Args:
        path: The path of the checkpoint; may be changed until it is called.
        items: The objects by name; forgotten once the handlers have them.
        handlers: The handler of each.
        context: The options.
        overwrite: Whether an existing checkpoint may be replaced.
        custom_metadata: The caller's own.
    """

    def __init__(
        self,
        path: str,
        items: dict[str, Checkpointable],
        handlers: Mapping[str, Any],
        context: Context,
        overwrite: bool,
        custom_metadata: JsonType | None,
    ) -> None:
        self.path = path
        self.marks_items = False  #: whether each item gets a commit mark, too
        self._items = items
        self._handlers = handlers
        self._context = context
        self._overwrite = overwrite
        self._custom_metadata = custom_metadata
        self._jointly = saves_jointly(context.multiprocessing, None, context.file.path_permission_mode)
        self._started_ns = time.time_ns()
        self._store = built_in.LocalStore()
        paths.temporary_path(path)  # refuses names that cannot be read again
        self._job = job_options(context.multiprocessing) if self._jointly else None
        self._in_bucket = paths.scheme_of(path) is not None
        if self._in_bucket:
            try:
                self._check_for_bucket()
            except ValueError as error:
                if self._job is not None:
                    JointBuild.refuse(path, error, self._job)  # the others would wait for this process
                raise

    async def __call__(self, operation: BackgroundOperation[None]) -> None:
        try:
            with fail_after(self._context.asynchronous.timeout_secs):
                if self._in_bucket:
                    await self._save_in_bucket(operation)
                elif self._jointly:
                    await self._save_jointly(operation)
                else:
                    await self._save_alone(operation)
        finally:
            self._items.clear()  # the traceback of a failure refers to this object

        callback = self._context.asynchronous.post_finalization_callback
        if callback is not None:
            callback()

    def _check_for_bucket(self) -> None:
        """Refuse what needs a directory of the operating system, and trees that cannot be saved.

        Raises:
            ValueError: If a leaf cannot be saved, or there is none.
            PathError: If a handler writes files by itself.
            ConfigError: If directories are to have permissions.
        """
        if self._context.file.path_permission_mode is not None:
            raise ConfigError("path_permission_mode", "a bucket has no directories, and so no permissions")

        for name, handler in self._handlers.items():
            if isinstance(handler, PyTreeHandler):
                if handler.keeps_own_files:
                    problem = f"is in a bucket, and leaf handlers of {name!r} write files by themselves"
                    raise PathError(self.path, problem)

                handler.check(self._items[name])
            elif type(handler) not in _PLAIN:
                kind = type(handler).__name__
                problem = f"is in a bucket, and the {kind} of {name!r} reads and writes files by itself"
                raise PathError(self.path, f"{problem}; trees and JSON are saved there")

    async def _save_in_bucket(self, operation: BackgroundOperation[None]) -> None:
        """Have penstock build the whole checkpoint in a bucket."""
        trees = {name: one for name, one in self._handlers.items() if isinstance(one, PyTreeHandler)}
        asked = {name: one.save_args(self._items[name]) for name, one in trees.items()}
        given = {name: args for name, args in asked.items() if args is not None}
        first = {name: one.comes_first(self._items[name]) for name, one in trees.items()}
        async with Checkpointer(
            save_format=save_format_of(self._context.array.saving, jointly=self._job is not None),
            memory_limit=self._context.memory.save_limit,
            registry=CustomLeaves(StandardLeafHandlerRegistry(), self._context).registry(),
            coordinator=kernel.SingleProcessCoordinator() if self._job is None else None,
            job=self._job,
        ) as checkpointer:
            try:
                saving = await checkpointer.save(
                    self.path,
                    Items(
                        {
                            name: (PyTree if name in trees else Json)(item)
                            for name, item in self._items.items()
                        }
                    ),
                    overwrite="delete-first" if self._overwrite else False,
                    custom_metadata=self._custom_metadata,
                    save_args=given or None,
                    prioritise=items_first(first),
                )
            except NoHandlerError as error:
                raise UnregisteredTypeError(str(error)) from error

            self._items.clear()  # a save in the background must not keep alive what the caller dropped
            operation.mark_begun()
            await saving

    async def _save_alone(self, operation: BackgroundOperation[None]) -> None:
        threads = kernel.Threads()  # made in the loop of the operation, which it belongs to
        building = DirectoryBuild(
            self._store,
            self.path,
            overwrite=self._overwrite,
            recognises=partial(built_in.OrbaxLayout().recognises, self._store),
        )

        def create() -> None:
            building.create()
            for name in self._handlers:
                self._store.make_directory(os.path.join(building.path, name))

        try:
            await threads.run(building.check)
            await self._fill(operation, building.path, partial(threads.run, create))
            await threads.run(self._complete, building)
        except BaseException:
            with move_on_after(CLEANING_S, shield=True):
                await threads.run(building.discard)

            raise

    async def _save_jointly(self, operation: BackgroundOperation[None]) -> None:
        """Save together with the other processes: each has its handlers fill one place, and one publishes."""
        asked = self._described()

        def complete(build: JointBuild) -> None:
            self._complete(SharedDirectory(self._store, build.place))

        async with Checkpointer(job=self._job) as checkpointer:
            build = await JointBuild.begin(
                checkpointer, self.path, asked, complete, overwrite=self._overwrite
            )
            with joint_place(build):
                await build.written_by(partial(self._fill_together, operation, build.place))

    def _described(self) -> list[str]:
        """Return what must be the same in all processes."""
        items = [
            f"item {name}\t{typestr(handler.__class__)}"
            + (f" {described_json(self._items[name])}" if isinstance(handler, _PLAIN) else "")
            for name, handler in sorted(self._handlers.items())
        ]
        return [*items, f"option custom_metadata\t{described_json(self._custom_metadata)}"]

    async def _fill_together(self, operation: BackgroundOperation[None], place: str) -> None:
        threads = kernel.Threads()

        async def make() -> None:
            for name in self._handlers:
                await threads.run(SharedDirectory(self._store, os.path.join(place, name)).create)

        await self._fill(operation, place, make)
        await threads.run(SharedDirectory(self._store, place).sync)

    async def _fill(
        self, operation: BackgroundOperation[None], place: str, make: Callable[[], Awaitable[None]]
    ) -> None:
        directory = PendingPath(self._context.file.path_class(place), make)
        async with share_loop(len(self._items)):
            writing: dict[str, Awaitable[None]] = {}

            async def begin_item(name: str, item: Checkpointable) -> None:
                writing[name] = await self._handlers[name].save(directory / name, item)

            try:
                await together([partial(begin_item, name, item) for name, item in self._items.items()])
                self._items.clear()  # a save in the background must not keep alive what the caller dropped
                operation.mark_begun()
                await directory.await_creation()
                await together([partial(_wait, one) for one in writing.values()])
            finally:
                give_up(writing.values())

    def _complete(self, building: DirectoryBuild | SharedDirectory) -> None:
        """Write the documents of the checkpoint, and publish it with what the handlers wrote."""
        place = building.path
        mode = self._context.file.path_permission_mode
        if mode is not None:
            for name in ("", *self._handlers):
                limit_permissions(os.path.join(place, name), mode)

        about = checkpoint_metadata.encode_checkpoint_metadata(
            started_ns=self._started_ns,
            committed_ns=time.time_ns(),
            custom_metadata=self._custom_metadata,
            item_handlers={name: typestr(handler.__class__) for name, handler in self._handlers.items()},
        )
        if self.marks_items:
            for name in self._handlers:
                SharedDirectory(self._store, os.path.join(place, name), whole=False).publish(synced=False)

        self._store.write_file(os.path.join(place, file_names.V1_MARK), b"")
        self._store.write_file(os.path.join(place, file_names.CHECKPOINT_METADATA), about)
        building.publish(synced=False)


def wait_until_staged(operation: BackgroundOperation[None]) -> BackgroundOperation[None]:
    """Wait in this thread until the objects may be changed."""
    try:
        operation.wait_begun()
    except BaseException:
        operation.cancel()
        raise

    return operation


async def _wait(awaitable: Awaitable[Any]) -> None:
    await awaitable

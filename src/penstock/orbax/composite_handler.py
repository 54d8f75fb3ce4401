"""Several named items in one checkpoint, each with its own directory and handler.

In a bucket there are no such directories: there the trees and the JSON of all items are one save.
"""

from __future__ import annotations

__all__ = ("CompositeArgs", "CompositeCheckpointHandler", "CompositeOptions", "CompositeResults")

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, final

from anyio import CancelScope, to_thread

from penstock import handlers as built_in
from penstock import kernel
from penstock.embedding import DirectoryBuild, SharedDirectory, blocking, file_names
from penstock.errors import PathError
from penstock.items import Composite as Items
from penstock.items import Json, PyTree
from penstock.orbax.base_pytree_handler import (
    BasePyTreeCheckpointHandler,
    BasePyTreeSaveArgs,
    HandledTree,
    TreeHandler,
)
from penstock.orbax.checkpoint_args import (
    AsyncCheckpointHandler,
    CheckpointArgs,
    CheckpointHandler,
    CheckpointHandlerRegistry,
    DefaultCheckpointHandlerRegistry,
    blocks_without_loop,
    get_handler_type,
    get_registered_args_cls,
    get_registered_handler_cls,
    has_registered_args,
    is_durable,
    register_with_handler,
    saves_together,
    wait_for_all,
)
from penstock.orbax.enclosing_save import JointDirectory, joint_build_around, writes_what_is_whole
from penstock.orbax.future import Future, stopped, together
from penstock.orbax.item_files import bucket_url, handler_path, is_there, path_text, place_of, store_at
from penstock.orbax.leaf_args import items_first
from penstock.orbax.logging import WRITE, timed
from penstock.orbax.metadata import (
    Composite,
    CompositeItemMetadata,
    MetadataStore,
    StepMetadata,
    decode_step_metadata,
    step_metadata_file_path,
)
from penstock.orbax.options import (
    AsyncOptions,
    AtomicityOptions,
    FileOptions,
    MultiprocessingOptions,
    check_publishing,
    chosen_atomicity,
    is_in_place,
)
from penstock.orbax.plain_handlers import JsonCheckpointHandler, WrapperArgs, get_legacy_handler_wrapper
from penstock.orbax.standard_handler import StandardCheckpointHandler


@dataclass
class CompositeOptions:
    """Options of a `CompositeCheckpointHandler`.

    Attributes:
        multiprocessing_options: Which processes save.
        temporary_path_class: Says the same as `atomicity_options`, and is stronger; see `path.atomicity`.
        file_options: The permissions of item directories.
        atomicity_options: How an item becomes visible in its checkpoint.
        async_options: How saves go on in the background.

    Raises:
        ConfigError: If the `temporary_path_class` publishes by itself. It is a ValueError.
    """

    multiprocessing_options: MultiprocessingOptions = field(default_factory=MultiprocessingOptions)
    temporary_path_class: Any = None
    file_options: FileOptions | None = None
    atomicity_options: AtomicityOptions | None = None
    async_options: AsyncOptions | None = None

    def __post_init__(self) -> None:
        self.atomicity_options = chosen_atomicity(self.temporary_path_class, self.atomicity_options)


class CompositeCheckpointHandler(AsyncCheckpointHandler):
    """Saves named items, each with its own handler, which the type of its arguments determines.

    Args:
        *item_names: Items whose first arguments determine their handler; if any are given here or with
            `items_and_handlers`, there are no others.
        composite_options: Options.
        handler_registry: Handlers by item; excludes the other two.
        **items_and_handlers: Handlers by item; None where the first arguments determine it.

    Raises:
        ValueError: If `handler_registry` is given with either of the others.
    """

    _ORBAX_NAME = "orbax.checkpoint._src.handlers.composite_checkpoint_handler.CompositeCheckpointHandler"
    _DURABLE = True
    _BLOCKS = True

    def __init__(
        self,
        *item_names: str,
        composite_options: CompositeOptions = CompositeOptions(),
        handler_registry: CheckpointHandlerRegistry | None = None,
        **items_and_handlers: CheckpointHandler,
    ) -> None:
        for given, name in ((items_and_handlers, "items_and_handlers"), (item_names, "item_names")):
            if handler_registry is not None and given:
                raise ValueError(f"Both `handler_registry` and `{name}` were provided; specify one")

        self._handlers = ItemHandlers(item_names, items_and_handlers, handler_registry)
        self._options = composite_options
        self._primary_host = composite_options.multiprocessing_options.primary_host
        self._completes = True  # or else another process does
        self._store = built_in.LocalStore()
        self._metadata_store = MetadataStore(enable_write=False)
        self._current_temporary_paths: dict[str, DirectoryBuild | SharedDirectory] = {}

    @property
    def _handler_registry(self) -> CheckpointHandlerRegistry:
        return self._handlers.registry

    @property
    def _item_names_without_registered_handlers(self) -> set[str] | None:
        return self._handlers.undetermined

    async def async_save(self, directory: Any, args: CompositeArgs) -> Sequence[Future] | None:
        """Copy every item; return futures of the writes in the background.

        Raises:
            ValueError: If the arguments of an item fit no handler of it.
        """
        items = {name: (self._get_or_set_handler(name, args[name]), args[name]) for name in sorted(args)}
        if isinstance(directory, JointDirectory):
            return await save_items(directory, items)

        building = self._get_item_temporary_paths(directory, args)
        for one in self._current_temporary_paths.values():  # of a save that was never finalized
            one.release()

        self._current_temporary_paths = building
        futures: dict[str, Sequence[Future]] = {}

        async def save(name: str, handler: Any, arg: CheckpointArgs) -> None:
            place = handler_path(building[name].path)
            if isinstance(handler, AsyncCheckpointHandler):
                futures[name] = await handler.async_save(place, args=arg) or ()
            else:
                await to_thread.run_sync(lambda: handler.save(place, args=arg))

        await kernel.Threads(1).run_briefly(lambda: [one.create() for one in building.values()])
        try:
            await together([partial(save, name, handler, arg) for name, (handler, arg) in items.items()])
        except BaseException:  # a cancellation, too, if another process ended the save
            await _stop(_all(futures.values()))
            raise

        return _all(futures[name] for name in items if name in futures)

    def save(self, *args: Any, **kwargs: Any) -> None:
        """Save every item; see `async_save`."""
        wait_for_all(self, *args, **kwargs)

    def restore(self, directory: Any, args: CompositeArgs | None = None) -> CompositeResults:
        """Restore items.

        Args:
            directory: Of the checkpoint.
            args: Which items, and how; None or empty for all that are stored.

        Raises:
            KeyError: If a requested item is not stored.
            ValueError: If the handler of an item cannot be determined.
        """
        directory = place_of(directory)
        existing = self._existing_items(directory)
        if args is None or not args.items():
            args = self._default_args(directory, existing)

        restored: dict[str, Any] = {}
        for name in sorted(args.keys()):
            if name not in existing:
                raise KeyError(f'Item "{name}" was not found in the checkpoint. Available items: {existing}')

            handler = self._get_or_set_handler(name, args[name])
            if (url := bucket_url(directory)) is not None:
                check_item(name, handler, url)

            restored[name] = handler.restore(self._get_item_directory(directory, name), args=args[name])

        return CompositeResults(**restored)

    def metadata(self, directory: Any) -> StepMetadata:
        """Describe the checkpoint, and each item whose handler is known.

        Raises:
            FileNotFoundError: If there is no such directory.
            ValueError: If items were saved and not finalized yet.
        """
        directory = place_of(directory)
        if not is_there(directory):
            raise FileNotFoundError(f"Directory does not exist: {directory}")

        existing = self._existing_items(directory)
        for one in self._current_temporary_paths.values():
            name = os.path.basename(one.path)
            if name in existing:
                raise ValueError(f'Item "{name}" is a temporary item; call finalize() before metadata()')

        return self._step_metadata(directory, existing, of_items=True)

    def metadata_from_temporary_paths(self, directory: Any) -> StepMetadata:
        """Describe the checkpoint while its items are not finalized, without describing the items."""
        directory = handler_path(directory)
        if not directory.exists():
            raise FileNotFoundError(f"Directory does not exist: {directory}")

        return self._step_metadata(directory, list(self._current_temporary_paths), of_items=False)

    def finalize(self, directory: Any) -> None:
        """Complete every saved item and rename it to its final name.

        Raises:
            ValueError: If nothing was saved.
        """
        if not self._current_temporary_paths:
            raise ValueError("finalize() called before any items were saved.")

        for name, handler in self._handlers.unique():
            building = self._current_temporary_paths.get(name)
            if building is not None:
                with timed(f"{WRITE}background_item_finalize_secs"):
                    handler.finalize(handler_path(building.path))
                    building.publish(synced=is_durable(handler))

                del self._current_temporary_paths[name]

    def complete_part(self) -> None:
        """Make durable what this process wrote. The primary's `finalize` completes the rest."""
        for name, handler in self._handlers.unique():
            place = self._current_temporary_paths.get(name)
            if isinstance(place, SharedDirectory) and not is_durable(handler):
                place.sync()

        if not self._completes:
            self._current_temporary_paths.clear()

    def close(self) -> None:
        """Close every handler, also if one of them fails to."""
        with ExitStack() as ends:
            for _, handler in self._handlers.unique():
                ends.callback(handler.close)

    def items_need_event_loop(self, args: CompositeArgs) -> bool:
        """Return whether `async_save` of the handler of any item needs one. penstock's."""
        return any(needs_event_loop(self._get_or_set_handler(name, args[name]), args[name]) for name in args)

    def _get_or_set_handler(self, item_name: str, args: CheckpointArgs | None) -> Any:
        return self._handlers.choose(item_name, args)

    def _get_item_directory(self, directory: Any, item_name: str) -> Any:
        return place_of(directory) / item_name

    def _get_item_temporary_paths(
        self, directory: Any, args: Mapping[str, Any]
    ) -> dict[str, DirectoryBuild | SharedDirectory]:
        options, build = self._options, joint_build_around(directory)
        self._completes = writes_what_is_whole(directory)
        mode = None if options.file_options is None else options.file_options.path_permission_mode
        if build is not None:
            check_publishing(options.atomicity_options, mode)

        def place_of(name: str) -> DirectoryBuild | SharedDirectory:
            path = path_text(self._get_item_directory(directory, name))
            if build is not None:
                return SharedDirectory(self._store, path, whole=False)

            return DirectoryBuild(
                self._store,
                path,
                overwrite=False,
                in_place=is_in_place(options.atomicity_options),
                mode=mode,
                whole=False,
            )

        return {name: place_of(name) for name in sorted(args)}

    def _existing_items(self, directory: Any) -> list[str]:
        url = bucket_url(directory)
        if url is not None:
            return list(store_at(url).list_folders(url))

        return [path.name for path in handler_path(directory).iterdir() if path.is_dir()]

    def _items_exist(self, directory: Any, item_names: list[str]) -> dict[str, bool]:
        return {name: self._get_item_directory(directory, name).exists() for name in item_names}

    def _default_args(self, directory: Any, existing: Sequence[str]) -> CompositeArgs:
        """Make default arguments for all stored items."""
        handlers = dict(self._handlers.all())
        recorded: Any = None
        found: dict[str, CheckpointArgs] = {}
        for name in existing:
            if file_names.TEMPORARY_SUFFIX in name:
                continue
            if name not in handlers:
                if recorded is None:
                    recorded = self.metadata(directory).item_handlers or {}
                try:
                    handler: Any = get_handler_type(recorded[name])
                except KeyError as error:
                    raise ValueError(
                        f'Item "{name}" was found in the checkpoint, but could not be restored. Provide a '
                        "CheckpointHandlerRegistry, or call restore with arguments for it."
                    ) from error
            else:
                handler = handlers[name]
            if handler is None:
                raise ValueError(
                    f'Item with name: "{name}" had an undetermined `CheckpointHandler` when restoring; '
                    "name it when you make the handler, or call restore with arguments for the item"
                )

            found[name] = _default_restore_args(name, handler)

        return CompositeArgs(**found)

    def _step_metadata(self, directory: Any, item_names: Sequence[str], *, of_items: bool) -> StepMetadata:
        saved = decode_step_metadata(self._metadata_store.read(step_metadata_file_path(directory)) or {})
        if saved.item_handlers is not None and not isinstance(saved.item_handlers, dict):
            raise ValueError(
                "StepMetadata.item_handlers must be a dict, of a checkpoint of several items; it is "
                f"{saved.item_handlers!r}"
            )

        handlers = dict(self._handlers.all())
        names: dict[str, Any] = dict(saved.item_handlers or {})
        about: dict[str, Any] = {}
        for name in item_names:
            handler = handlers.get(name)
            if names.get(name) is None:
                names[name] = None if handler is None else handler.typestr()
            try:
                about[name] = (
                    handler.metadata(self._get_item_directory(directory, name))
                    if of_items and handler is not None
                    else None
                )
            except FileNotFoundError:
                about[name] = None

        saved.item_handlers = names
        saved.item_metadata = CompositeItemMetadata(**about) if of_items else None
        return saved


@register_with_handler(CompositeCheckpointHandler, for_save=True, for_restore=True)
class CompositeArgs(Composite, CheckpointArgs):
    """Arguments for several items, by name; and what restoring them returns."""


CompositeResults = CompositeArgs


def needs_event_loop(handler: Any, args: Any) -> bool:
    """Return whether `async_save` of a handler needs an event loop to be called with these arguments."""
    if not blocks_without_loop(handler):
        return True
    if isinstance(handler, CompositeCheckpointHandler):
        return handler.items_need_event_loop(args)

    return isinstance(handler, TreeHandler) and not blocks_without_loop(handler.base)


def _all(futures: Any) -> list[Future]:
    return [future for some in futures for future in some]


async def _stop(futures: Sequence[Future]) -> None:
    """Stop what has begun, and wait for that: for a bounded time, whatever is cancelled meanwhile."""
    if not blocking.in_event_loop():
        stopped(futures)
        return

    with CancelScope(shield=True):
        await to_thread.run_sync(stopped, futures)


def _default_restore_args(name: str, handler: Any) -> CheckpointArgs:
    _, restore_cls = get_registered_args_cls(handler)
    try:
        return restore_cls()
    except TypeError as error:
        raise ValueError(
            f'the arguments to restore item "{name}" with ({restore_cls}) are not default constructible'
        ) from error


_METRICS: Final = "metrics"


def check_item(name: str, handler: Any, url: str) -> None:
    """Refuse the handler of an item that needs a directory of the operating system.

    Raises:
        PathError: If it does. It is a ValueError.
    """
    if type(handler) is JsonCheckpointHandler:
        usual = _METRICS if name == _METRICS else "metadata"
        if handler.filename != usual:
            raise PathError(url, f"is in a bucket, where the JSON of {name!r} is called {usual!r}")
    elif not saves_together(handler):
        problem = (
            f"is in a bucket, and the {type(handler).__name__} of {name!r} reads and writes files by itself"
        )
        raise PathError(url, f"{problem}; trees and JSON are saved there")


async def save_items(place: JointDirectory, items: Mapping[str, tuple[Any, Any]]) -> Sequence[Future]:
    """Copy every item, and begin to write the checkpoint.

    How arrays are stored, and what memory they may take, says the handler of the first tree.

    Args:
        place: In a bucket.
        items: By name: the handler, and the arguments of the save.

    Raises:
        PathError: If a handler writes files by itself, or two trees are stored differently.
        ValueError: If a leaf cannot be saved.
    """
    for name, (handler, _) in items.items():
        check_item(name, handler, place.path)

    trees: dict[str, HandledTree] = {}
    leading: Any = None
    for name, (handler, args) in items.items():
        if type(handler) is JsonCheckpointHandler:
            continue

        base: Any = handler.base if isinstance(handler, TreeHandler) else handler
        item = handler.checked(args) if isinstance(handler, StandardCheckpointHandler) else args.item
        most = getattr(args, "ocdbt_target_data_file_size", None)
        trees[name] = base.tree_to_save(place, BasePyTreeSaveArgs(item, args.save_args, most))
        leading = leading or base
        if (base._form, base._registry) != (leading._form, leading._registry):
            raise PathError(place.path, f"is in a bucket, where {name!r} is stored as the other trees are")

    leading = leading or BasePyTreeCheckpointHandler()
    whole: dict[str, object] = {
        name: PyTree(trees[name].item, args.custom_metadata) if name in trees else Json(args.item)
        for name, (_, args) in items.items()
    }
    all_items = HandledTree(
        Items(whole),
        leading._registry,
        leading._workers(),
        save_args={name: tree.save_args for name, tree in trees.items() if tree.save_args is not None},
        prioritise=items_first({name: tree.prioritise for name, tree in trees.items()}),
    )
    return [await leading.begin_save(place, all_items)]


@final
class ItemHandlers:
    """Handlers by item. Each is given, or determined by the first arguments of its item.

    Args:
        names: Items whose handler is not known yet.
        handlers: By item; None where it is not known yet.
        registry: Handlers by item and class of arguments; excludes the other two.
    """

    def __init__(
        self, names: Sequence[str], handlers: Mapping[str, Any], registry: CheckpointHandlerRegistry | None
    ) -> None:
        self.registry: CheckpointHandlerRegistry = DefaultCheckpointHandlerRegistry(registry)
        self.undetermined: set[str] | None = None  #: None unless item names were given
        self._known_items: set[str] = set()  # items whose handler is determined
        if not names and not handlers:
            self._known_items = {name for name, _ in self.unique()}
            return

        self.undetermined = {name for name in names if name not in handlers}
        for name, handler in handlers.items():
            if handler is None:
                self.undetermined.add(name)
            elif has_registered_args(handler):
                self._add(name, handler)
            else:
                self.registry.add(name, WrapperArgs, get_legacy_handler_wrapper(handler))

    def unique(self) -> list[tuple[str, Any]]:
        """Return each item with each of its handlers."""
        found: list[tuple[str, Any]] = []
        for (name, _), handler in self.registry.get_all_entries().items():
            if name is not None and (name, handler) not in found:
                found.append((name, handler))

        return found

    def all(self) -> list[tuple[str, Any]]:
        """Return each item with each of its handlers, or with None where it is not known yet."""
        return [*self.unique(), *[(name, None) for name in sorted(self.undetermined or ())]]

    def choose(self, name: str, args: CheckpointArgs | None) -> Any:
        """Return the handler of an item, given its arguments.

        Args:
            name: Of the item.
            args: The arguments; None if the handler must be known.

        Raises:
            ValueError: If there is none, or the item has another handler already.
        """
        if args is None:
            return self._known(name)

        if self.registry.has(name, args):
            return self.registry.get(name, args)
        if self.registry.has(None, args):
            handler = self.registry.get(None, args)
            self.registry.add(name, args, handler)
            return handler

        handler = get_registered_handler_cls(args)()
        if self.undetermined is None:
            new = name not in self._known_items
            self._known_items.add(name)
        else:
            new = name in self.undetermined
            self.undetermined.discard(name)
        if not new:
            raise ValueError(
                f'Item "{name}" and args "{args}" does not match with any registered handler! '
                f"Registered handlers: {list(self.registry.get_all_entries().items())}"
            )

        self._add(name, handler)
        return handler

    def _known(self, name: str) -> Any:
        for item, handler in self.unique():
            if item == name:
                return handler

        raise ValueError(
            f'Provided `None` for `CheckpointArgs`, and the `CheckpointHandler` for item "{name}" was not '
            "configured: give the arguments of its handler"
        )

    def _add(self, name: str, handler: Any) -> None:
        for args_cls in dict.fromkeys(get_registered_args_cls(handler)):
            self.registry.add(name, args_cls, handler)

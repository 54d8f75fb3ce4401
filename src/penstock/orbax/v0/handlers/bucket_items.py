"""Several items as one checkpoint in a bucket, which penstock builds as a whole: no handler writes files."""

from __future__ import annotations

__all__ = ("check_item", "names_in_bucket", "save_items")

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, final

from penstock.handlers.layouts.item_types import Composite, Json, PyTree
from penstock.kernel.errors import PathError
from penstock.kernel.protocols.leaf import KeyPath
from penstock.kernel.protocols.store_capabilities import FolderListing
from penstock.kernel.storage.paths import bucket_of
from penstock.orbax.common.as_raised import awaited_as_raised
from penstock.orbax.common.handler_paths import store_at
from penstock.orbax.v0.common.joint_directory import JointDirectory
from penstock.orbax.v0.common.save_future import Future, PipelineFuture
from penstock.orbax.v0.handlers.base_pytree_handler import BasePyTreeCheckpointHandler
from penstock.orbax.v0.handlers.checkpoint_handler import saves_together
from penstock.orbax.v0.handlers.json_handler import JsonCheckpointHandler
from penstock.orbax.v0.handlers.pytree_calls import start_joint_save
from penstock.orbax.v0.handlers.pytree_handler import PyTreeCheckpointHandler
from penstock.orbax.v0.handlers.standard_handler import StandardCheckpointHandler
from penstock.orbax.v0.leaf_handlers.stage_workers import UnknownTypeError
from penstock.orbax.v0.trees.empty_node_leaves import with_markers
from penstock.orbax.v0.trees.leaf_formats import leaf_formats

_METRICS: Final = "metrics"


@final
@dataclass(frozen=True, slots=True)
class _Tree:
    """A tree that is saved, and the handler that says how."""

    handler: Any  #: a `BasePyTreeCheckpointHandler`
    item: Any
    args: Any

    def formats(self) -> Any:
        most = getattr(self.args, "ocdbt_target_data_file_size", None)
        return leaf_formats(self.item, self.args.save_args, self.handler._form, most)

    def first(self) -> Callable[[KeyPath], bool] | None:
        found: Callable[[KeyPath], bool] | None = self.handler._prioritise(self.item)
        return found


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

    trees = {name: _tree(*one) for name, one in items.items() if type(one[0]) is not JsonCheckpointHandler}
    leading: Any = next((tree.handler for tree in trees.values()), None) or BasePyTreeCheckpointHandler()
    for name, tree in trees.items():
        if (tree.handler._form, tree.handler._registry) != (leading._form, leading._registry):
            raise PathError(place.path, f"is in a bucket, where {name!r} is stored as the other trees are")

    whole: dict[str, object] = {}
    for name, (_, args) in items.items():
        saved = trees.get(name)
        whole[name] = (
            Json(args.item) if saved is None else PyTree(with_markers(saved.item), args.custom_metadata)
        )

    keywords: dict[str, Any] = {
        "save_args": {name: asked for name, tree in trees.items() if (asked := tree.formats()) is not None},
        "prioritise": _prioritise({name: tree.first() for name, tree in trees.items()}),
    }
    start = partial(leading._loop.acall, start_joint_save, leading._registry, leading._workers())
    try:
        save = await awaited_as_raised(start(place, Composite(whole), keywords))
    except UnknownTypeError as error:
        raise ValueError(f"TypeHandler lookup failed for: type={error.type_}, {error}") from error

    return [PipelineFuture(save, keep=leading._loop)]


def names_in_bucket(url: str) -> list[str] | None:
    """Return the names of the items of a checkpoint in a bucket; None for a local path. Blocking."""
    if bucket_of(url) is None:
        return None

    store = store_at(url)
    assert isinstance(store, FolderListing), "a bucket lists folders"
    return list(store.list_folders(url))


def _tree(handler: Any, args: Any) -> _Tree:
    if isinstance(handler, StandardCheckpointHandler):
        return _Tree(handler.base, handler.checked(args), args)

    return _Tree(handler.base if isinstance(handler, PyTreeCheckpointHandler) else handler, args.item, args)


def _prioritise(
    functions: Mapping[str, Callable[[KeyPath], bool] | None],
) -> Callable[[KeyPath], bool] | None:
    if not any(functions.values()):
        return None

    def is_first(keys: KeyPath) -> bool:
        function = functions.get(str(keys[0]))
        return function is not None and function(keys[1:])

    return is_first

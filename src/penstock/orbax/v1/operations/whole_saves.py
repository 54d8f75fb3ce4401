"""Saving named objects to a bucket: penstock builds the whole checkpoint, and no handler writes files."""

from __future__ import annotations

__all__ = ("BucketSave",)

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, final

from penstock.checkpointer.checkpointer import Checkpointer
from penstock.handlers.layouts.item_types import Composite, Json, PyTree
from penstock.kernel.config.job_options import JobOptions
from penstock.kernel.errors import ConfigError, NoHandlerError, PathError
from penstock.kernel.protocols.coordinator import SingleProcessCoordinator
from penstock.orbax.v1.common.operation import Operation
from penstock.orbax.v1.common.tree_types import JsonType
from penstock.orbax.v1.context.context import Context
from penstock.orbax.v1.trees.leaf_adapter import CustomLeaves
from penstock.orbax.v1.trees.leaf_registry import StandardLeafHandlerRegistry, UnregisteredTypeError
from penstock.orbax.v1.trees.plain_handlers import JsonHandler, MetricsHandler
from penstock.orbax.v1.trees.pytree_handler import PyTreeHandler
from penstock.orbax.v1.trees.tree_files import save_format_of

_PLAIN: Final = (JsonHandler, MetricsHandler)


@final
@dataclass(frozen=True, slots=True)
class BucketSave:
    """The save of one checkpoint to a bucket.

    Args:
        url: Of the checkpoint.
        items: The objects by name; emptied once they are copied.
        handlers: Of each.
        context: The options.
        overwrite: Whether what is there is deleted first: a bucket cannot replace in one step.
        custom_metadata: The caller's own.
        job: Which processes save together; None if this one saves alone.
    """

    url: str
    items: dict[str, Any]
    handlers: Mapping[str, Any]
    context: Context
    overwrite: bool
    custom_metadata: JsonType | None
    job: JobOptions | None

    def check(self) -> None:
        """Refuse what needs a directory of the operating system, and trees that cannot be saved.

        Raises:
            ValueError: If a leaf cannot be saved, or there is none.
            PathError: If a handler writes files by itself.
            ConfigError: If directories are to have permissions.
        """
        if self.context.file.path_permission_mode is not None:
            raise ConfigError("path_permission_mode", "a bucket has no directories, and so no permissions")

        for name, handler in self.handlers.items():
            if isinstance(handler, PyTreeHandler):
                if handler.keeps_own_files:
                    problem = f"is in a bucket, and leaf handlers of {name!r} write files by themselves"
                    raise PathError(self.url, problem)

                handler.check(self.items[name])
            elif type(handler) not in _PLAIN:
                kind = type(handler).__name__
                problem = f"is in a bucket, and the {kind} of {name!r} reads and writes files by itself"
                raise PathError(self.url, f"{problem}; trees and JSON are saved there")

    async def __call__(self, operation: Operation[None]) -> None:
        """Save, once `check` has passed. `operation` is told when the objects may be changed.

        Raises:
            PenstockError: What `penstock.Checkpointer.save` raises.
        """
        async with Checkpointer(
            save_format=save_format_of(self.context.array.saving, jointly=self.job is not None),
            memory_limit=self.context.memory.save_limit,
            registry=CustomLeaves(StandardLeafHandlerRegistry(), self.context).registry(),
            coordinator=SingleProcessCoordinator() if self.job is None else None,
            job=self.job,
        ) as checkpointer:
            try:
                saving = await checkpointer.save(
                    self.url,
                    self._whole(),
                    overwrite="delete-first" if self.overwrite else False,
                    custom_metadata=self.custom_metadata,
                    **self._keywords(),
                )
            except NoHandlerError as error:
                raise UnregisteredTypeError(str(error)) from error

            self.items.clear()  # a save in the background must not keep alive what the caller dropped
            operation.mark_begun()
            await saving

    def _whole(self) -> Composite:
        is_tree = {name: isinstance(handler, PyTreeHandler) for name, handler in self.handlers.items()}
        return Composite(
            {name: PyTree(item) if is_tree[name] else Json(item) for name, item in self.items.items()}
        )

    def _keywords(self) -> dict[str, Any]:
        trees = {name: one for name, one in self.handlers.items() if isinstance(one, PyTreeHandler)}
        asked = {name: one.save_args(self.items[name]) for name, one in trees.items()}
        given = {name: args for name, args in asked.items() if args is not None}
        first = _first({name: one.comes_first(self.items[name]) for name, one in trees.items()})
        return {"save_args": given or None, "prioritise": first}


def _first(functions: Mapping[str, Any]) -> Callable[[tuple[Any, ...]], bool] | None:
    if not any(functions.values()):
        return None

    def is_first(keys: tuple[Any, ...]) -> bool:
        function = functions.get(str(keys[0]))
        return function is not None and bool(function(keys[1:]))

    return is_first

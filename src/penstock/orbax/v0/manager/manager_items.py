"""The handlers that a manager saves the items of a step with, and their arguments."""

from __future__ import annotations

__all__ = (
    "DEFAULT_ITEM",
    "args_to_save",
    "check_args",
    "make_args",
    "make_checkpointer",
    "named",
)

from collections.abc import Mapping, Sequence
from typing import Any, Final, cast

from penstock.kernel.errors import ConfigError, SpecError
from penstock.orbax.v0.checkpointers.async_checkpointer import AsyncCheckpointer
from penstock.orbax.v0.checkpointers.checkpointer import Checkpointer
from penstock.orbax.v0.common.checkpoint_args import CheckpointArgs, get_registered_args_cls
from penstock.orbax.v0.common.v0_options import AsyncOptions
from penstock.orbax.v0.handlers.checkpoint_handler import CheckpointHandler
from penstock.orbax.v0.handlers.composite_handler import (
    CompositeArgs,
    CompositeCheckpointHandler,
    CompositeOptions,
)
from penstock.orbax.v0.handlers.handler_registration import DefaultCheckpointHandlerRegistry
from penstock.orbax.v0.handlers.json_handler import JsonCheckpointHandler, JsonRestoreArgs, JsonSaveArgs
from penstock.orbax.v0.handlers.legacy_handler import WrapperArgs
from penstock.orbax.v0.manager.manager_options import CheckpointManagerOptions
from penstock.steps.step_directory import METRICS, TREE
from penstock.steps.step_metrics import as_json_metrics

DEFAULT_ITEM: Final = TREE
"""The name of the item of a step that is one object."""


def make_checkpointer(
    options: CheckpointManagerOptions,
    checkpointers: Any,
    item_names: Sequence[str] | None,
    item_handlers: Any,
    handler_registry: Any,
) -> tuple[Checkpointer, bool | None]:
    """Return a checkpointer of steps, and whether a step is one object; None if that is not known yet.

    Raises:
        ValueError: If arguments exclude each other.
    """
    _check_exclusive(checkpointers, item_names, item_handlers, handler_registry)
    metrics = JsonCheckpointHandler(METRICS, multiprocessing_options=options.multiprocessing_options)
    if checkpointers is not None:
        handlers, asynchronous, timeout = _taken_apart(checkpointers)
        if timeout is not None and options.async_options is None:
            options.async_options = AsyncOptions(timeout_secs=timeout)

        handler = _composite(options, {**handlers, METRICS: metrics})
        return _checkpointer(handler, options, asynchronous), not isinstance(checkpointers, dict)

    asynchronous = options.enable_async_checkpointing
    if item_names is None and item_handlers is None:
        registry = DefaultCheckpointHandlerRegistry(handler_registry)
        for args_cls in (JsonSaveArgs, JsonRestoreArgs):
            if not registry.has(METRICS, args_cls):
                registry.add(METRICS, args_cls, metrics)

        return _checkpointer(_composite(options, {}, registry), options, asynchronous), None

    single = isinstance(item_handlers, CheckpointHandler)
    known: dict[str, Any] = {DEFAULT_ITEM: item_handlers} if single else dict.fromkeys(item_names or ())
    if isinstance(item_handlers, Mapping):
        known.update(cast("Mapping[str, Any]", item_handlers))

    return _checkpointer(_composite(options, {**known, METRICS: metrics}), options, asynchronous), single


def check_args(items: Any, args: Any, single: bool) -> None:
    """Check that the arguments of a save or restore are of the right kind.

    Raises:
        ValueError: If they are not.
    """
    if isinstance(items, CheckpointArgs):
        raise SpecError("items must not be CheckpointArgs; pass those as `args=`")
    if args is None:
        return
    if not isinstance(args, CheckpointArgs):
        raise SpecError(f"args must be CheckpointArgs, not {type(args).__name__}")
    if single and isinstance(args, CompositeArgs):
        raise SpecError("args are a Composite, but a step of this manager is one object")
    if not single and not isinstance(args, CompositeArgs):
        raise SpecError("args must be a Composite: a step of this manager has several items")


def named(given: Any, single: bool) -> Mapping[str, Any]:
    """Return by item what was given for one object or for several."""
    if given is None:
        return {}

    return {DEFAULT_ITEM: given} if single else given


def make_args(
    checkpointer: Checkpointer, items: Mapping[str, Any], kwargs: Mapping[str, Any], *, for_save: bool
) -> dict[str, CheckpointArgs]:
    """Make arguments from items and keywords, for calls in the style from before Orbax had arguments.

    Raises:
        ValueError: If the handler of an item is not known.
    """
    names = items if for_save else dict.fromkeys([*items, *kwargs])
    entries = checkpointer.handler._handler_registry.get_all_entries()
    found: dict[str, CheckpointArgs] = {}
    for name in names:
        handlers = {args_cls: handler for (item, args_cls), handler in entries.items() if item == name}
        if not handlers:
            raise SpecError(f"the handler of the item {name!r} is not known; pass `args`")

        save_cls, restore_cls = (
            (WrapperArgs, WrapperArgs)
            if WrapperArgs in handlers
            else get_registered_args_cls(next(iter(handlers.values())))
        )
        make = cast("Any", save_cls if for_save else restore_cls)
        found[name] = make(items.get(name), **(kwargs.get(name) or {}))

    return found


def args_to_save(
    checkpointer: Checkpointer, items: Any, kwargs: Any, args: Any, metrics: Any, *, single: bool
) -> CompositeArgs:
    """Return the arguments that a step is saved with, its metrics as an item beside it."""
    if args is None:
        found = make_args(checkpointer, named(items, single), named(kwargs, single), for_save=True)
    else:
        found = {DEFAULT_ITEM: args} if single else dict(args)
    if metrics is not None:
        found[METRICS] = JsonSaveArgs(_as_json(metrics))

    return CompositeArgs(**found)


def _as_json(metrics: Any) -> Any:
    return as_json_metrics(cast("Mapping[str, Any]", metrics)) if isinstance(metrics, Mapping) else metrics


def _check_exclusive(checkpointers: Any, item_names: Any, item_handlers: Any, handler_registry: Any) -> None:
    wrong = (
        ("item_names", "checkpointers", checkpointers and item_names),
        ("item_handlers", "checkpointers", checkpointers and item_handlers),
        ("item_names", "item_handlers", item_names and isinstance(item_handlers, CheckpointHandler)),
    )
    for name, other, both in wrong:
        if both:
            raise ConfigError(name, f"excludes {other}")

    others = {"checkpointers": checkpointers, "item_handlers": item_handlers, "item_names": item_names}
    for name, value in others.items():
        if handler_registry is not None and value is not None:
            raise ConfigError(name, "excludes handler_registry")


def _taken_apart(checkpointers: Any) -> tuple[dict[str, Any], bool, int | None]:
    """Return the handlers of checkpointers, whether any saves in the background, and the longest timeout."""
    if not isinstance(checkpointers, (dict, Checkpointer)):
        raise SpecError(f"checkpointers must be a Checkpointer or a dict of such, not {checkpointers!r}")

    single = isinstance(checkpointers, Checkpointer)
    each = cast("dict[str, Any]", {DEFAULT_ITEM: checkpointers} if single else checkpointers)
    for name, one in each.items():
        if not isinstance(one, Checkpointer):
            raise SpecError(f"the checkpointer of {name!r} is a {type(one).__name__}")

    timeouts = [one.timeout_s for one in each.values() if isinstance(one, AsyncCheckpointer)]
    longest = int(max(timeouts)) if timeouts else None
    return {name: one.handler for name, one in each.items()}, bool(timeouts), longest


def _composite(
    options: CheckpointManagerOptions, handlers: Mapping[str, Any], registry: Any = None
) -> CompositeCheckpointHandler:
    of_items = CompositeOptions(
        multiprocessing_options=options.multiprocessing_options,
        file_options=options.file_options,
        async_options=options.async_options,
        atomicity_options=options.atomicity_options,
        temporary_path_class=options.temporary_path_class,
    )
    return CompositeCheckpointHandler(
        composite_options=of_items, handler_registry=registry, **cast("dict[str, Any]", handlers)
    )


def _checkpointer(
    handler: CompositeCheckpointHandler, options: CheckpointManagerOptions, asynchronous: bool
) -> Checkpointer:
    common: dict[str, Any] = {
        "multiprocessing_options": options.multiprocessing_options,
        "file_options": options.file_options,
        "atomicity_options": options.atomicity_options,
        "temporary_path_class": options.temporary_path_class,
    }
    async_options = options.async_options or AsyncOptions()
    if asynchronous:
        return AsyncCheckpointer(handler, async_options=async_options, **common)
    if async_options.post_finalization_callback is not None:
        raise ConfigError("post_finalization_callback", "is for saves in the background")

    return Checkpointer(handler, **common)

"""Offers for an argument in a shell: steps, leaves, items, metrics, keys of the configuration.

Each is called by argcomplete with the words so far. It offers nothing where it cannot look: a shell that asks
shows no errors. In a bucket it does not look, because each key that is pressed would be a request.
"""

from __future__ import annotations

__all__ = (
    "Completer",
    "completed",
    "config_keys",
    "item_names",
    "leaf_names",
    "metric_names",
    "step_numbers",
    "steps_and_files",
)

import argparse
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import wraps
from typing import Any, TypeAlias, cast

from penstock.kernel.errors import PenstockError

Completer: TypeAlias = Callable[..., Iterable[str]]


def completed(action: argparse.Action, completer: Completer) -> None:
    """Let a shell complete an argument by `completer`."""
    action.completer = completer  # type: ignore[attr-defined]  # where argcomplete looks for it


def _quiet(look: Callable[[str, argparse.Namespace], Iterable[str]]) -> Completer:
    """Return a completer that offers what begins as the word does, and nothing if it cannot look."""

    @wraps(look)
    def complete(*, prefix: str, parsed_args: argparse.Namespace, **_: Any) -> list[str]:
        try:
            return [word for word in look(prefix, parsed_args) if word.startswith(prefix)]
        except (PenstockError, OSError, ValueError):
            return []

    return complete


def _path_in(options: argparse.Namespace) -> str:
    """Return the path that the words name so far.

    Raises:
        ValueError: If there is none yet, or it is not on this machine.
    """
    for name in ("path", "first", "source"):
        given: object = getattr(options, name, None)
        words = cast("list[object]", given) if isinstance(given, list) else [given]
        if words and isinstance(words[0], str) and "://" not in words[0]:
            return words[0]

    raise ValueError


@_quiet
def step_numbers(prefix: str, options: argparse.Namespace) -> Iterable[str]:
    """Offer the numbers of the steps in the directory that is named."""
    from penstock.handlers.layouts.discovery import find_place
    from penstock.inspection.step_listing import step_number_in
    from penstock.stores.store_finder import store_of

    return [str(step_number_in(name)) for name in find_place(*store_of(_path_in(options))).steps]


def steps_and_files(prefix: str, parsed_args: argparse.Namespace, **more: Any) -> Iterable[str]:
    """Offer the steps of the run that is named first, and files."""
    from argcomplete.completers import FilesCompleter

    files: Iterable[str] = FilesCompleter()(prefix)
    return [*step_numbers(prefix=prefix, parsed_args=parsed_args), *files]


@_quiet
def leaf_names(prefix: str, options: argparse.Namespace) -> Iterable[str]:
    """Offer the names of leaves, node by node: `params.` before `params.head`."""
    return _node_by_node(prefix, [name for name, _ in _leaves(options)])


@_quiet
def item_names(prefix: str, options: argparse.Namespace) -> Iterable[str]:
    """Offer the items of the checkpoint that is named."""
    return dict.fromkeys(item for _, item in _leaves(options, every_item=True) if item)


def _leaves(options: argparse.Namespace, *, every_item: bool = False) -> Iterator[tuple[str, str]]:
    """Yield the name of each leaf of the checkpoint that is named, and that of its item."""
    from penstock.handlers.layouts.discovery import checkpoint_path
    from penstock.inspection.looking import run_here
    from penstock.inspection.stored_leaves import read_items
    from penstock.stores.store_finder import store_of

    store, root = store_of(_path_in(options))
    step = getattr(options, "step", None)
    item = None if every_item else getattr(options, "item", None)
    path = checkpoint_path(store, root, step if isinstance(step, int) else None)
    for each in run_here(store, lambda threads: read_items(store, threads, path, item)):
        yield from ((leaf.name, each.name) for leaf in each.leaves)


@_quiet
def metric_names(prefix: str, options: argparse.Namespace) -> Iterable[str]:
    """Offer the metrics of the steps in the directory that is named."""
    from penstock.handlers.layouts.discovery import find_place
    from penstock.inspection.step_listing import list_checkpoints, names_of_metrics
    from penstock.stores.store_finder import store_of

    store, path = store_of(_path_in(options))
    listed = list_checkpoints(store, find_place(store, path))
    return sorted({name for step in listed for name in names_of_metrics(step.metrics)})


@_quiet
def config_keys(prefix: str, options: argparse.Namespace) -> Iterable[str]:
    """Offer the keys of the configuration, table by table."""
    from penstock.config.option_reference import every_option

    return _node_by_node(prefix, [entry.key for entry in every_option()])


def _node_by_node(prefix: str, names: Sequence[str]) -> Iterator[str]:
    """Yield the nodes that a word may go on with; if that is one alone, also those below it.

    They keep the shell from ending the word there.
    """
    depth = prefix.count(".") + 1
    split = [name.split(".") for name in names if name.startswith(prefix)]
    nodes = dict.fromkeys(".".join(parts[:depth]) for parts in split)
    yield from nodes
    if len(nodes) == 1:
        yield from dict.fromkeys(".".join(parts[: depth + 1]) for parts in split if len(parts) > depth)

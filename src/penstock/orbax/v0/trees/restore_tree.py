"""Restores the tree in a directory into the requested structure and types."""

from __future__ import annotations

__all__ = ("PLACEHOLDER", "Asked", "Calls", "as_lists", "restore_tree")

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

import numpy as np
from jax import tree_util

from penstock.checkpointer.description import CheckpointMetadata, LeafMetadata
from penstock.kernel.errors import HandlerError, SpecError, StructureMismatchError, TreeDifference
from penstock.kernel.protocols.leaf import KeyPath
from penstock.orbax.common.array_structs import is_narrowed
from penstock.orbax.common.leaf_args import RestoreArgs
from penstock.orbax.v0.leaf_handlers.type_handler_registry import PLACEHOLDER
from penstock.orbax.v0.trees.empty_node_leaves import Found, flatten, is_empty
from penstock.orbax.v0.trees.item_adapter import fits, has_structure_of, target_of
from penstock.orbax.v0.trees.restore_targets import EMPTY, Wanted, empty_value, want
from penstock.stages.planning.leaf_sources import ABSENT, describe_target
from penstock.stages.planning.matching import pair_keys

_tree: Any = tree_util  # jax declares no types for it


@dataclass(frozen=True, slots=True)
class Asked:
    """The request of a restore.

    Attributes:
        item: The structure of the result; None for the stored one, in dicts and lists.
        restore_args: A tree of `RestoreArgs`, of the structure of the item or of the stored tree.
        partial: Whether the item may lack stored leaves.
        rich: Whether recorded tuples stay tuples without an item.
    """

    item: Any = None
    restore_args: Any = None
    partial: bool = False
    rich: bool = False


@dataclass(frozen=True, slots=True)
class Calls:
    """How the checkpoint is read.

    Attributes:
        metadata: Returns what is stored.
        restore: Restores onto a target, with keywords of `penstock.Checkpointer.restore`.
        own_files: Returns the stored types whose type handlers read files of their own, as they are told by
            the `RestoreArgs`.
    """

    metadata: Callable[[], CheckpointMetadata]
    restore: Callable[..., Any]
    own_files: Callable[[], Collection[str]] = frozenset


def restore_tree(asked: Asked, calls: Calls) -> Any:
    """Restore a tree.

    Raises:
        ValueError: If the item and the stored tree differ in structure, or a leaf does not fit.
    """
    if asked.item is None and asked.restore_args is None:
        restored = calls.restore()
        if not _has_wide_arrays(restored):
            return _plain(restored, asked)

    if asked.item is not None and asked.restore_args is not None and not asked.partial:
        found = _restore_shortly(asked, calls)
        if found is not None:
            return found[0]

    about = calls.metadata()
    wide = any(leaf.kind == "jax.Array" and is_narrowed(leaf.dtype) for leaf in about.leaves)
    if asked.restore_args is None and not wide and has_structure_of(about.tree, asked.item):
        restored = calls.restore()
        if has_structure_of(restored, asked.item):  # true unless the checkpoint was just replaced
            return restored

    there, treedef = flatten(about.tree)
    stored = {found.keys: cast("LeafMetadata", found.value) for found in there}
    item = there
    if asked.item is not None:
        item, treedef = flatten(asked.item)

    here = {found.keys: found.value for found in item}
    read = list(stored) if asked.item is None else _to_be_read(item, stored, asked, about.path)
    read = [keys for keys in read if stored[keys].kind not in EMPTY]
    _check_args(asked, here)
    args = _by_keys(asked.restore_args)
    whole = len(read) == sum(leaf.kind not in EMPTY for leaf in stored.values())
    if whole and not args and not wide:
        restored = calls.restore()
        values = {keys: _at(restored, keys) for keys in read}
        return _put_together(treedef, here, stored, values, asked)

    own_files = calls.own_files()
    wanted = {
        keys: want(
            stored[keys],
            args.get(keys, _AS_SAVED),
            None if asked.item is None else here[keys],
            told=stored[keys].kind in own_files,
        )
        for keys in read
    }
    values = _read(wanted, calls, whole=whole) if wanted else {}
    return _put_together(treedef, here, stored, values, asked)


def _restore_shortly(asked: Asked, calls: Calls) -> tuple[Any] | None:
    """Restore onto the item directly; None if that is not possible, which mostly shows before reading."""
    target = target_of(asked.item, asked.restore_args)
    if target is None:
        return None
    try:
        restored = calls.restore(like=target[0])
    except (SpecError, HandlerError):  # the leaf-by-leaf restore has the better message
        return None

    return (restored,) if fits(restored, target[1]) else None


def _put_together(
    treedef: Any,
    here: Mapping[KeyPath, Any],
    stored: Mapping[KeyPath, LeafMetadata],
    values: Mapping[KeyPath, Any],
    asked: Asked,
) -> Any:
    leaves = [_value(keys, value, stored, values, asked) for keys, value in here.items()]
    result = _tree.tree_unflatten(treedef, leaves)
    return _plain(result, asked) if asked.item is None else result


def _plain(tree: Any, asked: Asked) -> Any:
    return tree if asked.rich else as_lists(tree)


_AS_SAVED: Final = RestoreArgs()


def _to_be_read(
    item: Sequence[Found], stored: Mapping[KeyPath, LeafMetadata], asked: Asked, path: str
) -> list[KeyPath]:
    """Compare the structures; return the leaves to read."""
    check, leaves = is_empty(), list(stored.values())
    pairing = pair_keys([found.keys for found in item], list(stored))
    differences: list[TreeDifference] = []
    read: list[KeyPath] = []
    for found, row in zip(item, pairing.rows, strict=True):
        if check(found.value) or found.value is PLACEHOLDER:  # None leaves out a leaf deliberately
            continue
        if row == ABSENT:
            differences.append(TreeDifference("missing", found.key_path, describe_target(found.value)))
        else:
            read.append(found.keys)

    if not asked.partial:
        unexpected = [leaves[row] for row in pairing.unexpected]
        differences += [TreeDifference("unexpected", leaf.key_path, on_disk=leaf.kind) for leaf in unexpected]
    if differences:
        mismatch = StructureMismatchError(path, differences)
        raise ValueError(
            "User-provided restore item and on-disk value metadata tree structures do not match: "
            f"{mismatch}\nTo restore only what the item has, pass partial_restore=True."
        ) from mismatch

    return read


def _check_args(asked: Asked, here: Mapping[KeyPath, Any]) -> None:
    """Refuse restore args that are not of the structure of the tree.

    Raises:
        ValueError: If a leaf has none, or there are some for no leaf and the item must have all leaves.
    """
    if asked.restore_args is None:
        return

    check = is_empty()
    given = [found.keys for found in flatten(asked.restore_args)[0] if not _is_node(found.value)]
    missing = here.keys() - given
    missing = {keys for keys in missing if not (check(here[keys]) or here[keys] is PLACEHOLDER)}
    missing = {keys for keys in missing if getattr(here[keys], "kind", None) not in EMPTY}
    unexpected = set[KeyPath]() if asked.partial else set(given) - here.keys()
    if missing or unexpected:
        raise ValueError(
            f"restore_args must have the structure of the tree: they lack {_shown(missing)}, "
            f"and {_shown(unexpected)} are for no leaf"
        )


def _is_node(value: Any) -> bool:
    return isinstance(value, dict | list | tuple)


def _shown(keys: Collection[KeyPath]) -> str:
    return str(sorted("/".join(path) for path in keys)[:10])


def _has_wide_arrays(tree: Any) -> bool:
    leaves: list[Any] = _tree.tree_leaves(tree)
    return any(type(leaf) is np.ndarray and is_narrowed(leaf.dtype) for leaf in leaves)


def _by_keys(restore_args: Any) -> dict[KeyPath, RestoreArgs]:
    if restore_args is None:
        return {}

    return {
        found.keys: found.value for found in flatten(restore_args)[0] if isinstance(found.value, RestoreArgs)
    }


def _read(wanted: Mapping[KeyPath, Wanted], calls: Calls, *, whole: bool) -> dict[KeyPath, Any]:
    """Restore all leaves or some of them, and finish each."""
    like = _nested({keys: one.like for keys, one in wanted.items()})
    casts = {keys: one.dtype for keys, one in wanted.items() if one.dtype is not None and not one.as_stored}
    keywords: dict[str, Any] = {} if whole else {"on_unexpected": "skip"}
    if casts:
        keywords["dtype"] = casts.get
    if any(one.resized for one in wanted.values()):
        keywords["strict"] = False

    restored = calls.restore(like=like, **keywords)
    values = {keys: _at(restored, keys) for keys in wanted}
    for keys, one in wanted.items():
        if one.finish is not None:
            values[keys] = one.finish(values[keys])

    return values


def _value(
    keys: KeyPath,
    in_item: Any,
    stored: Mapping[KeyPath, LeafMetadata],
    values: Mapping[KeyPath, Any],
    asked: Asked,
) -> Any:
    """The leaf of the result: the value read, an empty node, or the leaf of the item."""
    if keys in values:
        return values[keys]
    if asked.item is not None and (in_item is PLACEHOLDER or is_empty()(in_item)):
        return in_item

    return empty_value(stored[keys].kind)


def _nested(flat: Mapping[KeyPath, Any]) -> Any:
    """Make a tree of dicts from leaves by their stored keys."""
    if () in flat:
        return flat[()]

    root: dict[str, Any] = {}
    for keys, value in flat.items():
        node = root
        for key in keys[:-1]:
            node = node.setdefault(key, {})
        node[keys[-1]] = value

    return root


def _at(tree: Any, keys: KeyPath) -> Any:
    """The value at a path of stored keys, in a tree of dicts and sequences."""
    if not keys:
        return tree

    return _at(tree[keys[0] if isinstance(tree, dict) else int(keys[0])], keys[1:])


def as_lists(tree: Any) -> Any:
    """Return the tree with lists in place of tuples, as Orbax restores it unless told otherwise."""
    node: Any = tree
    if isinstance(tree, dict):
        return {key: as_lists(value) for key, value in node.items()}
    if isinstance(tree, list) or (type(tree) is tuple and node):
        return [as_lists(value) for value in node]

    return node

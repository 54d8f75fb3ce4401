"""The restore of a tree: into the requested structure and types, or as a description of what is stored.

A request that a target of penstock's `restore` can say is one restore. Others are decided leaf by leaf.
"""

from __future__ import annotations

__all__ = (
    "PLACEHOLDER",
    "LeafTarget",
    "Reader",
    "TreeRequest",
    "as_lists",
    "clashing_keys",
    "describe_tree",
    "empty_value",
    "fits",
    "has_structure_of",
    "restore_tree",
    "target_of",
    "with_markers",
)

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, cast

import jax
import numpy as np
from jax import tree_util
from jax.experimental.layout import Format
from jax.sharding import Sharding

from penstock import CheckpointMetadata, LeafMetadata, kernel
from penstock.embedding import (
    EMPTY_MARKERS,
    EmptyNamedTuple,
    RestoreOptions,
    blocking,
    describe_target,
    dtypes,
    file_names,
    flattening,
    pair_keys,
    prng_keys,
)
from penstock.errors import (
    DuplicateNameError,
    HandlerError,
    SpecError,
    StructureMismatchError,
    TreeDifference,
)
from penstock.orbax.arrays import asked_placement, is_narrowed, jax_dtype, number_type
from penstock.orbax.future import in_thread
from penstock.orbax.leaf_args import ArrayRestoreArgs, ParamInfo, RestoreArgs
from penstock.orbax.metadata import build_default_tree_metadata
from penstock.orbax.stage_workers import as_stored
from penstock.orbax.tree import is_empty_node
from penstock.orbax.type_handlers import PLACEHOLDER
from penstock.orbax.value_metadata import (
    ArrayMetadata,
    ScalarMetadata,
    StorageMetadata,
    StringMetadata,
    ZarrMetadata,
    from_serialized_string,
)

_struct: Any = jax.ShapeDtypeStruct

_tree: Any = tree_util  # jax declares no types for it


@dataclass(frozen=True, slots=True)
class TreeRequest:
    """The request of a restore.

    Attributes:
        item: The structure of the result; None for the stored one, in dicts and lists.
        restore_args: A tree of `RestoreArgs`, of the structure of the item or of the stored tree.
        partial: Whether the item may lack stored leaves.
        keeps_missing: Whether leaves of the item that are not stored are those of a partial result.
        rich: Whether recorded tuples stay tuples without an item.
    """

    item: Any = None
    restore_args: Any = None
    partial: bool = False
    keeps_missing: bool = True
    rich: bool = False


@dataclass(frozen=True, slots=True)
class Reader:
    """The calls that read a checkpoint.

    Attributes:
        metadata: Returns what is stored.
        restore: Restores onto a target, if there is one, by options, if there are any.
        own_files: Returns the stored types whose type handlers read files of their own, as
            the `RestoreArgs`.
    """

    metadata: Callable[[], CheckpointMetadata]
    restore: Callable[..., Any]
    own_files: Callable[[], Collection[str]] = frozenset


def restore_tree(asked: TreeRequest, calls: Reader) -> Any:
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
    read = list(stored) if asked.item is None else _to_be_read(item, there, asked, about.path)
    read = [keys for keys in read if stored[keys].kind not in EMPTY_MARKERS]
    _check_args(asked, here)
    args = _by_keys(asked.restore_args)
    whole = len(read) == sum(leaf.kind not in EMPTY_MARKERS for leaf in stored.values())
    if whole and not args and not wide:
        restored = calls.restore()
        values = {keys: _at(restored, keys) for keys in read}
        return _put_together(treedef, here, stored, values, asked)

    own_files = calls.own_files()
    wanted = {
        keys: leaf_target(
            stored[keys],
            args.get(keys, _AS_SAVED),
            None if asked.item is None else here[keys],
            takes_args=stored[keys].kind in own_files,
        )
        for keys in read
    }
    values = _read(wanted, calls, whole=whole) if wanted else {}
    return _put_together(treedef, here, stored, values, asked)


def _restore_shortly(asked: TreeRequest, calls: Reader) -> tuple[Any] | None:
    """Restore onto the item directly; None if that is not possible, which mostly shows before reading."""
    target = target_of(asked.item, asked.restore_args)
    if target is None:
        return None
    try:
        restored = calls.restore(target[0])
    except (SpecError, HandlerError):  # the leaf-by-leaf restore has the better message
        return None

    return (restored,) if fits(restored, target[1]) else None


def _put_together(
    treedef: Any,
    here: Mapping[kernel.KeyPath, Any],
    stored: Mapping[kernel.KeyPath, LeafMetadata],
    values: Mapping[kernel.KeyPath, Any],
    asked: TreeRequest,
) -> Any:
    leaves = [_value(keys, value, stored, values, asked) for keys, value in here.items()]
    result = _tree.tree_unflatten(treedef, leaves)
    return _plain(result, asked) if asked.item is None else result


def _plain(tree: Any, asked: TreeRequest) -> Any:
    # A node of a class of its own is stored in the order of its fields, which a dict has not.
    leaves, treedef = _tree.tree_flatten(tree)
    named: Any = _tree.tree_unflatten(treedef, leaves)
    return named if asked.rich else as_lists(named)


_AS_SAVED: Final = RestoreArgs()


def _to_be_read(
    item: Sequence[TreeNode], stored: Sequence[TreeNode], asked: TreeRequest, path: str
) -> list[kernel.KeyPath]:
    """Compare the structures; return the leaves to read."""
    leaves: list[LeafMetadata] = [found.value for found in stored]
    pairing = pair_keys([found.keys for found in item], [found.keys for found in stored])
    missing = {item[at].keys for at in pairing.missing}
    refused: Collection[kernel.KeyPath] = missing
    if asked.partial and asked.keeps_missing and missing:
        refused = clashing_keys(missing, {found.keys: found.indices for found in stored})

    differences: list[TreeDifference] = []
    read: list[kernel.KeyPath] = []
    for found in item:
        if is_empty_node(found.value) or found.value is PLACEHOLDER:  # None leaves out a leaf deliberately
            continue
        if found.keys in refused:
            differences.append(TreeDifference("missing", found.key_path, describe_target(found.value)))
        elif found.keys not in missing:
            read.append(found.keys)

    if not asked.partial:
        unexpected = [leaves[row] for row in pairing.unexpected]
        differences += [TreeDifference("unexpected", leaf.key_path, on_disk=leaf.kind) for leaf in unexpected]
    if differences:
        mismatch = StructureMismatchError(path, differences)
        raise ValueError(
            "User-provided restore item and on-disk value metadata tree structures do not match: "
            f"{mismatch}\n{_advice(asked)}"
        ) from mismatch

    return read


def _advice(asked: TreeRequest) -> str:
    if not asked.partial:
        return "To restore only what the item has, pass partial_restore=True."
    if not asked.keeps_missing:
        return 'To keep the leaves of the item that are not stored, pass on_missing="keep".'

    return "They are where other containers, or leaves, are stored, so that partial_restore cannot keep them."


def clashing_keys(
    missing: Collection[kernel.KeyPath], stored: Mapping[kernel.KeyPath, Sequence[bool]]
) -> frozenset[kernel.KeyPath]:
    """Return the leaves that have no place in a stored tree: only its dicts may get further keys.

    Args:
        missing: Keys of leaves that are not stored.
        stored: For the keys of each stored leaf, which of them are indices of sequences.
    """
    is_sequence = {keys[:at]: index for keys, indices in stored.items() for at, index in enumerate(indices)}

    def clashes(keys: kernel.KeyPath) -> bool:
        if keys in is_sequence:  # a leaf in the place of a container
            return True

        above = (keys[:at] for at in range(len(keys), -1, -1))
        nearest = next((one for one in above if one in is_sequence or one in stored), ())
        return is_sequence.get(nearest, nearest in stored)

    return frozenset(keys for keys in missing if clashes(keys))


def _check_args(asked: TreeRequest, here: Mapping[kernel.KeyPath, Any]) -> None:
    """Refuse restore args that are not of the structure of the tree.

    Raises:
        ValueError: If a leaf has none, or there are some for no leaf and the item must have all leaves.
    """
    if asked.restore_args is None:
        return

    given = [
        found.keys
        for found in flatten(asked.restore_args)[0]
        if not isinstance(found.value, dict | list | tuple)
    ]
    missing = here.keys() - given
    missing = {keys for keys in missing if not (is_empty_node(here[keys]) or here[keys] is PLACEHOLDER)}
    missing = {keys for keys in missing if getattr(here[keys], "kind", None) not in EMPTY_MARKERS}
    unexpected = set[kernel.KeyPath]() if asked.partial else set(given) - here.keys()
    if missing or unexpected:
        raise ValueError(
            f"restore_args must have the structure of the tree: they lack {_shown(missing)}, "
            f"and {_shown(unexpected)} are for no leaf"
        )


def _shown(keys: Collection[kernel.KeyPath]) -> str:
    return str(sorted("/".join(path) for path in keys)[:10])


def _has_wide_arrays(tree: Any) -> bool:
    leaves: list[Any] = _tree.tree_leaves(tree)
    return any(type(leaf) is np.ndarray and is_narrowed(leaf.dtype) for leaf in leaves)


def _by_keys(restore_args: Any) -> dict[kernel.KeyPath, RestoreArgs]:
    if restore_args is None:
        return {}

    return {
        found.keys: found.value for found in flatten(restore_args)[0] if isinstance(found.value, RestoreArgs)
    }


def _read(
    wanted: Mapping[kernel.KeyPath, LeafTarget], calls: Reader, *, whole: bool
) -> dict[kernel.KeyPath, Any]:
    """Restore all leaves or some of them, and finish each."""
    like = _nested({keys: one.like for keys, one in wanted.items()})
    casts = {keys: one.dtype for keys, one in wanted.items() if one.dtype is not None and not one.as_stored}
    options = RestoreOptions(
        dtype=casts.get if casts else None,
        strict=not any(one.resized for one in wanted.values()),
        on_unexpected="raise" if whole else "skip",
    )
    restored = calls.restore(like, options)
    values = {keys: _at(restored, keys) for keys in wanted}
    for keys, one in wanted.items():
        if one.finish is not None:
            values[keys] = one.finish(values[keys])

    return values


def _value(
    keys: kernel.KeyPath,
    in_item: Any,
    stored: Mapping[kernel.KeyPath, LeafMetadata],
    values: Mapping[kernel.KeyPath, Any],
    asked: TreeRequest,
) -> Any:
    """The leaf of the result: the value read, an empty node, or the leaf of the item."""
    if keys in values:
        return values[keys]
    if asked.item is not None and (keys not in stored or in_item is PLACEHOLDER or is_empty_node(in_item)):
        return in_item

    return empty_value(stored[keys].kind)


def _nested(flat: Mapping[kernel.KeyPath, Any]) -> Any:
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


def _at(tree: Any, keys: kernel.KeyPath) -> Any:
    """The value at a path of stored keys, in a tree of dicts and sequences."""
    if not keys:
        return tree

    return _at(tree[keys[0] if isinstance(tree, dict) else int(keys[0])], keys[1:])


def as_lists(tree: Any) -> Any:
    """Return the tree with lists in place of tuples, as Orbax restores it by default."""
    node: Any = tree
    if isinstance(tree, dict):
        return {key: as_lists(value) for key, value in node.items()}
    if isinstance(tree, list) or (type(tree) is tuple and node):
        return [as_lists(value) for value in node]

    return node


_ARRAYS: Final = frozenset({"jax.Array", "np.ndarray", "scalar"})
"""Types with a shape, unless their handler keeps them in its own files."""

_CLASSES: Final[dict[str, type]] = {"jax.Array": jax.Array, "np.ndarray": np.ndarray, "string": str}


@dataclass(frozen=True, slots=True)
class LeafTarget:
    """One leaf of a result.

    Attributes:
        like: The leaf of the restore target.
        dtype: What its elements are cast to; None for the stored dtype.
        finish: Applied to the restored value; None for nothing.
        resized: Whether the shape may differ from the stored one.
        as_stored: Whether `dtype` is the stored one, so that nothing is cast.
    """

    like: Any
    dtype: Any = None
    finish: Callable[[Any], Any] | None = None
    resized: bool = False
    as_stored: bool = False


def empty_value(typestr: str) -> Any:
    """Return the empty node that a marker stands for."""
    match typestr:
        case "Dict":
            return {}
        case "List":
            return []
        case "Tuple":
            return ()
        case "NamedTuple":
            return EmptyNamedTuple()
        case _:
            return None


def leaf_target(
    leaf: LeafMetadata, args: RestoreArgs, in_item: Any, *, takes_args: bool = False
) -> LeafTarget:
    """Decide what a stored leaf is restored as.

    Args:
        leaf: The stored leaf; not an empty marker.
        args: The request.
        in_item: The leaf of the caller's tree, whose shape and dtype apply to a jax.Array; None if
            there is none.
        takes_args: Whether the type handler that wrote the leaf gets `args` itself.

    Raises:
        ValueError: If a different shape is requested, and `strict` is set.
    """
    if takes_args and args.restore_type in (None, _CLASSES.get(leaf.kind)):
        return LeafTarget(as_stored(leaf.kind))

    found = _leaf_target(leaf, args, in_item)
    if found.dtype is None or not _is_stored_as(leaf, found.dtype):
        return found

    return replace(found, as_stored=True)


def _leaf_target(leaf: LeafMetadata, args: RestoreArgs, in_item: Any) -> LeafTarget:
    if leaf.shape is None and leaf.kind in _ARRAYS and leaf.random_key_impl is None:
        return LeafTarget(as_stored(leaf.kind))  # its handler finds it, and gets all of `args`

    kind = args.restore_type
    if kind is None:
        kind = leaf.kind
    if kind == "jax.Array" or (isinstance(kind, type) and issubclass(kind, jax.Array)):
        return _array_target(leaf, args, in_item)
    if leaf.shape is None:
        return LeafTarget(as_stored(kind) if isinstance(kind, str) else kind)
    if kind == "np.ndarray" or kind is np.ndarray:
        return LeafTarget(np.ndarray, args.dtype)
    if kind == "scalar" or (isinstance(kind, type) and issubclass(kind, int | float | complex | np.number)):
        finish = cast("Callable[[Any], Any]", kind) if isinstance(kind, type) else None
        return LeafTarget(number_type(leaf.dtype if args.dtype is None else args.dtype), args.dtype, finish)

    return LeafTarget(as_stored(kind) if isinstance(kind, str) else kind)


def _is_stored_as(leaf: LeafMetadata, dtype: Any) -> bool:
    try:
        return bool(leaf.dtype) and dtypes.numpy_dtype(leaf.dtype) == np.dtype(dtype)
    except TypeError:  # not a dtype: the cast reports it
        return False


def _array_target(leaf: LeafMetadata, args: RestoreArgs, in_item: Any) -> LeafTarget:
    shape, dtype, strict, place = None, args.dtype, True, None
    if isinstance(args, ArrayRestoreArgs):
        shape, strict, place = args.global_shape, args.strict, asked_placement(args)
        if strict and _is_array(in_item):
            shape = in_item.shape if shape is None else shape
            dtype = in_item.dtype if dtype is None else dtype
    if leaf.shape is None or leaf.random_key_impl is not None:
        return _keys_target(leaf, place)

    if is_narrowed(leaf.dtype if dtype is None else dtype):
        dtype = jax_dtype(leaf.dtype if dtype is None else dtype)

    wanted_shape = leaf.shape if shape is None else tuple(shape)
    if strict and wanted_shape != leaf.shape:
        raise ValueError(
            f"{leaf.key_path}: Requested shape: {wanted_shape} is not compatible with the stored shape: "
            f"{leaf.shape}. With strict=False the array is padded with zeros or truncated."
        )

    resized = wanted_shape != leaf.shape
    if place is None and not resized:
        return LeafTarget(jax.Array, dtype)

    fmt, sharding = (place, place.sharding) if isinstance(place, Format) else (None, place)
    make: Any = jax.ShapeDtypeStruct
    like = make(wanted_shape, np.dtype(leaf.dtype if dtype is None else dtype), sharding=sharding)
    return LeafTarget(like, dtype, None if fmt is None else lambda value: _put(value, fmt), resized)


def _keys_target(leaf: LeafMetadata, place: Any) -> LeafTarget:
    """Return whether a leaf is a typed PRNG key, whose shape and dtype only its own handler knows."""
    if place is None or leaf.shape is None:
        return LeafTarget(jax.Array)

    return LeafTarget(jax.Array, None, lambda value: _put(value, place))


def _is_array(value: Any) -> bool:
    """Return whether a value has a numeric dtype and a shape with at least one axis."""
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    if isinstance(value, type) or not shape or dtype is None:
        return False

    return not prng_keys.is_key(dtype)


def _put(value: Any, place: Any) -> Any:
    return cast("Any", jax).device_put(value, place)


_TYPES: Final = frozenset({int, float, str, np.ndarray})


def target_of(item: Any, restore_args: Any) -> tuple[Any, Sequence[Any]] | None:
    """Return the restore target and what each restored leaf must be; None if the request is not simple.

    Check the result with `fits`: what is stored is not known here.

    Args:
        item: The structure of the result.
        restore_args: Of the same structure.
    """
    leaves, structure = _tree.tree_flatten(item)
    args, args_structure = _tree.tree_flatten(restore_args, is_leaf=_is_args)
    if structure != args_structure:
        return None

    structs: dict[Any, Any] = {}
    wanted: list[Any] = []
    likes: list[Any] = []
    for leaf, arg in zip(leaves, args, strict=True):
        if type(arg) is RestoreArgs and arg.restore_type in _TYPES and leaf is not PLACEHOLDER:
            if arg.dtype is not None and not (type(leaf) is np.ndarray and leaf.dtype == arg.dtype):
                return None  # it may have to be cast

            wanted.append(arg.restore_type)
            likes.append(arg.restore_type if arg.dtype is None else leaf)
        elif type(arg) is ArrayRestoreArgs and _is_plain(arg, leaf):
            key = arg.sharding, leaf.shape, leaf.dtype
            like = structs.get(key)
            if like is None:
                like = structs[key] = _struct(leaf.shape, leaf.dtype, sharding=arg.sharding)

            wanted.append(jax.Array)
            likes.append(like)
        else:
            return None

    return structure.unflatten(likes), wanted


def fits(restored: Any, wanted: Sequence[Any]) -> bool:
    """Return whether the leaves of a result are as requested."""
    leaves = _tree.tree_leaves(restored)
    return len(leaves) == len(wanted) and all(
        type(leaf) is kind or (kind is jax.Array and isinstance(leaf, jax.Array))
        for leaf, kind in zip(leaves, wanted, strict=True)
    )


def has_structure_of(restored: Any, item: Any) -> bool:
    """Return whether a tree of dicts and lists has the structure of an item, which leaves out no leaf."""
    leaves, structure = _tree.tree_flatten(item)
    same: bool = structure == _tree.tree_structure(restored)
    return same and not any(leaf is PLACEHOLDER for leaf in leaves)


def _is_args(node: object) -> bool:
    return isinstance(node, RestoreArgs)


def _is_plain(arg: ArrayRestoreArgs, leaf: Any) -> bool:
    """Return whether the request for an array matches the item, with a sharding."""
    return (
        isinstance(arg.sharding, Sharding)
        and arg.mesh is None
        and isinstance(leaf, jax.Array | jax.ShapeDtypeStruct)
        and (arg.dtype == leaf.dtype if arg.dtype is not None else arg.strict)
        and (arg.global_shape == leaf.shape if arg.global_shape is not None else arg.strict)
        and bool(leaf.shape)
        and leaf.dtype != np.uint32  # it may be the data of a stored key
        and not prng_keys.is_key(leaf.dtype)
        and not is_narrowed(leaf.dtype)
    )


@dataclass(frozen=True, slots=True)
class TreeNode:
    """A leaf, or an empty node."""

    keys: kernel.KeyPath
    path: tuple[Any, ...]  #: as jax has it
    value: Any

    @property
    def indices(self) -> list[bool]:
        """Which of its keys are indices of lists or tuples."""
        return [isinstance(entry, _tree.SequenceKey) for entry in self.path]

    @property
    def key_path(self) -> str:
        """The key path as jax prints it, for messages."""
        shown: str = _tree.keystr(self.path)
        return shown


def flatten(tree: Any) -> tuple[list[TreeNode], Any]:
    """Take a tree apart.

    Returns:
        Its leaves and empty nodes, in jax's order, and the structure to put others together with.

    Raises:
        DuplicateNameError: If two have the same keys.
    """
    pairs, treedef = _tree.tree_flatten_with_path(tree, is_leaf=is_empty_node)
    found: dict[kernel.KeyPath, TreeNode] = {}
    for path, value in pairs:
        one = TreeNode(tuple([flattening.step(entry)[0] for entry in path]), path, value)
        if found.setdefault(one.keys, one) is not one:
            raise DuplicateNameError(".".join(one.keys), found[one.keys].key_path, one.key_path)

    return list(found.values()), treedef


def with_markers(tree: Any) -> Any:
    """Return the tree with None, or an empty dict, for each empty node of a registered class; as Orbax.

    A tree without such nodes is returned as it is.
    """
    if not _has_unmarked(tree):
        return tree

    def marked(value: Any) -> Any:
        return _marker(value) if is_empty_node(value) else value

    return _tree.tree_map(marked, tree, is_leaf=is_empty_node)


def _has_unmarked(tree: Any) -> bool:
    """Return whether there is an empty node that is not its own marker. Asks jax about containers alone."""
    one_level = _tree.default_registry.flatten_one_level
    leaves: set[type] = set()  # what is a leaf depends on its type alone
    waiting: list[object] = [tree]
    while waiting:
        node = waiting.pop()
        level: Any = one_level(node)
        if level is None:
            leaves.add(type(node))
            continue

        children: list[object] = list(level[0])
        if not children and _marker(node) is not node:
            return True

        kinds = {type(child): child for child in children if type(child) not in leaves}
        leaves |= {kind for kind, child in kinds.items() if one_level(child) is None}
        waiting += [child for child in children if type(child) not in leaves]

    return False


def _marker(node: Any) -> Any:
    if isinstance(node, dict | list) or type(node) is tuple:
        return cast("Any", node)

    return {} if isinstance(node, Mapping) else None


_KNOWN: Final = EMPTY_MARKERS | {"string"}


def describe_tree(about: CheckpointMetadata, directory: Any, registry: Any, *, rich: bool = False) -> Any:
    """Return a `TreeMetadata` of what is stored in a directory.

    Args:
        about: Its metadata, as penstock reads it.
        directory: Of the tree.
        registry: The type handlers that describe leaves unknown to penstock.
        rich: Whether recorded tuples are described as tuples.

    Raises:
        ValueError: If a leaf has no handler.
    """
    foreign = [leaf for leaf in about.leaves if leaf.shape is None and leaf.kind not in _KNOWN]
    said = blocking.run_sync(_ask, foreign, directory, registry, about.uses_zarr3) if foreign else {}

    def describe(leaf: LeafMetadata) -> Any:
        return said[leaf.name] if leaf.name in said else _describe(leaf, directory)

    stored = about.tree if rich else as_lists(about.tree)
    tree = jax.tree.map(describe, stored, is_leaf=_is_metadata)
    custom: Any = about.tree_custom_metadata
    return build_default_tree_metadata(tree, custom_metadata=custom, use_zarr3=about.uses_zarr3)


def _is_metadata(node: object) -> bool:
    return isinstance(node, LeafMetadata)


async def _ask(
    leaves: Sequence[LeafMetadata], directory: Any, registry: Any, use_zarr3: bool
) -> dict[str, Any]:
    use_ocdbt = await in_thread((Path(directory) / file_names.MANIFEST).exists)
    said: dict[str, Any] = {}
    for typestr in dict.fromkeys(leaf.kind for leaf in leaves):
        names = [leaf.name for leaf in leaves if leaf.kind == typestr]
        infos = [
            ParamInfo(
                name=name,
                parent_dir=directory,
                value_typestr=typestr,
                is_ocdbt_checkpoint=use_ocdbt,
                use_zarr3=use_zarr3,
            )
            for name in names
        ]
        said |= dict(zip(names, await registry.get(typestr).metadata(infos), strict=True))

    return said


def _describe(leaf: LeafMetadata, directory: Any) -> Any:
    if leaf.kind in EMPTY_MARKERS:
        return empty_value(leaf.kind)
    if leaf.kind == "string":
        return StringMetadata(name=leaf.name, directory=directory)

    assert leaf.shape is not None
    dtype: np.dtype[Any] = dtypes.numpy_dtype(leaf.dtype)
    if leaf.kind == "scalar":
        return ScalarMetadata(name=leaf.name, directory=directory, dtype=dtype)

    recorded = leaf.sharding
    write_shape = leaf.write_shape if leaf.kind == "jax.Array" else None
    return ArrayMetadata(
        name=leaf.name,
        directory=directory,
        shape=leaf.shape,
        sharding=None if recorded is None else from_serialized_string(json.dumps(recorded)),
        dtype=dtype,
        storage=StorageMetadata(
            chunk_shape=leaf.chunk_shape,
            write_shape=write_shape,
            zarr_metadata=ZarrMetadata.from_json(leaf.zarr_metadata),
        ),
    )

"""Restores trees whose leaves come from elsewhere in the stored tree, or are computed from it."""

from __future__ import annotations

__all__ = ("restore_transformed",)

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import jax

from penstock.handlers.formats.orbax.file_names import MANIFEST
from penstock.kernel.errors import SpecError
from penstock.orbax.common.leaf_args import ParamInfo, RestoreArgs
from penstock.orbax.common.value_metadata import Metadata
from penstock.orbax.v0.common.stored_tree_metadata import ValueMetadataEntry
from penstock.orbax.v0.common.tree_utils import from_flat_dict, is_empty_node, str_keypath, to_flat_dict
from penstock.orbax.v0.leaf_handlers.tensorstore_specs import get_ts_context
from penstock.orbax.v0.trees.restore_targets import empty_value
from penstock.orbax.v0.trees.transforms import RestoreTransform, Transform, apply_transformations


class Args(Protocol):
    """The part of `PyTreeRestoreArgs` that is used here."""

    @property
    def item(self) -> Any: ...
    @property
    def restore_args(self) -> Any: ...
    @property
    def transforms(self) -> Any: ...
    @property
    def transforms_default_to_original(self) -> bool: ...
    @property
    def legacy_transform_fn(self) -> Callable[[Any, Any, Any], tuple[Any, Any]] | None: ...


class Reader(Protocol):
    """Reads trees as they are stored. A directory is a path object."""

    def part(self, directory: Any, item: Any, restore_args: Any) -> Any:
        """Restore the leaves that `item` has; others are not read."""
        ...

    def metadata(self, directory: Any) -> Any:
        """Return the stored tree, a `TreeMetadata`."""
        ...

    def kinds(self, directory: Any) -> Mapping[str, str]:
        """Return what `_METADATA` calls the type of each leaf, by its stored name."""
        ...


def restore_transformed(args: Args, reader: Reader, directory: Any) -> Any:
    """Restore as `transforms` or `legacy_transform_fn` say. Leaves that no result needs are not read.

    Args:
        args: The request.
        reader: Restores without transformations.
        directory: Of the tree.

    Raises:
        ValueError: If both are given, if transforms lack an item or restore_args, or if a needed leaf
            is not stored.
    """
    if args.legacy_transform_fn is not None:
        if args.transforms is not None:
            raise ValueError("Cannot provide both `transforms` and `legacy_transform_fn`.")
        return _by_function(args, reader, directory)
    if args.item is None:
        raise ValueError(
            "If providing `transforms`, must provide `item` matching structure of expected result."
        )
    if args.restore_args is None:
        raise ValueError(
            "If providing `transforms`, must provide `restore_args` matching structure of expected result."
        )

    about = reader.metadata(directory).tree
    plan = _Plan.make(args, to_flat_dict(about, sep="/", is_leaf=_is_metadata))
    values = _read(plan.needed, about, partial(reader.part, directory))
    original = _replaced(about, values)
    rules = {key: _bound(rule, plan.restore_args) for key, rule in plan.rules.items()}
    return apply_transformations(original, rules, args.item, args.transforms_default_to_original)


@dataclass(frozen=True, slots=True)
class _Plan:
    """What is read and how, by stored key."""

    rules: Mapping[str, Transform]
    restore_args: Mapping[str, RestoreArgs]  #: by key in the result
    needed: Mapping[str, RestoreArgs]  #: by stored key

    @classmethod
    def make(cls, args: Args, stored: Mapping[str, Any]) -> _Plan:
        """Look at the rules in their order. The first that needs a stored leaf says how it is restored."""
        rules: dict[str, Transform] = to_flat_dict(args.transforms, sep="/")
        restore_args: dict[str, RestoreArgs] = to_flat_dict(args.restore_args, sep="/")
        needed: dict[str, RestoreArgs] = {}
        to_original = args.transforms_default_to_original
        result = to_flat_dict(args.item, sep="/")
        left = dict(result)
        for pattern, rule in rules.items():
            for wanted, asked in _inputs(rule).items():
                needed = {key: asked for key in stored if re.fullmatch(wanted, key)} | needed

            matching = [(key, found) for key in result if (found := re.fullmatch(pattern, key))]
            for key, found in matching:
                left.pop(key, None)
                source = _source(key, rule, found, to_original=to_original)
                if source is not None and source in stored:
                    needed.setdefault(source, restore_args.get(key, RestoreArgs()))

        for key in left if to_original else ():
            if key in stored:
                needed.setdefault(key, restore_args.get(key, RestoreArgs()))

        return cls(rules, restore_args, needed)


def _inputs(rule: Transform) -> Mapping[str, RestoreArgs]:
    """Return the stored leaves that a function of several leaves needs.

    Raises:
        ValueError: If it does not name them.
    """
    if rule.multi_value_fn is None:
        return {}
    if not isinstance(rule, RestoreTransform):
        raise ValueError("Must use RestoreTransform in order to use multi_value_fn during restore.")
    if rule.multi_value_fn_input_args is None:
        raise ValueError("`multi_value_fn` was specified, but `multi_value_fn_input_args` were not.")

    return rule.multi_value_fn_input_args


def _source(key: str, rule: Transform, found: re.Match[str], *, to_original: bool) -> str | None:
    """Name the stored leaf that a rule needs for a leaf of the result; None for a function of several."""
    if rule.multi_value_fn is not None:
        return None
    if rule.use_fallback:
        return None if to_original else key

    original = rule.original_key
    if isinstance(original, tuple):
        original = "/".join(original)

    return key if original is None else found.expand(original)


def _read(needed: Mapping[str, RestoreArgs], about: Any, part: Callable[[Any, Any], Any]) -> dict[str, Any]:
    """Restore the leaves that are needed, by stored key."""
    if not needed:
        return {}

    paths = to_flat_dict(about, is_leaf=_is_metadata)
    wanted = {path: needed["/".join(path)] for path in paths if "/".join(path) in needed}
    item = from_flat_dict(dict.fromkeys(wanted, 0))
    restored = part(item, from_flat_dict(dict(wanted)))
    return {"/".join(path): value for path, value in to_flat_dict(restored, is_leaf=_no_dict).items()}


def _replaced(about: Any, values: Mapping[str, Any]) -> Any:
    """The stored tree with the values that were read; other leaves stay metadata."""
    keys = iter(to_flat_dict(about, sep="/", is_leaf=_is_metadata))

    def value(leaf: Any) -> Any:
        return values.get(next(keys), leaf)

    return jax.tree.map(value, about, is_leaf=_is_metadata)


def _bound(rule: Transform, restore_args: Mapping[str, RestoreArgs]) -> Transform:
    """Pass the restore_args of the result to a function of several leaves."""
    function = rule.multi_value_fn
    if function is None:
        return rule

    def call(key: str, tree: Any) -> Any:
        return function(key, tree, restore_args[key])

    return Transform(multi_value_fn=call)


def _by_function(args: Args, reader: Reader, directory: Any) -> Any:
    """Let the caller's function map each leaf of the result to a stored one, of this tree or of another."""
    assert args.legacy_transform_fn is not None
    structure, chosen = args.legacy_transform_fn(args.item, *_shown(reader, directory))
    flat = to_flat_dict(chosen, is_leaf=lambda node: isinstance(node, ParamInfo))
    asked = {} if args.restore_args is None else to_flat_dict(args.restore_args)
    needed: dict[Any, dict[str, RestoreArgs]] = {}
    for path, info in flat.items():
        if isinstance(info, ParamInfo) and not info.skip_deserialize:
            needed.setdefault(info.parent_dir, {}).setdefault(info.name, asked.get(path, RestoreArgs()))

    values = {place: _named(names, reader, place) for place, names in needed.items()}

    def value(path: tuple[str, ...], in_structure: Any) -> Any:
        info = flat.get(path)
        if not isinstance(info, ParamInfo) or info.skip_deserialize:
            return empty_value(in_structure.value_type) if _is_entry(in_structure) else in_structure

        return values[info.parent_dir][info.name]

    made = {path: value(path, leaf) for path, leaf in to_flat_dict(structure, is_leaf=_is_entry).items()}
    return from_flat_dict(made, target=jax.tree.map(_zero, structure, is_leaf=_is_entry))


def _shown(reader: Reader, directory: Any) -> tuple[Any, Any]:
    """What the caller's function sees of the stored tree: what each leaf is, and where it lies."""
    about, kinds = reader.metadata(directory), reader.kinds(directory)
    use_ocdbt = (directory / MANIFEST).exists()
    context = get_ts_context(use_ocdbt=use_ocdbt)

    def name(path: Any) -> str:
        return ".".join(str_keypath(path))

    def entry(path: Any, leaf: Any) -> Any:
        return ValueMetadataEntry(kinds[name(path)], skip_deserialize=not _is_metadata(leaf))

    def info(path: Any, leaf: Any) -> Any:
        return ParamInfo(
            name=name(path),
            parent_dir=directory,
            skip_deserialize=not _is_metadata(leaf),
            is_ocdbt_checkpoint=use_ocdbt,
            use_zarr3=about.use_zarr3,
            ts_context=context,
        )

    entries, infos = (
        jax.tree_util.tree_map_with_path(make, about.tree, is_leaf=_is_stored) for make in (entry, info)
    )
    return entries, infos


def _named(names: Mapping[str, RestoreArgs], reader: Reader, directory: Any) -> dict[str, Any]:
    """Restore some leaves of a tree, by their stored names."""
    about = reader.metadata(directory).tree
    keys = {".".join(path): "/".join(path) for path in to_flat_dict(about, is_leaf=_is_metadata)}
    absent = [name for name in names if name not in keys]
    if absent:
        raise SpecError(f"legacy_transform_fn asks for leaves that {directory} does not have: {absent[:10]}")

    needed = {keys[name]: asked for name, asked in names.items()}
    values = _read(needed, about, partial(reader.part, directory))
    return {name: values[keys[name]] for name in names}


def _zero(leaf: Any) -> int:
    return 0


def _is_metadata(node: Any) -> bool:
    return isinstance(node, Metadata)


def _is_stored(node: Any) -> bool:
    """Whether it is a leaf of what is stored, where an empty node is one, too."""
    return _is_metadata(node) or is_empty_node(node)


def _is_entry(node: Any) -> bool:
    return isinstance(node, ValueMetadataEntry)


def _no_dict(node: Any) -> bool:
    return not isinstance(node, dict)

"""Restores trees whose leaves come from elsewhere in the stored tree, or are computed from it."""

from __future__ import annotations

__all__ = ("restore_transformed",)

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import jax

from penstock.orbax.common.leaf_args import ParamInfo, RestoreArgs
from penstock.orbax.common.value_metadata import Metadata
from penstock.orbax.v0.common.tree_utils import from_flat_dict, to_flat_dict
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


Restore = Callable[[Any, Any, bool], Any]
"""Item, restore_args, partial_restore -> the tree."""


def restore_transformed(args: Args, restore: Restore, stored: Callable[[], Any]) -> Any:
    """Restore as `transforms` or `legacy_transform_fn` say. Leaves that no result needs are not read.

    Args:
        args: The request.
        restore: Restores without transformations.
        stored: Returns the stored tree, of metadata.

    Raises:
        ValueError: If both are given, if transforms lack an item or restore_args, or if a needed leaf
            is not stored.
    """
    if args.legacy_transform_fn is not None:
        if args.transforms is not None:
            raise ValueError("Cannot provide both `transforms` and `legacy_transform_fn`.")
        return _by_function(args, restore, stored())
    if args.item is None:
        raise ValueError(
            "If providing `transforms`, must provide `item` matching structure of expected result."
        )
    if args.restore_args is None:
        raise ValueError(
            "If providing `transforms`, must provide `restore_args` matching structure of expected result."
        )

    about = stored()
    plan = _Plan.make(args, to_flat_dict(about, sep="/", is_leaf=_is_metadata))
    values = _read(plan.needed, about, restore)
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
        rules: dict[str, Transform] = to_flat_dict(args.transforms, sep="/")
        restore_args: dict[str, RestoreArgs] = to_flat_dict(args.restore_args, sep="/")
        needed: dict[str, RestoreArgs] = {}
        for rule in rules.values():
            for pattern, asked in _inputs(rule).items():
                for key in stored:
                    if re.fullmatch(pattern, key):
                        needed.setdefault(key, asked)

        for key in to_flat_dict(args.item, sep="/"):
            found = _sources(key, rules, to_original=args.transforms_default_to_original)
            for source in found:
                if source in stored:
                    needed.setdefault(source, restore_args.get(key, RestoreArgs()))

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


def _sources(key: str, rules: Mapping[str, Transform], *, to_original: bool) -> list[str]:
    """Name the stored leaves that a leaf of the result needs, except for functions of several leaves."""
    matching = [(rule, found) for pattern, rule in rules.items() if (found := re.fullmatch(pattern, key))]
    if not matching:
        return [key] if to_original else []

    sources: list[str] = []
    for rule, found in matching:
        if rule.use_fallback:
            sources += [] if to_original else [key]
        elif rule.multi_value_fn is None:
            original = rule.original_key
            if isinstance(original, tuple):
                original = "/".join(original)
            sources.append(key if original is None else found.expand(original))

    return sources


def _read(needed: Mapping[str, RestoreArgs], about: Any, restore: Restore) -> dict[str, Any]:
    """Restore the leaves that are needed, by stored key."""
    if not needed:
        return {}

    paths = to_flat_dict(about, is_leaf=_is_metadata)
    wanted = {path: needed["/".join(path)] for path in paths if "/".join(path) in needed}
    item = from_flat_dict(dict.fromkeys(wanted, 0))
    restored = restore(item, from_flat_dict(dict(wanted)), True)
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


def _by_function(args: Args, restore: Restore, about: Any) -> Any:
    """Let the caller's function map each leaf of the result to a stored one."""
    assert args.legacy_transform_fn is not None
    infos = jax.tree.map(_info_of, about, is_leaf=_is_metadata)
    structure, chosen = args.legacy_transform_fn(args.item, about, infos)
    flat = to_flat_dict(chosen, is_leaf=lambda node: isinstance(node, ParamInfo))
    asked = {} if args.restore_args is None else to_flat_dict(args.restore_args)
    names = {".".join(path): "/".join(path) for path in to_flat_dict(about, is_leaf=_is_metadata)}
    needed: dict[str, RestoreArgs] = {}
    for path, info in flat.items():
        if isinstance(info, ParamInfo) and not info.skip_deserialize:
            needed.setdefault(names[info.name], asked.get(path, RestoreArgs()))

    values = _read(needed, about, restore)

    def value(path: tuple[str, ...], in_structure: Any) -> Any:
        info = flat.get(path)
        if not isinstance(info, ParamInfo) or info.skip_deserialize:
            return in_structure

        return values[names[info.name]]

    made = {path: value(path, leaf) for path, leaf in to_flat_dict(structure, is_leaf=_is_metadata).items()}
    return from_flat_dict(made, target=jax.tree.map(_zero, structure, is_leaf=_is_metadata))


def _zero(leaf: Any) -> int:
    return 0


def _info_of(leaf: Any) -> Any:
    return ParamInfo(name=leaf.name, parent_dir=leaf.directory) if _is_metadata(leaf) else leaf


def _is_metadata(node: Any) -> bool:
    return isinstance(node, Metadata)


def _no_dict(node: Any) -> bool:
    return not isinstance(node, dict)

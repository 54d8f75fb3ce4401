"""The module `transform_utils` of Orbax's API, and what programs use of `experimental.model_surgery`."""

from __future__ import annotations

__all__ = (
    "RestoreTransform",
    "Transform",
    "Transformation",
    "apply_transformations",
    "intersect_trees",
    "merge_trees",
    "rename_by_regex",
    "unflatten",
)

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax

from penstock import kernel
from penstock.errors import SpecError
from penstock.orbax.tree import PyTree, from_flat_dict, to_flat_dict


@dataclass
class Transform:
    r"""Says where a leaf comes from. The rule's own key, a regular expression, says which leaves.

    Attributes:
        original_key: The leaf's key in the original tree, joined by slashes; may refer to groups of the
            rule's key (`\1`). By default its own.
        use_fallback: Take the value of the new tree; if the default is the new tree's, the original one.
        value_fn: Makes the value of the original one.
        multi_value_fn: Makes the value, given its key and the whole original tree.

    Raises:
        AssertionError: If these contradict each other.
    """

    original_key: str | tuple[str, ...] | None = None
    use_fallback: bool = False
    value_fn: Callable[..., Any] | None = None
    multi_value_fn: Callable[..., Any] | None = None

    def __post_init__(self) -> None:
        one = self.original_key is not None or self.value_fn is not None
        several = self.multi_value_fn is not None
        if one + several + self.use_fallback > 1:
            raise AssertionError(
                "a Transform has original_key and value_fn, or multi_value_fn, or use_fallback, not several"
            )


@dataclass
class RestoreTransform(Transform):
    """A `Transform` for leaves that are being restored.

    `multi_value_fn` is called with the leaf's key, the original tree and the leaf's `RestoreArgs`.

    Attributes:
        multi_value_fn_input_args: The leaves that `multi_value_fn` needs: regular expression over keys
            -> the `RestoreArgs` to restore such a leaf with. Other leaves are not read for it.
    """

    multi_value_fn_input_args: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.multi_value_fn_input_args is not None and self.multi_value_fn is None:
            raise AssertionError("multi_value_fn_input_args is for multi_value_fn, which is not given")


def apply_transformations(
    original_tree: PyTree, transformations: PyTree, new_tree: PyTree, default_to_original: bool | None = True
) -> PyTree:
    r"""Return a tree of the structure of `new_tree`, its leaves taken or made from `original_tree`.

    Keys are paths joined by slashes. Every rule whose key matches all of a leaf's key is applied to it, in
    the sorted order of the rules; the last one counts.

    Args:
        original_tree: Where values come from.
        transformations: `Transform`s by key; nested dicts of them, too.
        new_tree: The structure, and the values of leaves that come from nowhere else. None is no leaf.
        default_to_original: Whether a leaf without a rule comes from the leaf of the same key in
            `original_tree`, if there is one; else from `new_tree`.

    Raises:
        ValueError: If a rule asks for a leaf that `original_tree` does not have.
    """
    if not jax.tree.leaves(new_tree) and not new_tree:
        return {}

    original = to_flat_dict(original_tree, sep="/")
    rules: dict[str, Transform] = to_flat_dict(transformations, sep="/")
    new = to_flat_dict(new_tree, sep="/")
    for key in new:
        tried = [(re.fullmatch(pattern, key), rule) for pattern, rule in rules.items()]
        matching = [(found, rule) for found, rule in tried if found is not None]
        for found, rule in matching:
            if not rule.use_fallback:
                new[key] = _made(key, rule, found, original, original_tree)
            elif not default_to_original:
                new[key] = _original(key, original)
        if not matching and default_to_original and key in original:
            new[key] = original[key]

    return from_flat_dict(new, target=new_tree, sep="/")


def merge_trees(*trees: PyTree, target: PyTree = None) -> PyTree:
    """Put the leaves of several trees into one; where they share a key, the last counts.

    Args:
        *trees: Any.
        target: A tree of the structure of the result; without it nested dicts are made.
    """
    merged: dict[Any, Any] = {}
    for tree in trees:
        merged.update(to_flat_dict(tree))

    return from_flat_dict(merged, target=target)


def intersect_trees(*trees: PyTree, target: PyTree = None) -> PyTree:
    """Return the leaves whose keys are in all of the trees, with the values of the last one."""
    flat = [to_flat_dict(tree) for tree in trees]
    common = set(flat[-1]).intersection(*flat)
    return from_flat_dict({key: value for key, value in flat[-1].items() if key in common}, target=target)


def _made(key: str, rule: Transform, found: re.Match[str], original: dict[Any, Any], tree: PyTree) -> Any:
    if rule.multi_value_fn is not None:
        return rule.multi_value_fn(key, tree)

    source = rule.original_key
    if isinstance(source, tuple):
        source = "/".join(source)

    value = _original(key if source is None else found.expand(source), original)
    return value if rule.value_fn is None else rule.value_fn(value)


def _original(key: str, original: dict[Any, Any]) -> Any:
    if key not in original:
        raise ValueError(f"a transformation needs the leaf {key!r}, which the original tree does not have")

    return original[key]


class Transformation(Protocol):
    """Makes another tree of the leaves of one. Programs chain them: names first, then the nesting."""

    def __call__(self, *source_array_trees: PyTree) -> PyTree:
        """Return the tree that is made of one. Leaves stay the very same objects."""
        ...


def rename_by_regex(rules: Sequence[tuple[str, str]]) -> Transformation:
    """Return a change of names.

    Args:
        rules: Regular expressions and what replaces each match, applied to every name in this order.

    Returns:
        The change, of a dict by name. Its error is a ValueError if two leaves get one name; Orbax keeps one.
    """
    compiled = [(re.compile(pattern), replacement) for pattern, replacement in rules]

    def renamed(name: str) -> str:
        for pattern, replacement in compiled:
            name = pattern.sub(replacement, name)

        return name

    def transform(*source_array_trees: PyTree) -> PyTree:
        source = _only(source_array_trees)
        result: dict[str, Any] = {}
        origins: dict[str, str] = {}
        for name, value in source.items():
            new = renamed(name)
            if origins.setdefault(new, name) != name:
                raise SpecError(f"both {origins[new]!r} and {name!r} would be {new!r}")
            result[new] = value

        return result

    return transform


def unflatten(separator: str = ".", *, inplace: bool = False, target: PyTree = None) -> Transformation:
    """Return a change that nests what is flat.

    Args:
        separator: What joins the keys of a name.
        inplace: Whether to take the leaves out of the given dict, so that none is held twice.
        target: A tree of the structure of the result, by default nested dicts. What it lacks is left out;
            what is not given stays as it is there, which is logged.

    Returns:
        The change, of a dict by name. Its error is a ValueError if one name is the beginning of another.
    """

    def transform(*source_array_trees: PyTree) -> PyTree:
        source: Any = _only(source_array_trees)
        flat = source if inplace else dict(source)
        if target is not None:
            wanted = to_flat_dict(target, sep=separator)
            missing = [name for name in wanted if name not in flat]
            if missing:
                kernel.get_logger().warning("orbax.unflatten_kept", n_leaves=len(missing), names=missing[:10])
            flat.update({name: wanted[name] for name in missing})

        return from_flat_dict(flat, target=target, sep=separator, inplace=inplace)

    return transform


def _only(trees: Sequence[PyTree]) -> Mapping[str, Any]:
    if len(trees) != 1:
        raise SpecError(f"one tree of parameters is changed at a time, not {len(trees)}")

    tree: Mapping[str, Any] = trees[0]
    return tree

"""Changes of flat trees of parameters, as Orbax's `experimental.model_surgery.transformations` has them.

Programs chain them over what they loaded from safetensors: names first, then the nesting.
"""

from __future__ import annotations

__all__ = ("Transformation", "rename_by_regex", "unflatten")

import re
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from penstock import kernel
from penstock.errors import SpecError
from penstock.orbax.tree import PyTree, from_flat_dict, to_flat_dict


class Transformation(Protocol):
    """Makes another tree of the leaves of one."""

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

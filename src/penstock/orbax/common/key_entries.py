"""jax's key entries of a leaf, from its key path in penstock."""

from __future__ import annotations

__all__ = ("key_entries",)

import ast
from collections.abc import Iterator
from typing import Any

from jax import tree_util

from penstock.kernel.protocols.leaf import KeyKind, ParamInfo

_tree: Any = tree_util  # jax declares no types for it


def key_entries(info: ParamInfo) -> tuple[Any, ...]:
    """Return the key path of a leaf as `jax.tree_util` has it: `DictKey`, `SequenceKey`, `GetAttrKey`, ...

    Of a leaf that is saved these are the entries of its tree. Of one that is restored they are what
    the checkpoint knows: there an attribute is recorded as the key of a dict.

    Args:
        info: Its `key_path` is what `jax.tree_util.keystr` prints, perhaps with more in front: keys are
            compared from the last to the first.
    """
    entries: list[Any] = []
    text = info.key_path
    for key, kind in zip(reversed(info.keys), reversed(info.kinds), strict=True):
        for entry in _candidates(key, kind):
            shown = str(entry)
            if text.endswith(shown):
                text = text[: -len(shown)]
                break
        else:  # a custom entry, or a key that is not a string
            entry = _tree.DictKey(key) if kind is KeyKind.MAPPING else _tree.SequenceKey(int(key))

        entries.append(entry)

    entries.reverse()
    return tuple(entries)


def _candidates(key: str, kind: KeyKind) -> Iterator[Any]:
    if kind is not KeyKind.MAPPING:
        yield _tree.SequenceKey(int(key))
        yield _tree.FlattenedIndexKey(int(key))
        return

    yield _tree.DictKey(key)
    yield _tree.GetAttrKey(key)
    try:
        yield _tree.DictKey(ast.literal_eval(key))  # a number, or a bool
    except (ValueError, SyntaxError):
        return

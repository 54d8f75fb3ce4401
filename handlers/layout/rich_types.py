"""`value_metadata_tree` in `_METADATA`: which sequences were tuples, where Orbax was told to record it.

Source:
    ORBAX_FORMAT.md §1.2.
"""

from __future__ import annotations

__all__ = ("tuple_paths",)

from collections.abc import Iterator
from typing import Final, cast

from penstock.handlers.json_values import as_list, as_object, as_string, parse_value
from penstock.kernel.errors import CorruptCheckpointError
from penstock.kernel.messages import KeyPath

_NAME: Final = "value_metadata_tree"
_LEAF: Final = "ValueMetadataEntry"


def tuple_paths(path: str, text: object) -> frozenset[KeyPath]:
    """Find the tuples in the document that `_METADATA` holds as a text.

    Named tuples are no concern of it: their fields are recorded as those of a dict are.

    Args:
        path: Of `_METADATA`, for the error.
        text: What is recorded; None if nothing is.

    Raises:
        CorruptCheckpointError: If it is not what such a document would be.
    """
    if text is None:
        return frozenset()

    tree = parse_value(f"{path}, {_NAME}", as_string(path, _NAME, text))
    try:
        return frozenset(_tuples(path, tree, ()))
    except RecursionError as error:
        raise CorruptCheckpointError(path, f"{_NAME} is nested without end") from error


def _tuples(path: str, node: object, keys: KeyPath) -> Iterator[KeyPath]:
    members: object = node
    if isinstance(members, dict) and _is(cast("dict[str, object]", members), "custom", "tuple"):
        yield keys
    for key, child in _children(path, node, keys):
        yield from _tuples(path, child, (*keys, str(key)))


def _children(path: str, value: object, keys: KeyPath) -> Iterator[tuple[object, object]]:
    """Yield the children of a node, by the keys that `tree_metadata` has for them."""
    if isinstance(value, list):
        yield from enumerate(cast("list[object]", value))
        return

    node = as_object(path, _NAME, value)
    if _is(node, "custom", _LEAF):
        return
    if _is(node, "custom", "tuple"):
        yield from enumerate(as_list(path, _NAME, node["entries"]))
    elif node.get("category") == "namedtuple" and "entries" in node:
        for entry in as_list(path, _NAME, node["entries"]):
            field = as_object(path, _NAME, entry)
            yield as_string(path, f"a field at {keys}", field.get("key")), field.get("value")
    else:
        yield from node.items()


def _is(node: dict[str, object], category: str, class_: str) -> bool:
    content = "data" if class_ == _LEAF else "entries"
    return node.get("category") == category and node.get("clazz") == class_ and content in node

"""`value_metadata_tree` in `_METADATA`: which sequences were tuples, if the save recorded it.

Source:
    ORBAX_FORMAT.md §1.2.
"""

from __future__ import annotations

__all__ = ("encode", "tuple_paths")

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final, TypeAlias, cast, final

from penstock.handlers.formats.common.checked_json import as_list, as_object, as_string, parse_value
from penstock.kernel.errors import CorruptCheckpointError
from penstock.kernel.protocols.leaf import KeyKind, KeyPath, ParamInfo

_NAME: Final = "value_metadata_tree"
_LEAF: Final = "ValueMetadataEntry"
_Json: TypeAlias = "dict[str, _Json] | list[_Json] | str | int | bool | None"


def tuple_paths(path: str, text: object) -> frozenset[KeyPath]:
    """Find the tuples in the document that `_METADATA` holds as a text.

    Named tuples are not among them: their fields are recorded like the keys of a dict.

    Args:
        path: Of `_METADATA`, for the error.
        text: What is recorded; None if nothing is.

    Raises:
        CorruptCheckpointError: If it is malformed.
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


def encode(leaves: Iterable[tuple[ParamInfo, str]]) -> str:
    """Encode the document that `tuple_paths` reads.

    Args:
        leaves: Where each stands, with its `nodes`; and what `tree_metadata` says of its value, as JSON.
    """
    root = _Node()
    for info, value in leaves:
        node = root
        for key, kind, name in zip(info.keys, info.kinds, info.nodes, strict=False):
            node.kind, node.name = kind, name
            node = node.children.setdefault(key, _Node())

        node.value = {"category": "custom", "clazz": _LEAF, "data": json.loads(value)}

    return json.dumps(root.document())


@final
@dataclass(slots=True)
class _Node:
    kind: KeyKind = KeyKind.MAPPING  #: of its children's keys
    name: str = ""  #: as in `ParamInfo.nodes`
    children: dict[str, _Node] = field(default_factory=dict[str, "_Node"])
    value: _Json = None  #: of a leaf

    def document(self) -> _Json:
        if not self.children:
            return self.value
        if self.name == "tuple":
            return {"category": "custom", "clazz": "tuple", "entries": self._documents()}
        if self.name:
            module, _, name = self.name.rpartition(":")
            entries: list[_Json] = [
                {"key": key, "value": child.document()} for key, child in self.children.items()
            ]
            return {"category": "namedtuple", "module": module, "clazz": name, "entries": entries}
        # An index is missing where a node of a user's own class has nothing in it.
        if self.kind is KeyKind.SEQUENCE and list(self.children) == list(map(str, range(len(self.children)))):
            return self._documents()

        return {key: child.document() for key, child in self.children.items()}

    def _documents(self) -> list[_Json]:
        return [child.document() for child in self.children.values()]

"""`_METADATA`: the structure of the tree and the type of each leaf.

Source:
    ORBAX_FORMAT.md §1.1.
"""

from __future__ import annotations

__all__ = ("EMPTY_MARKERS", "TreeEntry", "TreeMetadata", "decode", "encode")

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, final

from penstock.handlers.json_values import as_list, as_object, as_shape, as_string, parse_object
from penstock.kernel.errors import CorruptCheckpointError
from penstock.kernel.messages import KeyKind, KeyPath, Leaf

EMPTY_MARKERS: Final = frozenset({"None", "Dict", "List", "Tuple", "NamedTuple"})
"""Types of what has nothing in it, and so nothing stored."""

_KINDS: Final = {1: KeyKind.SEQUENCE, 2: KeyKind.MAPPING}


@final
@dataclass(frozen=True, slots=True)
class TreeEntry:
    """What `_METADATA` says of one leaf or empty marker."""

    keys: KeyPath
    kinds: tuple[KeyKind, ...]
    typestr: str
    write_shape: tuple[int, ...] | None
    skip: bool  #: nothing is stored under this name: an empty marker, or (before 0.5.16) a value in msgpack

    @property
    def in_msgpack(self) -> bool:
        """Whether its value lies in the file beside `_METADATA` that early Orbax wrote."""
        return self.skip and self.typestr not in EMPTY_MARKERS


@final
@dataclass(frozen=True, slots=True)
class TreeMetadata:
    """The whole document."""

    entries: tuple[TreeEntry, ...]  #: as recorded, which is JAX's flatten order
    use_ocdbt: bool | None  #: None in old checkpoints: OCDBT if there is a manifest
    use_zarr3: bool
    all_chunks_written: bool  #: a missing chunk is an error; otherwise it reads as the fill value
    custom_metadata: object = None  #: the caller's own, any JSON
    value_metadata_tree: object = None  #: as recorded; see `rich_types`


def encode(leaves: Sequence[Leaf]) -> bytes:
    """Encode the document for leaves in flatten order, empty markers among them."""
    document = {
        "tree_metadata": {str(leaf.info.keys): _entry(leaf) for leaf in leaves},
        "use_ocdbt": True,
        "use_zarr3": False,
        "store_array_data_equal_to_fill_value": True,
        "custom_metadata": None,
    }
    return json.dumps(document).encode()


def _entry(leaf: Leaf) -> dict[str, object]:
    spec = leaf.spec
    value: dict[str, object] = {"value_type": spec.typestr, "skip_deserialize": spec.is_empty_marker}
    if spec.write_shape is not None:
        value["write_shape"] = spec.write_shape

    path = zip(leaf.info.keys, leaf.info.kinds, strict=True)
    return {
        "key_metadata": [{"key": key, "key_type": int(kind)} for key, kind in path],
        "value_metadata": value,
    }


def decode(path: str, data: bytes) -> TreeMetadata:
    """Read the document. Unknown members are ignored, at every level.

    An entry whose key path is a proper prefix of another one is left out, as Orbax does.

    Args:
        path: Where `data` was found, for the error.
        data: The content of the file.

    Raises:
        CorruptCheckpointError: If it is not what such a document would be.
    """
    document = parse_object(path, data)
    tree = as_object(path, "tree_metadata", document.get("tree_metadata"))
    entries = [_decode_entry(path, name, value) for name, value in tree.items()]
    _check_distinct(path, entries)
    inner = _proper_prefixes(entries)
    return TreeMetadata(
        entries=tuple([entry for entry in entries if entry.keys not in inner]),
        use_ocdbt=_flag(path, document, "use_ocdbt"),
        use_zarr3=_flag(path, document, "use_zarr3") or False,
        all_chunks_written=_flag(path, document, "store_array_data_equal_to_fill_value") or False,
        custom_metadata=document.get("custom_metadata"),
        value_metadata_tree=document.get("value_metadata_tree"),
    )


def _decode_entry(path: str, name: str, value: object) -> TreeEntry:
    entry = as_object(path, name, value)
    recorded = as_object(path, name, entry.get("value_metadata"))
    keys: list[str] = []
    kinds: list[KeyKind] = []
    for step in as_list(path, name, entry.get("key_metadata")):
        key = as_object(path, name, step)
        keys.append(as_string(path, name, key.get("key")))
        kind = key.get("key_type")
        if type(kind) is not int or kind not in _KINDS:
            raise CorruptCheckpointError(path, f"{name} has a key_type {kind!r}, neither 1 nor 2")

        kinds.append(_KINDS[kind])

    skip = recorded.get("skip_deserialize", False)
    if type(skip) is not bool:
        raise CorruptCheckpointError(path, f"{name} has a skip_deserialize {skip!r}, not a boolean")

    shape = recorded.get("write_shape")
    return TreeEntry(
        tuple(keys),
        tuple(kinds),
        as_string(path, name, recorded.get("value_type")),
        None if shape is None else as_shape(path, name, shape),
        skip,
    )


def _flag(path: str, document: dict[str, object], name: str) -> bool | None:
    value = document.get(name)
    if value is not None and type(value) is not bool:
        raise CorruptCheckpointError(path, f"{name} is {value!r}, not a boolean")

    return value


def _check_distinct(path: str, entries: list[TreeEntry]) -> None:
    seen: set[KeyPath] = set()
    for entry in entries:
        if entry.keys in seen:
            raise CorruptCheckpointError(path, f"{entry.keys} is listed twice")
        seen.add(entry.keys)


def _proper_prefixes(entries: list[TreeEntry]) -> set[KeyPath]:
    prefixes: set[KeyPath] = set()
    for entry in entries:
        prefix = entry.keys
        while prefix:
            prefix = prefix[:-1]
            if prefix in prefixes:
                break
            prefixes.add(prefix)

    return prefixes

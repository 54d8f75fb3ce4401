"""Decodes zstd-compressed OCDBT manifests and nodes with TensorStore.

TensorStore exposes no decompressor, but it can dump the decoded manifest and nodes of a database.
"""

from __future__ import annotations

__all__ = ("DumpedDatabase",)

from typing import Any, final
from urllib.parse import quote, unquote

import tensorstore as ts

from penstock.handlers.ocdbt.index_entries import Values
from penstock.handlers.ocdbt.key_tables import MOST_BYTES_OF_KEYS, DataFile
from penstock.handlers.ocdbt.node_decoding import Child, Manifest, Node, NodeReference
from penstock.handlers.ocdbt.value_refs import Indirect, Inline, Value
from penstock.handlers.ocdbt.wire_format import Origin, path_problem
from penstock.kernel.errors import UnsupportedByStoreError
from penstock.kernel.protocols.store_capabilities import KvStoreSpecs
from penstock.kernel.protocols.stores import Store


@final
class DumpedDatabase:
    """Reads the manifests and nodes of one database with `tensorstore.ocdbt.dump`.

    Every method blocks, and raises `CorruptCheckpointError` if TensorStore cannot decode the bytes.

    Raises:
        UnsupportedByStoreError: If TensorStore cannot read the store.
    """

    def __init__(self, store: Store, directory: str) -> None:
        if not isinstance(store, KvStoreSpecs):
            raise UnsupportedByStoreError("read with TensorStore", directory, store, KvStoreSpecs)

        self._spec = store.kvstore_spec(directory)

    def manifest(self, origin: Origin) -> Manifest:
        """Read the newest manifest. TensorStore itself finds the newest of numbered ones."""
        versions = self._dump(origin, None).get("versions")
        if not versions:
            raise origin.corrupt("a manifest without versions")

        newest = versions[-1]
        if "location" not in newest["root"]:
            return Manifest(numbered=False, root=None)

        return Manifest(numbered=False, root=_reference(origin, newest["root"], newest["root_height"]))

    def node(self, origin: Origin, reference: NodeReference, prefix: bytes) -> Node:
        """Read a B+tree node; `prefix` is what the nodes above hold of each key."""
        base, path = reference.file.base, reference.file.path
        where = f"{quote(base)}:{quote(path[len(base) :])}:{reference.offset}:{reference.length}"
        dumped = self._dump(origin, f"btreenode:{where}")
        height, entries = dumped["height"], dumped["entries"]
        keys = [entry["key"] for entry in entries]
        if not height:
            if sum(map(len, keys)) + len(prefix) * len(keys) > MOST_BYTES_OF_KEYS:
                raise origin.corrupt(f"keys of more than {MOST_BYTES_OF_KEYS} bytes")

            keys = [prefix + key for key in keys] if prefix else keys
            return Node(0, keys, Values.of([_value(origin, entry) for entry in entries]), [])

        children = [
            Child(
                entry["key"],
                len(entry["subtree_common_prefix"]),
                _reference(origin, entry, height - 1),
            )
            for entry in entries
        ]
        return Node(height, keys, None, children)

    def _dump(self, origin: Origin, node: str | None) -> dict[str, Any]:
        try:
            base = ts.KvStore.open(self._spec).result()
            dumped: dict[str, Any] = ts.ocdbt.dump(base, node).result()
        except (ValueError, KeyError, OSError, RuntimeError) as error:
            raise origin.corrupt(f"TensorStore cannot decode it: {error}") from error

        return dumped


def _value(origin: Origin, entry: dict[str, Any]) -> Value:
    if "inline_value" in entry:
        return Inline(entry["inline_value"])

    file, offset, length = _location(origin, entry["indirect_value"])
    return Indirect(file.path, offset, length)


def _reference(origin: Origin, entry: dict[str, Any], height: int) -> NodeReference:
    file, offset, length = _location(origin, entry["location"])
    about = entry["statistics"]
    return NodeReference(file, offset, length, height, about["num_keys"], about["num_tree_bytes"])


def _location(origin: Origin, location: str) -> tuple[DataFile, int, int]:
    """Parse `kind:base:path:offset:length`, where base and path are percent-encoded."""
    _, base, relative, offset, length = location.split(":")
    try:
        # Unlike in the encoded form, the base is complete here: it includes the transitive part.
        base, relative = unquote(base, errors="strict"), unquote(relative, errors="strict")
    except UnicodeDecodeError as error:
        raise origin.corrupt(f"data file path of {location!r} is not UTF-8") from error

    file = DataFile(base, base + relative)
    if problem := path_problem(file.path):
        raise origin.corrupt(problem)

    return file, int(offset), int(length)

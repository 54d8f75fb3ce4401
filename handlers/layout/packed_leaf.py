"""A leaf whose value lies in the msgpack file, put together with what `_METADATA` says of it. Pure."""

from __future__ import annotations

__all__ = ("stored_leaf",)

import os
from collections.abc import Mapping

from penstock.handlers.dtypes import numpy_dtype
from penstock.handlers.layout.metadata import TreeEntry
from penstock.handlers.layout.msgpack_tree import PackedLeaf
from penstock.handlers.layout.names import LEGACY_MSGPACK
from penstock.kernel.errors import CorruptCheckpointError
from penstock.kernel.messages import LeafSpec, ParamInfo, StoredLeaf


def stored_leaf(
    info: ParamInfo, entry: TreeEntry, found: PackedLeaf | None, shardings: Mapping[str, str]
) -> StoredLeaf:
    """Make a leaf of its entry and of what the msgpack file has under the same keys.

    Args:
        info: Of the leaf.
        entry: Says that the value is in the file, and of what type it was.
        found: What is there; not a placeholder.
        shardings: By stored name.

    Raises:
        CorruptCheckpointError: If there is nothing, or something of another kind.
    """
    path = os.path.join(info.directory, LEGACY_MSGPACK)
    if found is None:
        raise CorruptCheckpointError(path, "does not hold this value", key_path=info.key_path)
    if (found.text is None) == (entry.typestr == "string") or (found.array is None) == (found.text is None):
        problem = f"holds a {found.typestr} where a {entry.typestr} was recorded"
        raise CorruptCheckpointError(path, problem, key_path=info.key_path)
    if found.array is None:
        return StoredLeaf(info, LeafSpec("string", text=found.text))

    array = found.array
    spec = LeafSpec(
        typestr=entry.typestr,
        shape=array.shape,
        dtype=array.dtype,
        itemsize=numpy_dtype(array.dtype).itemsize,
        chunk_shape=tuple([n or 1 for n in array.shape]),
        sharding=shardings.get(info.name),
    )
    return StoredLeaf(info, spec, array)

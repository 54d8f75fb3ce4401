"""A leaf whose value lies in the msgpack file, put together with what `_METADATA` says of it. Pure."""

from __future__ import annotations

__all__ = ("packed_spec",)

import os

from penstock.handlers.dtypes import numpy_dtype
from penstock.handlers.formats.common.key_paths import show_key_path
from penstock.handlers.formats.orbax.chunks.embedded_arrays import PackedArray
from penstock.handlers.formats.orbax.documents.file_names import LEGACY_MSGPACK
from penstock.handlers.formats.orbax.documents.tree_metadata import TreeMetadata
from penstock.handlers.formats.orbax.msgpack.msgpack_tree import PackedLeaf
from penstock.kernel.errors import CorruptCheckpointError
from penstock.kernel.protocols.leaf import LeafSpec


def packed_spec(
    directory: str,
    tree: TreeMetadata,
    at: int,
    found: PackedLeaf | None,
    sharding: str | None,
    known: dict[tuple[object, ...], LeafSpec],
) -> tuple[LeafSpec, PackedArray | None]:
    """Describe a leaf by its entry and by what the msgpack file has under the same keys.

    Args:
        directory: Of the tree.
        tree: Says that the value is in the file, and of what type it was.
        at: Which leaf of `tree`.
        found: What is there; not a placeholder.
        sharding: What is recorded for the leaf.
        known: Descriptions that leaves share; added to.

    Returns:
        What it is, and where its bytes lie if it is an array or number.

    Raises:
        CorruptCheckpointError: If there is nothing, or something of another kind.
    """
    typestr = tree.typestrs[at]
    problem = ""
    if found is None:
        problem = "does not hold this value"
    elif (found.text is None) == (typestr == "string") or (found.array is None) == (found.text is None):
        problem = f"holds a {found.typestr} where a {typestr} was recorded"
    if found is None or problem:
        key_path = show_key_path(tree.keys[at], tree.kinds[at])
        raise CorruptCheckpointError(os.path.join(directory, LEGACY_MSGPACK), problem, key_path=key_path)
    if found.array is None:
        return LeafSpec("string", text=found.text), None

    array = found.array
    shared = (typestr, array.shape, array.dtype, sharding)
    spec = known.get(shared)
    if spec is None:
        spec = known[shared] = LeafSpec(
            typestr=typestr,
            shape=array.shape,
            dtype=array.dtype,
            itemsize=numpy_dtype(array.dtype).itemsize,
            chunk_shape=tuple([n or 1 for n in array.shape]),
            sharding=sharding,
        )

    return spec, array

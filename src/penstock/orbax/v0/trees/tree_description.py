"""Orbax's description of what a directory holds."""

from __future__ import annotations

__all__ = ("describe_tree",)

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import jax
import numpy as np

from penstock.blocking.background import run_sync
from penstock.checkpointer.description import CheckpointMetadata, LeafMetadata
from penstock.handlers.dtypes import numpy_dtype
from penstock.handlers.formats.orbax.file_names import MANIFEST
from penstock.orbax.common.background_work import in_thread
from penstock.orbax.common.leaf_args import ParamInfo
from penstock.orbax.common.sharding_metadata import from_serialized_string
from penstock.orbax.common.value_metadata import (
    ArrayMetadata,
    ScalarMetadata,
    StorageMetadata,
    StringMetadata,
    ZarrMetadata,
)
from penstock.orbax.v0.common.stored_tree_metadata import build_default_tree_metadata
from penstock.orbax.v0.trees.restore_targets import EMPTY, empty_value
from penstock.orbax.v0.trees.restore_tree import as_lists

_KNOWN: Final = EMPTY | {"string"}


def describe_tree(about: CheckpointMetadata, directory: Any, registry: Any, *, rich: bool = False) -> Any:
    """Return a `TreeMetadata` of what is stored in a directory.

    Args:
        about: Its metadata, as penstock reads it.
        directory: Of the tree.
        registry: The type handlers that describe leaves unknown to penstock.
        rich: Whether recorded tuples are described as tuples.

    Raises:
        ValueError: If a leaf has no handler.
    """
    foreign = [leaf for leaf in about.leaves if leaf.shape is None and leaf.kind not in _KNOWN]
    said = run_sync(_ask, foreign, directory, registry, about.uses_zarr3) if foreign else {}

    def describe(leaf: LeafMetadata) -> Any:
        return said[leaf.name] if leaf.name in said else _describe(leaf, directory)

    stored = about.tree if rich else as_lists(about.tree)
    tree = jax.tree.map(describe, stored, is_leaf=_is_metadata)
    custom: Any = about.tree_custom_metadata
    return build_default_tree_metadata(tree, custom_metadata=custom, use_zarr3=about.uses_zarr3)


def _is_metadata(node: object) -> bool:
    return isinstance(node, LeafMetadata)


async def _ask(
    leaves: Sequence[LeafMetadata], directory: Any, registry: Any, use_zarr3: bool
) -> dict[str, Any]:
    use_ocdbt = await in_thread((Path(directory) / MANIFEST).exists)
    said: dict[str, Any] = {}
    for typestr in dict.fromkeys(leaf.kind for leaf in leaves):
        names = [leaf.name for leaf in leaves if leaf.kind == typestr]
        infos = [
            ParamInfo(
                name=name,
                parent_dir=directory,
                value_typestr=typestr,
                is_ocdbt_checkpoint=use_ocdbt,
                use_zarr3=use_zarr3,
            )
            for name in names
        ]
        said |= dict(zip(names, await registry.get(typestr).metadata(infos), strict=True))

    return said


def _describe(leaf: LeafMetadata, directory: Any) -> Any:
    if leaf.kind in EMPTY:
        return empty_value(leaf.kind)
    if leaf.kind == "string":
        return StringMetadata(name=leaf.name, directory=directory)

    assert leaf.shape is not None
    dtype: np.dtype[Any] = numpy_dtype(leaf.dtype)
    if leaf.kind == "scalar":
        return ScalarMetadata(name=leaf.name, directory=directory, dtype=dtype)

    recorded = leaf.sharding
    write_shape = leaf.write_shape if leaf.kind == "jax.Array" else None
    return ArrayMetadata(
        name=leaf.name,
        directory=directory,
        shape=leaf.shape,
        sharding=None if recorded is None else from_serialized_string(json.dumps(recorded)),
        dtype=dtype,
        storage=StorageMetadata(
            chunk_shape=leaf.chunk_shape,
            write_shape=write_shape,
            zarr_metadata=ZarrMetadata.from_json(leaf.zarr_metadata),
        ),
    )

"""What a directory holds, as Orbax describes it."""

from __future__ import annotations

__all__ = ("describe_tree",)

import json
from typing import Any

import jax
import numpy as np

from penstock.description import CheckpointMetadata, LeafMetadata
from penstock.handlers.dtypes import numpy_dtype
from penstock.orbax.handlers.wanted import EMPTY, empty_value
from penstock.orbax.metadata.sharding import from_serialized_string
from penstock.orbax.metadata.tree import build_default_tree_metadata
from penstock.orbax.metadata.value import (
    ArrayMetadata,
    Metadata,
    ScalarMetadata,
    StorageMetadata,
    StringMetadata,
)


def describe_tree(about: CheckpointMetadata, directory: Any) -> Any:
    """Return a `TreeMetadata` of what is stored in a directory."""
    tree = jax.tree.map(
        lambda leaf: _describe(leaf, directory),
        about.tree,
        is_leaf=lambda node: isinstance(node, LeafMetadata),
    )
    custom: Any = about.tree_custom_metadata
    return build_default_tree_metadata(tree, custom_metadata=custom)


def _describe(leaf: LeafMetadata, directory: Any) -> Any:
    if leaf.kind in EMPTY:
        return empty_value(leaf.kind)
    if leaf.kind == "string":
        return StringMetadata(name=leaf.name, directory=directory)
    if leaf.shape is None:
        return Metadata(name=leaf.name, directory=directory)

    dtype: np.dtype[Any] = numpy_dtype(leaf.dtype)
    if leaf.kind == "scalar":
        return ScalarMetadata(name=leaf.name, directory=directory, dtype=dtype)

    recorded = leaf.sharding
    write_shape = leaf._spec.write_shape if leaf.kind == "jax.Array" else None  # noqa: SLF001
    return ArrayMetadata(
        name=leaf.name,
        directory=directory,
        shape=leaf.shape,
        sharding=None if recorded is None else from_serialized_string(json.dumps(recorded)),
        dtype=dtype,
        storage=StorageMetadata(chunk_shape=leaf.chunk_shape, write_shape=write_shape),
    )

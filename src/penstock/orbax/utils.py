"""The module `utils` of Orbax's API, and the placeholders in msgpack files of old versions."""

from __future__ import annotations

__all__ = (
    "TMP_DIR_SUFFIX",
    "all_leaves_are_placeholders",
    "any_checkpoint_step",
    "broadcast_one_to_all",
    "checkpoint_steps",
    "checkpoint_steps_paths",
    "construct_restore_args",
    "deserialize_tree",
    "from_flat_dict",
    "from_flattened_with_keypath",
    "fully_replicated_host_local_array_to_global_array",
    "get_key_name",
    "get_save_directory",
    "is_checkpoint_finalized",
    "is_dict_key",
    "is_empty_node",
    "is_empty_or_leaf",
    "is_gcs_path",
    "is_pathways_backend",
    "is_primary_host",
    "is_scalar",
    "is_sequence_key",
    "is_tmp_checkpoint",
    "leaf_is_placeholder",
    "leaf_placeholder",
    "name_from_leaf_placeholder",
    "pytree_structure",
    "reached_preemption",
    "record_saved_duration",
    "serialize_tree",
    "step_from_checkpoint_name",
    "sync_global_devices",
    "sync_global_processes",
    "tmp_checkpoints",
    "to_flat_dict",
    "to_shape_dtype_struct",
    "tuple_path_from_keypath",
)

import errno
import os
from pathlib import Path
from typing import Any, Final

import jax
import numpy as np

from penstock import handlers as built_in
from penstock.embedding import file_names
from penstock.orbax.arrays import to_shape_dtype_struct
from penstock.orbax.logging import record_saved_duration
from penstock.orbax.multihost import (
    broadcast_one_to_all,
    fully_replicated_host_local_array_to_global_array,
    is_pathways_backend,
    is_primary_host,
    reached_preemption,
    sync_global_processes,
)
from penstock.orbax.standard_handler import construct_restore_args
from penstock.orbax.step import (
    TMP_DIR_SUFFIX,
    any_checkpoint_step,
    checkpoint_steps,
    checkpoint_steps_paths,
    get_save_directory,
    is_checkpoint_finalized,
    is_gcs_path,
    is_tmp_checkpoint,
    step_from_checkpoint_name,
    tmp_checkpoints,
)
from penstock.orbax.tree import (
    PyTree,
    deserialize_tree,
    from_flat_dict,
    from_flattened_with_keypath,
    get_key_name,
    is_dict_key,
    is_empty_node,
    is_empty_or_leaf,
    is_sequence_key,
    serialize_tree,
    to_flat_dict,
    tuple_path_from_keypath,
)

sync_global_devices = sync_global_processes

_jax: Any = jax

_PREFIXES: Final = ("PLACEHOLDER://", "AGGREGATED://")

_NO_LEAVES: Final = frozenset({file_names.METADATA, file_names.SHARDING, file_names.ARRAY_METADATAS})


def is_scalar(x: Any) -> bool:
    """Return whether `x` is a Python or NumPy number."""
    return isinstance(x, int | float | np.number)


def leaf_is_placeholder(leaf: Any) -> bool:
    """Return whether a leaf of an old msgpack file only says that its value is stored elsewhere."""
    return isinstance(leaf, str) and leaf.startswith(_PREFIXES)


def leaf_placeholder(name: str) -> str:
    """Return the placeholder of the leaf that is stored under `name`."""
    return _PREFIXES[0] + name


def name_from_leaf_placeholder(placeholder: str) -> str:
    """Return the stored name that a placeholder refers to.

    Raises:
        ValueError: If it is not a placeholder.
    """
    for prefix in _PREFIXES:
        if placeholder.startswith(prefix):
            return placeholder.removeprefix(prefix)

    raise ValueError(f"{placeholder!r} is not a placeholder of a leaf")


def all_leaves_are_placeholders(tree: PyTree) -> bool:
    """Return whether the msgpack file itself holds no value."""
    return all(leaf_is_placeholder(leaf) for leaf in _jax.tree.leaves(tree))


def pytree_structure(directory: Any) -> PyTree:
    """Infer the structure of a tree from the names in its directory, as nested dicts of placeholders.

    Raises:
        FileNotFoundError: If there is no such directory.
        ValueError: If one name is the beginning of another.
    """
    store, path = built_in.LocalStore(), str(Path(directory))
    if store.kind(path) is None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)

    listed = store.list_directory(path)
    names = sorted(name for name in listed if name not in _NO_LEAVES)
    return from_flat_dict({name: leaf_placeholder(name) for name in names}, sep=".")

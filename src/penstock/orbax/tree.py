"""PyTrees as plain dicts and lists, and back: the helpers of Orbax's `tree` and `utils` modules."""

from __future__ import annotations

__all__ = (
    "deserialize_tree",
    "from_flat_dict",
    "from_flattened_with_keypath",
    "get_key_name",
    "get_param_names",
    "is_dict_key",
    "is_empty_node",
    "is_empty_or_leaf",
    "is_flat_dict",
    "is_sequence_key",
    "merge_trees",
    "serialize_tree",
    "str_keypath",
    "to_flat_dict",
    "to_shape_dtype_struct",
    "tree_difference",
    "tree_trim",
    "tuple_path_from_keypath",
)

from penstock.orbax.common.array_structs import to_shape_dtype_struct
from penstock.orbax.v0.common.tree_utils import (
    deserialize_tree,
    from_flat_dict,
    from_flattened_with_keypath,
    get_key_name,
    get_param_names,
    is_dict_key,
    is_empty_node,
    is_empty_or_leaf,
    is_flat_dict,
    is_sequence_key,
    serialize_tree,
    str_keypath,
    to_flat_dict,
    tuple_path_from_keypath,
)
from penstock.orbax.v0.trees.tree_operations import merge_trees, tree_difference, tree_trim

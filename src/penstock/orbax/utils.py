"""The module `utils` of Orbax's API: what code for it imports from there."""

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

from penstock.orbax.common.array_structs import to_shape_dtype_struct
from penstock.orbax.common.job_processes import (
    broadcast_one_to_all,
    fully_replicated_host_local_array_to_global_array,
    is_pathways_backend,
    is_primary_host,
    reached_preemption,
    sync_global_processes,
)
from penstock.orbax.v0.common.monitoring import record_saved_duration
from penstock.orbax.v0.common.tree_utils import (
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
from penstock.orbax.v0.manager.step_name_formats import get_save_directory
from penstock.orbax.v0.manager.step_paths import (
    TMP_DIR_SUFFIX,
    any_checkpoint_step,
    checkpoint_steps,
    checkpoint_steps_paths,
    is_checkpoint_finalized,
    is_gcs_path,
    is_tmp_checkpoint,
    step_from_checkpoint_name,
    tmp_checkpoints,
)
from penstock.orbax.v0.trees.leaf_placeholders import (
    all_leaves_are_placeholders,
    is_scalar,
    leaf_is_placeholder,
    leaf_placeholder,
    name_from_leaf_placeholder,
    pytree_structure,
)
from penstock.orbax.v0.trees.restore_args import construct_restore_args

sync_global_devices = sync_global_processes

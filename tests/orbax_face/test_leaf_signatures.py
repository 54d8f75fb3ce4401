"""Every public name of the leaf level has Orbax's signature, or is in the table of differences."""

from __future__ import annotations

import dataclasses
import inspect
from importlib import import_module
from typing import Any

import orbax.checkpoint as ocp
import pytest
from tests.orbax_face.differences import PAGE, differences, render
from tests.orbax_face.signatures import differences_with_methods, methods_of

NAMES = {
    "type_handlers": (
        *("SaveArgs", "RestoreArgs", "ArrayRestoreArgs", "SingleReplicaArrayRestoreArgs", "ParamInfo"),
        *("NumpyHandler", "ScalarHandler", "ArrayHandler", "SingleReplicaArrayHandler", "StringHandler"),
        *("TypeHandler", "TypeHandlerRegistry", "create_type_handler_registry", "register_type_handler"),
        *("get_type_handler", "has_type_handler", "register_standard_handlers_with_options"),
        *("supported_types", "is_ocdbt_checkpoint", "merge_ocdbt_per_process_files"),
        *("get_json_tspec_write", "get_json_tspec_read", "get_ts_context", "get_cast_tspec_serialize"),
        *("get_cast_tspec_deserialize", "check_input_arguments", "is_supported_type"),
        "is_supported_empty_value",
    ),
    "metadata": (
        *("Metadata", "ArrayMetadata", "ScalarMetadata", "StringMetadata", "StorageMetadata"),
        *("ShardingMetadata", "NamedShardingMetadata", "SingleDeviceShardingMetadata"),
    ),
    "transform_utils": (
        *("Transform", "RestoreTransform", "apply_transformations", "merge_trees", "intersect_trees"),
    ),
    "checkpoint_utils": ("construct_restore_args",),
    "tree": (
        *("str_keypath", "get_param_names", "serialize_tree", "deserialize_tree", "to_flat_dict"),
        *("from_flat_dict", "is_flat_dict", "to_shape_dtype_struct"),
        "merge_trees",
    ),
    "utils": (
        *("sync_global_processes", "sync_global_devices", "broadcast_one_to_all", "reached_preemption"),
        *("is_primary_host", "is_gcs_path", "checkpoint_steps", "any_checkpoint_step"),
        *("is_checkpoint_finalized", "is_tmp_checkpoint", "tmp_checkpoints", "step_from_checkpoint_name"),
        *("checkpoint_steps_paths", "deserialize_tree", "from_flat_dict", "from_flattened_with_keypath"),
        *("serialize_tree", "to_flat_dict", "is_sequence_key", "is_dict_key", "tuple_path_from_keypath"),
        *("get_key_name", "is_empty_node", "is_empty_or_leaf", "to_shape_dtype_struct"),
        *("leaf_is_placeholder", "leaf_placeholder", "name_from_leaf_placeholder"),
        *("all_leaves_are_placeholders", "pytree_structure", "is_scalar"),
        *("fully_replicated_host_local_array_to_global_array", "get_save_directory", "is_pathways_backend"),
        "record_saved_duration",
    ),
    "arrays": ("to_shape_dtype_struct",),
    "logging": ("AbstractLogger", "CompositeLogger", "StandardLogger"),
    "multihost": (
        *("broadcast_one_to_all", "is_primary_host", "process_index", "reached_preemption"),
        *("sync_global_processes", "initialize_runtime_to_distributed_ids", "get_barrier_sync_fn"),
        "is_runtime_to_distributed_ids_initialized",
    ),
    "test_utils": (
        *("setup_pytree", "assert_tree_equal", "assert_array_equal", "create_sharded_array"),
        *("apply_function", "print_directory", "erase_and_create_empty", "create_tmp_directory"),
        "ocdbt_checkpoint_context",
    ),
}
ALL = [(module, name) for module, names in NAMES.items() for name in names]

# Beyond the constructor: methods whose signatures are compared, too.
METHODS = (
    "log_entry",
    *("serialize", "deserialize", "metadata", "finalize", "typestr", "replace", "await_path_creation"),
    *("add", "get", "has", "from_jax_sharding", "to_jax_sharding", "from_deserialized_dict"),
    *("to_serialized_string", "from_shape_dtype_struct", "has_dispatcher"),
)


def both(module: str, name: str) -> tuple[Any, Any]:
    return getattr(import_module(f"penstock.orbax.{module}"), name), getattr(getattr(ocp, module), name)


@pytest.mark.parametrize(("module", "name"), ALL)
def test_the_signature_is_orbax_s_or_the_table_says_how_it_differs(module: str, name: str) -> None:
    ours, theirs = both(module, name)
    found = differences_with_methods(ours, theirs, METHODS)
    assert not found or f"{module}.{name}" in differences(), found


@pytest.mark.parametrize(("module", "name"), ALL)
def test_no_public_method_is_missing(module: str, name: str) -> None:
    ours, theirs = both(module, name)
    if inspect.isclass(theirs):
        assert methods_of(theirs) - methods_of(ours) <= set()


@pytest.mark.parametrize(("module", "name"), ALL)
def test_coroutine_functions_are_coroutine_functions(module: str, name: str) -> None:
    ours, theirs = both(module, name)
    assert inspect.iscoroutinefunction(ours) == inspect.iscoroutinefunction(theirs)


@pytest.mark.parametrize(
    "name", ["SaveArgs", "RestoreArgs", "ArrayRestoreArgs", "SingleReplicaArrayRestoreArgs"]
)
def test_arguments_of_leaves_have_orbax_s_fields(name: str) -> None:
    ours, theirs = both("type_handlers", name)
    assert [field.name for field in dataclasses.fields(ours)] == [f.name for f in dataclasses.fields(theirs)]
    assert dataclasses.asdict(ours()) == dataclasses.asdict(theirs())


def test_every_name_in_the_table_exists() -> None:
    for entry in differences():
        module, _, name = entry.rpartition(".")
        assert hasattr(import_module(f"penstock.orbax.{module}" if module else "penstock.orbax"), name), entry


def test_the_page_of_differences_is_what_the_table_says() -> None:
    assert PAGE.read_text() == render(), "run: python -m tests.orbax_face.differences"

"""Public names of Orbax that `penstock.orbax` does not have, and why. A test compares them with Orbax's."""

from __future__ import annotations

from typing import Final

ABSENT: Final[dict[str, tuple[tuple[str, ...], str]]] = {
    "checkpoint_manager": (
        (
            *("AbstractCheckpointer", "CheckpointHandlerRegistry"),
            *("ProtoCheckpointHandler", "deserialize_root_metadata"),
            *("determine_default_item_mode_from_args", "serialize_root_metadata"),
        ),
        "Orbax imports them there for itself; what is public of them has its place in another module.",
    ),
    "checkpoint_managers": (("AbstractCheckpointManager",), "It is in `abstract_checkpoint_manager`."),
    "checkpoint_utils": (
        ("STANDARD_ARRAY_TYPES", "get_snapshot_dir_from_step_dir"),
        "Parts of how Orbax copies a step.",
    ),
    "logging.step_statistics": (("EmergencyRestoreStepStatistics",), "For Orbax's emergency checkpoints."),
    "path": (
        ("deleter", "format_utils"),
        "How Orbax deletes and recognises directories; see `v1.is_orbax_checkpoint` for the latter.",
    ),
    "path.step": (
        (
            *("ALLOWED_STEP_NAME_PATTERN", "TMP_DIR_STEP_PATTERN", "all_temporary_paths"),
            "single_host_load_and_broadcast_name_format",
        ),
        "Parts of Orbax's own functions; `tmp_checkpoints` names what is unfinished.",
    ),
    "serialization": (
        ("async_deserialize", "async_serialize"),
        "One array through TensorStore; jax has them in `jax.experimental.array_serialization`.",
    ),
    "test_utils": (
        (
            *("ErrorCheckpointHandler", "ErrorRestoreArgs", "ErrorSaveArgs", "PyTreeCheckpointHandler"),
            *("MockDeferredWritableTemporaryPath", "TestLimitInFlightBytes", "assert_every_n_is_x_apart"),
            *("barrier_compatible_test", "concurrent_gb_test_setup", "create_single_replica_restore_args"),
            *("ensure_atomic_save", "filter_metadata_fields", "get_byte_limiter"),
            *("get_composite_save_args", "get_expected_chunk_shape", "get_fake_global_mesh_for_slices"),
            *("global_type_handler_registry_context", "is_compression_used"),
            *("save_fake_tmp_dir", "select_single_replica", "set_tensorstore_driver_for_test"),
            *("swap_slices_in_mesh", "setup_sharded_pytree", "empty_directory"),
            *("replicate_sharded_array", "assert_tree_same_structure", "is_leaf"),
        ),
        "They are for Orbax's own tests. See `penstock.testing`.",
    ),
    "testing": (("local_path",), "It is for Orbax's own tests of several processes."),
    "tree": (
        ("tree_difference", "tree_trim"),
        "No public program calls them. `merge_trees` and `transform_utils.intersect_trees` are there.",
    ),
    "transform_utils": (("RestoreArgs",), "It is in `type_handlers`."),
    "(the package)": (
        ("experimental",),
        "`install()` has it: `experimental.v1` is `penstock.orbax.v1`, and emergency managers are tiers.",
    ),
}
"""Module -> its names, and why."""

"""Parameters of Orbax that `penstock.orbax` accepts, and that do nothing here, each with the reason.

Their docstrings say "Has no effect", and the page of differences has them all; tests compare the three.
"""

from __future__ import annotations

from typing import Final

_ALONE: Final = "Every process makes the directory, and waits for no other."
_BARRIERS: Final = "There are no barriers and no signals."
_CHECKED: Final = "The destination is always checked."
_COPIED: Final = "Arrays are always copied before a save returns."
_COUNTED: Final = "Every byte is counted before a checkpoint is published."
_DIRECTORY: Final = "Making a directory is no work to speak of, and handlers that expect one find it."
_EVENTS: Final = "penstock tells what it does by events."
_HOST: Final = "jax chooses how bytes get to the host."
_LISTED: Final = "Every process lists the directory, and leaves out what is unfinished."
_ONE_DATABASE: Final = "There is one database, of which no part needs to be merged."
_READ: Final = "Every process reads what it needs."
_BUDGET: Final = "One budget of memory bounds all, `restore_concurrent_bytes` with it."

_SILENCE: Final = "`[processes] silence_s` says how long one may be silent."
_BOUNDED: Final = "`[memory]` bounds all."

WITHOUT_EFFECT: Final[dict[str, dict[str, str]]] = {
    "AsyncCheckpointer.save": {"save_context": "Nothing reads it."},
    "AsyncOptions": {"barrier_sync_fn": _BARRIERS, "create_directories_asynchronously": _DIRECTORY},
    "BasePyTreeCheckpointHandler": {
        "enable_pinned_host_transfer": _HOST,
        "enable_post_merge_validation": _COUNTED,
        "array_metadata_validator": _COUNTED,
    },
    "Checkpointer.save": {"save_context": "Nothing reads it."},
    "CheckpointManagerOptions": {
        "single_host_load_and_broadcast": _LISTED,
        "num_deletion_threads": "One thread removes what a save replaces.",
        "enable_per_process_directory_creation": _DIRECTORY,
    },
    "PyTreeCheckpointHandler": {
        "enable_pinned_host_transfer": _HOST,
        "array_metadata_validator": _COUNTED,
    },
    "SaveArgs": {"aggregate": "Nor has it in Orbax."},
    "args.JsonRestore": {"item": "JSON needs no target. Nor has it an effect in Orbax."},
    "checkpoint_utils.checkpoints_iterator": {"set_immutable": "A snapshot is of links."},
    "checkpoint_utils.wait_for_new_checkpoint": {"set_immutable": "A snapshot is of links."},
    "future.CommitFutureAwaitingContractedSignals": {
        "send_signals": _BARRIERS,
        "timeout_secs": _BARRIERS,
        "operation_id": _BARRIERS,
    },
    "logging.CloudLoggerOptions": {"checkpoint_metadata": "Nor has it in Orbax."},
    "options.FileOptions": {"skip_sync_file_validations": _CHECKED},
    "path.step.standard_name_format": {
        "single_host_load_and_broadcast": _LISTED,
        "atomicity_options": _LISTED,
        "temporary_path_cls": _LISTED,
    },
    "type_handlers.ArrayHandler": {"enable_replica_parallel_separate_folder": _ONE_DATABASE},
    "type_handlers.NumpyHandler": {"ocdbt_process_id": _ONE_DATABASE, "deepcopy_host_arrays": _COPIED},
    "type_handlers.ScalarHandler": {"ocdbt_process_id": _ONE_DATABASE},
    "type_handlers.SingleReplicaArrayHandler": {
        "broadcast_memory_limit_bytes": _BUDGET,
        "broadcast_memory_scaling_factor": _BUDGET,
    },
    "type_handlers.Store": {"primary_host": _ALONE, "write_timeout_secs": _ALONE},
    "type_handlers.SingleReplicaArrayRestoreArgs": {"single_replica_sharding": "It follows from `sharding`."},
    "utils.sync_global_devices": {"record_event_name": _EVENTS},
    "v1.handlers.PyTreeHandler": {
        "partial_save_mode": "A part is saved like any tree.",
        "array_metadata_validator": _COUNTED,
    },
    "v1.multihost.sync_global_processes": {"timeout": _BARRIERS, "record_event_name": _EVENTS},
    "v1.options.ArrayOptions.Loading": {
        "raise_array_data_missing_error": "Absent bytes are always an error.",
        "use_load_and_broadcast": _READ,
        "load_and_broadcast_options": _READ,
    },
    "v1.options.ArrayOptions.Saving": {
        "enable_pinned_host_transfer": _HOST,
        "enable_post_merge_validation": _COUNTED,
        "enable_replica_parallel_separate_folder": _ONE_DATABASE,
    },
    "v1.options.AsyncOptions": {"create_directories_asynchronously": _DIRECTORY},
    "v1.options.FileOptions": {"skip_sync_file_validations": _CHECKED},
    "v1.options.MemoryOptions": {
        "regulator_options": _BUDGET,
        "expected_surge_bytes": _BUDGET,
        "serialization_status_callback": _EVENTS,
        "deepcopy_host_arrays": _COPIED,
    },
    "v1.options.PyTreeMetadataOptions": {
        "support_rich_types": "Rich types are read, and not written: they name modules, which move."
    },
    "v1.path.step.standard_name_format": {"single_host_load_and_broadcast": _LISTED},
    "emergency.LocalCheckpointOptions": {"debug_use_full_global_mesh": "No program runs over a mesh."},
    "emergency.MultiprocessingOptions": {"coordination_timeout_secs": _SILENCE},
    "emergency.CheckpointManagerOptions": {
        "replica_axis_index": "Of arrays that have replicas, one of each shard is saved.",
        "async_options": "A tier is saved as every step is.",
        "multiprocessing_options": "All processes of the job save.",
        "single_host_load_and_broadcast": "Each process reads its shards where they are nearest.",
    },
    "emergency.CheckpointManager": {"logger": "Steps are told by penstock's log and observers."},
    "emergency.ReplicatorCheckpointManagerOptions": {
        "save_concurrent_gb": _BOUNDED,
        "restore_concurrent_gb": _BOUNDED,
    },
}
"""What has the parameter, by its name below `penstock.orbax` -> parameter -> why."""

"""Where `penstock.orbax` is not what Orbax 0.12.8 is, and why: the one table.

The signature tests fail for a name that differs and is not here. docs/reference/orbax-differences.md is
generated from it: `python -m tests.orbax_face.differences` writes the page, a test compares it.
Each part of the API has a section of its own here: name -> (what differs, why).
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from tests.orbax_face.v1.differences import DIFFERENCES as V1

Section = dict[str, tuple[str, str]]

PAGE: Final = Path(__file__).parents[2] / "docs" / "reference" / "orbax-differences.md"

LEAVES: Final[Section] = {
    "type_handlers.SaveArgs": (
        "`aggregate=True` is logged each time.",
        "It has no effect, as in Orbax, which says so once in twelve hours.",
    ),
    "type_handlers.ParamInfo": (
        "Without `ts_context` nothing is logged: the leaves of one call share a context.",
        "Orbax warns that each leaf opens caches of its own.",
    ),
    "type_handlers.TypeHandler": (
        (
            "It has `memory_size(values)`, the bytes of host memory that writing and reading each takes, and "
            "`stage_worker()`, which makes a worker of penstock's pipelines of it."
        ),
        "Whatever holds host memory holds it under the one budget. Both have defaults.",
    ),
    "type_handlers.NumpyHandler": (
        (
            "Two leaves of one call with the same name are an error. In a tree, `deepcopy_host_arrays` and "
            "`ocdbt_process_id` are without effect; the latter in `ScalarHandler`, too."
        ),
        (
            "Orbax writes both to one place and keeps one of them. Arrays are always copied before a save "
            "returns, and one process has one database."
        ),
    ),
    "type_handlers.StringHandler": (
        "A string whose name leads through another string (`a` and `a/b`) is an error when it is saved.",
        "In the document a slash nests; Orbax fails in the background or loses one of them.",
    ),
    "type_handlers.ArrayHandler": (
        (
            "A `dispatcher` is refused. With `enable_replica_parallel_separate_folder` there is one database "
            "all the same, unless the handler is called directly. A `replica_id` that no shard has is a "
            "ValueError, without OCDBT too. With a `primary_host` that is not there arrays are saved."
        ),
        (
            "Every process saves its own shards, and there is nobody to dispatch to. What is in the database "
            "of a tree need not be merged into it. Without OCDBT, Orbax writes nothing, in silence; with no "
            "primary process, what nobody can read."
        ),
    ),
    "type_handlers.SingleReplicaArrayHandler": (
        (
            "It restores typed PRNG keys as keys, if an `array_metadata_store` says which are. "
            "`broadcast_memory_limit_bytes` and `broadcast_memory_scaling_factor` have no effect, and "
            "`single_replica_sharding` follows from the sharding. In a job of several processes it sends "
            "nothing if it is called directly: a checkpointer of one tree does, whose registry has it."
        ),
        (
            "Orbax gives back their data. The limit is that of the checkpointer, `restore_concurrent_bytes`. "
            "What is sent has an order, which all leaves of a tree share."
        ),
    ),
    "type_handlers.create_type_handler_registry": (
        "`add` with `override=True` for a type that is derived from a registered one puts it first.",
        "Orbax lets it take the place of the other, whose type then has no handler at all.",
    ),
    "type_handlers.register_standard_handlers_with_options": (
        "`use_ocdbt` and `ts_context` may be left out.",
        "Orbax deletes them from what it is given, and raises a KeyError if they are not there.",
    ),
    "type_handlers.merge_ocdbt_per_process_files": (
        "Zarr version 3 is validated, too. `store_ocdbt_metadata_and_values_separately` is refused.",
        (
            "A chunk without its array, or the reverse, is a checkpoint that cannot be read. Nothing public "
            "in Orbax asks for separate files."
        ),
    ),
    "type_handlers.get_json_tspec_write": (
        "A `chunk_byte_size` below one element, or `shard_axes` beyond the rank, is a ValueError.",
        "Orbax writes larger chunks than asked for, or fails with an IndexError.",
    ),
    "type_handlers.is_supported_type": (
        "`pytree_metadata_options` is None by default.",
        "That means the same as Orbax's default object, which can be changed for everybody.",
    ),
    "type_handlers.is_supported_empty_value": (
        "`pytree_metadata_options` is None by default.",
        "That means the same as Orbax's default object, which can be changed for everybody.",
    ),
    "tree.tree_trim": (
        "With `strict=False`, too, a sequence does not stand for a class with named fields.",
        "Orbax takes all its fields for missing, in silence.",
    ),
    "utils.to_flat_dict": (
        "Two leaves that have one key (`{1: a, '1': b}`) are a ValueError.",
        "Orbax drops one of them in silence.",
    ),
    "utils.from_flattened_with_keypath": (
        "A missing index, or a container with keys of both kinds, is a ValueError.",
        "Orbax asserts it, and not when Python is told to optimise.",
    ),
    "transform_utils.Transform": (
        "`original_key` may be a tuple.",
        "Orbax's annotation allows it, and its code fails on it.",
    ),
    "utils.is_tmp_checkpoint": (
        "It takes one `path`.",
        "Orbax wraps the function so that it seems to take anything, and fails inside for anything else.",
    ),
    "utils.is_checkpoint_finalized": (
        "It takes one `path`.",
        "As for `is_tmp_checkpoint`.",
    ),
    "utils.tmp_checkpoints": (
        "It takes one `checkpoint_dir`, and returns names.",
        "Orbax returns objects that only its own code can use.",
    ),
}

HANDLERS: Final[Section] = {
    "handlers.PyTreeCheckpointHandler": (
        (
            "It takes `concurrent_gb` and `primary_host`, the names of 2024, too. `type_handler_registry`"
            " is None by default, for the registry of the process as it is at each call. With "
            "`use_compression=True` only chunks that are found to compress well are compressed. The "
            "limits in gigabytes bound what saves or restores hold in all; a request of exactly the limit"
            " is granted, and what is larger is cut into pieces. `enable_pinned_host_transfer` is without "
            "effect. `array_metadata_validator` is None by default, for nobody. With `support_rich_types` "
            "named tuples are recorded, and come back as dicts without an item."
        ),
        (
            "zstd costs Orbax most of the time of a save, for 7 % of the bytes of typical weights; Orbax "
            "refuses a request of the size of its limit. Shapes and chunks are counted when a save is "
            "committed. Orbax makes up a class for named tuples; with an item they are of their own."
        ),
    ),
    "args.PyTreeRestore": (
        (
            "With `partial_restore`, a leaf of the item that is not stored is a ValueError, unless it is "
            "`PLACEHOLDER`."
        ),
        "Orbax returns the item's own value in silence, as if it had been restored.",
    ),
    "args.PyTreeSave": (
        "Arrays without elements are saved. Two leaves that would have one stored name are an error.",
        "Orbax refuses the former, and keeps one of the latter in silence.",
    ),
    "PyTreeCheckpointHandler": (
        (
            "What is gone is a ValueError (`CorruptCheckpointError`), and a FileNotFoundError, too, where it "
            "is one in Orbax; an array never reads as zeros."
        ),
        "Orbax raises errors of four kinds, and reads zeros where it is told to.",
    ),
    "options.MultiprocessingOptions": (
        (
            "A `primary_host` that the job does not have is a ValueError of the call that saves; so is, if "
            "several processes save together, another one than the first of those that take part, and a call "
            "in a process that does not. There are no barriers: `barrier_sync_key_prefix` names saves."
        ),
        "Orbax waits ten minutes for it. The first merges and publishes what several processes save.",
    ),
    "BasePyTreeCheckpointHandler": (
        (
            "`type_handler_registry` and `array_metadata_validator` are None by default. "
            "`enable_post_merge_validation` is without effect."
        ),
        "As for `PyTreeCheckpointHandler`; every leaf is counted before a save is complete.",
    ),
    "handlers.StandardCheckpointHandler": (
        "The default of 96 for both limits means as much as the machine can spare.",
        "Few machines have 96 GB of host memory to spare.",
    ),
    "handlers.JaxRandomKeyCheckpointHandler": (
        "The implementation of a typed key is recorded and restored.",
        "Orbax wraps every key's data as jax's default kind, and fails for others.",
    ),
    "handlers.JsonCheckpointHandler": (
        (
            "What JSON does not have is a ValueError of the call that saves. So is a value, like a message "
            "of a `ProtoCheckpointHandler`, that differs between processes that save together."
        ),
        "Orbax raises a TypeError in the background. Of values that differ it keeps one, in silence.",
    ),
    "logging.StandardLogger": (
        "An entry is an event of penstock's log, `orbax.step`.",
        "Whoever reads the log finds it among the others.",
    ),
    "logging.AbstractLogger": (
        "A manager's logger is not told of the time between two saves.",
        "A `SaveReport` of penstock says where the time of a save went.",
    ),
    "options.AsyncOptions": (
        (
            "`barrier_sync_fn` is without effect; so are `save_context` of `save`, `record_event_name` of "
            "`utils`, and what a `CommitFutureAwaitingContractedSignals` is told beside its name."
        ),
        "There are no barriers and no signals, and penstock tells what it does by events.",
    ),
    "options.FileOptions": (
        "`skip_sync_file_validations` is without effect.",
        "The destination is always checked.",
    ),
    "metadata.metadata_store": (
        "A write has finished, or failed, when it returns, whatever `blocking_write` says.",
        "Orbax's other store tells of a failure when somebody waits for it, or not at all.",
    ),
    "checkpointers.AbstractCheckpointer": (
        "It is an abstract base class, without `structure`.",
        "In Orbax it is a Protocol; `structure` has been deprecated since 2023.",
    ),
    "checkpointers.Checkpointer": (
        (
            "`force` replaces what lies there in one step, when the new checkpoint is complete. A save "
            "that fails leaves nothing behind. There are no `get_temporary_path`, `create_temporary_path`"
            " and `synchronize_next_awaitable_signal_operation_id`, and a `temporary_path_class` is "
            "refused: say it with `atomicity_options`. Nothing is recorded with `jax.monitoring`."
        ),
        (
            "Orbax removes the old checkpoint first, so that a crash loses both, and leaves temporary "
            "directories. Those methods are its own steps. penstock tells what it does by events, see the"
            " reference."
        ),
    ),
    "checkpointers.AsyncCheckpointer": (
        (
            "The temporary directory is there when `save` returns, whatever "
            "`create_directories_asynchronously` says. A save that takes too long is cancelled, and what "
            "it wrote removed in the background; `close` waits for that."
        ),
        "Making a directory is no work to speak of, and handlers that expect one find it.",
    ),
}

MANAGERS: Final[Section] = {
    "checkpoint_managers.CheckpointManager": (
        (
            "`restore()` without a step restores the latest one. `save` saves nothing with "
            "`read_only`, even with `force`. jax.Arrays that are the very objects that the step "
            "before holds, and not compressed there, are linked and not written. A step that somebody"
            " reads or restores through penstock on this machine is deleted when that is over; "
            "`delete` is an OSError meanwhile. When a save fails in the background, the steps that it"
            " would have replaced are still in `all_steps`, and the failure is raised once. Metrics "
            "may be arrays of one number. `restore` waits for a save first. A `handler_registry` is "
            "copied. While it saves, a folder `.penstock-writer` lies in the directory, and a second "
            "manager that saves there is logged, and so is a root that is itself a checkpoint. An empty "
            "directory is a step, as in Orbax, and takes no place among those to keep."
        ),
        (
            "A link is as good a file as the first, whichever step is deleted. Orbax forgets steps "
            "that are still there until `reload`, deletes under readers, and raises the failure once "
            "in each thread."
        ),
    ),
    "checkpoint_managers.CheckpointManagerOptions": (
        (
            "With `best_fn`, a metric that is not finite is worse than every finite one. `todelete_full_path`"
            " and `temporary_path_class` are refused; `num_deletion_threads` and "
            "`single_host_load_and_broadcast` are without effect. `cleanup_tmp_directories` leaves what "
            "another process is still writing. A step that is moved to `todelete_subdir` replaces an earlier "
            "one there."
        ),
        (
            "Comparing with NaN is always false, so that Orbax keeps whatever its sort leaves at the end. "
            "There are no object stores, and each process reads for itself; what cannot be done is not "
            "accepted in silence."
        ),
    ),
    "checkpoint_utils.wait_for_new_checkpoint": (
        (
            "A snapshot has links to the files of the step, not copies, and no penstock on this "
            "machine deletes the step itself meanwhile. `set_immutable` is without effect. So, too, "
            "`checkpoints_iterator`."
        ),
        "A copy takes as long as a restore.",
    ),
    "checkpoint_managers.BestN": (
        "A metric that is not finite is worse than every finite one.",
        "As for `CheckpointManagerOptions`.",
    ),
    "path.step": (
        "`standard_name_format`: `single_host_load_and_broadcast`, `atomicity_options` are without effect.",
        "Every process lists the directory, and leaves out what is unfinished.",
    ),
}

# Module -> its names that are not here, and why. A test compares it with what Orbax shows.
ABSENT: Final[dict[str, tuple[tuple[str, ...], str]]] = {
    "checkpoint_manager": (
        (
            *("AbstractCheckpointer", "CheckpointArgs", "CheckpointHandler", "CheckpointHandlerRegistry"),
            *("CheckpointInfo", "CompositeCheckpointHandler", "JsonCheckpointHandler", "METADATA_ITEM_NAME"),
            *("ProtoCheckpointHandler", "deserialize_root_metadata", "is_async_checkpointer"),
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
    "multihost": (
        ("BarrierSyncFn", "get_barrier_sync_fn"),
        "penstock has no barriers: one verdict ends what several processes do.",
    ),
    "path": (
        ("atomicity", "atomicity_defaults", "atomicity_types", "deleter", "format_utils"),
        "How Orbax builds, deletes and recognises directories; see `v1.is_orbax_checkpoint` for the last.",
    ),
    "path.step": (
        (
            *("ALLOWED_STEP_NAME_PATTERN", "MetadataT", "TMP_DIR_STEP_PATTERN", "all_temporary_paths"),
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
            *("create_tmp_directory", "ensure_atomic_save", "filter_metadata_fields", "get_byte_limiter"),
            *("get_composite_save_args", "get_expected_chunk_shape", "get_fake_global_mesh_for_slices"),
            *("global_type_handler_registry_context", "is_compression_used", "ocdbt_checkpoint_context"),
            *("save_fake_tmp_dir", "select_single_replica", "set_tensorstore_driver_for_test"),
            *("swap_slices_in_mesh", "sync_global_processes"),
        ),
        "They are for Orbax's own tests. See `penstock.testing`.",
    ),
    "testing": (("local_path",), "It is for Orbax's own tests of several processes."),
    "transform_utils": (("RestoreArgs",), "It is in `type_handlers`."),
    "(the package)": (
        ("experimental",),
        "`experimental.v1` is `penstock.orbax.v1`; emergency checkpoints and the tiering service are others.",
    ),
}

SECTIONS: Final[dict[str, Section]] = {
    "Leaves and their handlers": LEAVES,
    "Handlers of whole objects, and checkpointers": HANDLERS,
    "The manager of steps": MANAGERS,
}


SHORTLY: Final = (
    "What is there stays until the new checkpoint is complete, and a save that fails leaves nothing behind.",
    "What Orbax drops, skips or makes up in silence is an error, as two leaves of one name.",
    "One process writes one database, without `ocdbt.process_0`; what compresses badly is not compressed.",
    "A failure in the background is raised once, to whoever asks first.",
    "Limits of memory are one budget, and what is larger than a limit is cut into pieces.",
    "What Orbax reports by `jax.monitoring` and its log, penstock reports by events.",
)
"""What a program is likeliest to meet."""


def differences() -> Section:
    """All of them."""
    return {name: entry for section in SECTIONS.values() for name, entry in section.items()}


def render() -> str:
    """The page of the documentation."""
    lines = [
        "# Where penstock.orbax is not what Orbax is",
        "",
        "Names, signatures, defaults and behaviour are those of Orbax 0.12.8, but for what is listed here.",
        "The page is generated from `tests/orbax_face/differences.py`; the tests that compare signatures",
        "fail for whatever differs and is not in it. In short:",
        "",
        *(f"* {line}" for line in SHORTLY),
        "",
        "The rest is to look things up in.",
    ]
    for title, section in {**SECTIONS, "The newer API, `penstock.orbax.v1`": V1}.items():
        lines += ["", f"## {title}", "", "| name | difference | reason |", "| --- | --- | --- |"]
        lines += [f"| `{name}` | {what} | {why} |" for name, (what, why) in sorted(section.items())]

    lines += ["", "## Names that are not there", "", "| module | names | reason |", "| --- | --- | --- |"]
    for module, (names, why) in sorted(ABSENT.items()):
        lines.append(f"| `{module}` | {', '.join(f'`{name}`' for name in sorted(names))} | {why} |")

    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(render())

"""Why a test of Orbax that fails on penstock says nothing about penstock, or what it says.

A failure is out of scope if a rule knows its error, or if the test is named here. Any other counts.
"""

from __future__ import annotations

__all__ = ("SAYS_NOTHING", "WORDS", "reason_of")

import re
from typing import Final

PRIVATE: Final = "looks at, calls or patches private parts of Orbax"
MIXED: Final = "gives a private function of Orbax one of our objects, or compares ours with one that it made"
WORDS: Final = "the error is of the right kind, and its words are ours"
MONITORING: Final = "expects Orbax's own records in jax.monitoring or its log"
PROCESSES: Final = "needs two processes; see tests/processes"
PATHWAYS: Final = "is for Pathways, or for Google's storage"
BUSY: Final = "fails on a busy machine, with Orbax, too"
SAYS_NOTHING: Final = (PRIVATE, MIXED, PROCESSES, PATHWAYS, BUSY)
"""Reasons with which a failure shows nothing of penstock. The others are differences."""

_RULES: Final = (
    (r"has no attribute '_\w|does not have the attribute '_|no attribute '_", PRIVATE),
    (r"AlreadyExistsError: Handler type <class 'substituted", PRIVATE),  # setUp empties a private registry
    (r"Unsupported checkpoint layout: CheckpointLayout", MIXED),
    (r"HandlerFailedError: .*orbax\.checkpoint\._src", MIXED),
    (r'Resource not defined: "cache_pool', MIXED),  # Orbax's leaf handlers with options of ours
    (r"is not an instance of <class '(orbax|penstock)", MIXED),
    (r"must be any one of types .*got <class 'penstock", MIXED),
    (r"Unsupported type: <class 'penstock", MIXED),
    (r"<class 'penstock[^>]*> != <class 'orbax|<class 'orbax[^>]*> != <class 'penstock", MIXED),
    (r"^orbax\.checkpoint\.([\w.]+\.)?_src\.[\w.]*(Error|Exception)", MIXED),
    # `assertRaisesRegex` says so only of an error of the type that it was given; any other it lets pass.
    (r'^AssertionError: ".*" does not match', WORDS),
    (r"record_scalar|record_event|no logs of level", MONITORING),
    (r"^AssertionError: 1 != [24] \[|^AssertionError: 1 not greater than 1", PROCESSES),
    (r"module 'orbax\.checkpoint\._src\.[\w.]*' has no attribute", PRIVATE),
    # `assert jax.process_count() == 2`, in setUp
    (r"^AssertionError \[\w+_test\.py:\d+ < (async_)?case\.py", PROCESSES),
    (r"[Pp]athways|gs://|GCS", PATHWAYS),
    # Orbax's private functions make one, and build with it; ours says where a checkpoint is built.
    (r"TemporaryPath\(\) takes no arguments", MIXED),
    (
        r"type object '(AtomicRename|CommitFile)TemporaryPath' has no attribute",
        "a class of temporary paths stands for a way to publish, and has no steps",
    ),
)

_THERE: Final = "the directory is there when `save` returns, and its documents are written in the background"
_SMALL: Final = "what is small is not compressed, and chunks of zarr 3 have no chunks inside"
_ONE_DATABASE: Final = "one process has one database, and no part of it to be merged"
_UNDESCRIBED: Final = "a directory in which nothing is described is no checkpoint"
_PARTIAL: Final = "`partial.finalize` writes one checkpoint anew, and takes no files of others along"

# Orbax's own leaf handlers do not look at options of ours: they write in their default form.
_UNREAD: Final = ('Resource not defined: "cache_pool|NOT_FOUND: Error opening|True != False', MIXED)

# File -> test (as a regular expression) -> what the differences page says of it, in short; perhaps after what
# is said of the failure (likewise), where others of the same test count.
_NAMED: Final[dict[str, dict[str, str | tuple[str, str]]]] = {
    "_src.handlers.composite_checkpoint_handler_test": {r"test_items_exist_temp": PRIVATE},
    "checkpoint_manager_test": {
        r"test_async_error_.*": "a failure in the background is raised once, and leaves no directory",
        r"test_save_preempted_.*": "a save that fails leaves no directory",
        r"test_lightweight_intialize_.*": "a time that is not known has a zone, as any other",
        r"test_metadata_(save|finalize)_preemption_.*": "a save that fails leaves no directory",
        r"test_single_host_load_and_broadcast": "`single_host_load_and_broadcast` is without effect",
        r"test_save_and_restore_(composite|standard)_logger": "entries are events of penstock's log",
        r"test_save_step_metadata": MIXED,
        r"test_save_gcs_with_unfinalized_checkpoints": ("False is not true", PATHWAYS),  # patches a function
    },
    "_src.checkpointers.async_checkpointer_test": {
        r"test_(async_save_with_async_directory_creation|async_step_metadata_save)": _THERE,
        r"test_(memory_limiting\d|primary_host_background_error\d|save_preempted.*)": PRIVATE,
        r"test_(interleave)": PROCESSES,
        r"test_save_step_metadata": MIXED,
        r"test_save_with_failing_array_metadata_store_in_finalize": "no validator of records is asked",
    },
    "_src.checkpointers.checkpointer_test": {
        r"test_(memory_limiting\d|save_preempted.*)": PRIVATE,
        r"test_save_step_metadata": MIXED,
        r"test_save_with_failing_array_metadata_store_in_finalize": "no validator of records is asked",
    },
    "_src.handlers.pytree_checkpoint_handler_test": {
        r"test_(concurrent_gb_(save|restore)|enable_pinned_host_transfer|partial_restore)\d": PRIVATE,
        r"test_array_handler_replica_separate_folder\d": "there is one database",
        r"test_save_with_missing_array_metadata_.*": "no validator of records is asked",
        r"test_(sharding_variable_devices|array_metadata\d)": PROCESSES,
        r"test_save_mixed\d": (r"Missing elements .*'ocdbt\.process_\d'", _ONE_DATABASE),
        r"test_finalize": ("False is not true", _ONE_DATABASE),
        r"test_ocdbt_target_data_file_size\d+": (r"not less than or equal to 4096\.0", PRIVATE),
        r"test_zero_size_array\d": "arrays without elements are saved",
        r"test_reshard\d+": MIXED,
    },
    "experimental.v1._src.handlers.pytree_handler_test": {
        r"test_compression\d": _SMALL,
        r"test_save_with_missing_array_metadata_.*": "no validator of records is asked",
        r"test_save_mixed\d": (r"Missing elements .*'ocdbt\.process_\d'", _ONE_DATABASE),
        r"test_finalize": ("False is not true", _ONE_DATABASE),
        r"test_ocdbt_target_data_file_size\d+": (r"not less than or equal to 4096\.0", PRIVATE),
        r"test_(concurrent_gb_(save|restore)\d|enable_pinned_host_transfer\d|save_async)": PRIVATE,
        r"test_sharding_variable_devices": PROCESSES,
    },
    "experimental.v1._src.testing.save_load_test": {
        r"test_overwrites": ("False != True", MONITORING),
        r"test_async_directory_creation": _THERE,
        r"test_(primary_host_background_error\d|save_async)": PRIVATE,
        r"test_.*increments_operation_id.*": PRIVATE,
        r"test_load_and_broadcast": "every process reads what it needs",
    },
    "_src.handlers.pytree_metadata_test": {r"test_as_custom_metadata\d": MIXED},
    "_src.serialization.type_handlers_test": {
        r"test_callback_traversal_with_dispatcher\d": "a `dispatcher` is refused",
        r"test_callback_traversal\d": "a `callback` is refused",
        r"test_callback_traversal_without_dispatcher\d": PRIVATE,
    },
    "_src.logging.standard_logger_test": {r"test_log_entry": "entries are events of penstock's log"},
    "_src.metadata.array_metadata_store_test": {r"test_resolve_array_metadata_store_.*": MIXED},
    "_src.metadata.sharding_test": {
        r"test_convert_between_jax_named_.*": "expects one device; there are eight"
    },
    "_src.futures.signaling_client_test": {r"test_mark_pathways_colocated_.*": PATHWAYS},
    "_src.path.deleter_test": {r"test_.*": PRIVATE},
    "checkpoint_utils_test": {r"test_checkpoints_iterator\d": "`tmp_checkpoints` returns names"},
    "_src.path.step_test": {
        r"test_find_(all|step)_.*": ("ValueError not raised|has length of", PATHWAYS),  # their last part
        r"test_single_host_load_and_broadcast_name_format_.*": PRIVATE,
    },
    "_src.metadata.checkpoint_test": {
        r"test_pickle\d": "a store that writes can be pickled, too",
        r"test_write_unknown_file_path\d": "a write has failed when it returns",
    },
    "experimental.v1._src.testing.compatibility.metadata_compatibility_test": {
        r"test_metadata_critical_corruptions\d": "a description that is gone or damaged is an error",
    },
    "experimental.v1._src.handlers.registration_test": {r"test_global_registry": MIXED},
    "experimental.v1._src.layout.orbax_layout_test": {r"test_v1_validate_checkpointables_.*": MIXED},
    "experimental.v1._src.loading.layout_loading_test": {r"test_load_async\d": "`load_async` works"},
    "_src.serialization.serialization_test": {
        r"test_memory_consumption": ("not less than 10000000", BUSY),
    },
    "experimental.v1.deprecations_test": {r"test_deprecated_alias_.*": ("unexpected keyword", PRIVATE)},
    "experimental.v1._src.testing.compatibility.load_checkpointables_compatibility_test": {
        r"test_load_checkpointables_compatibility\d+": ("Could not recognize the checkpoint", _UNDESCRIBED),
    },
    "experimental.v1._src.testing.compatibility.checkpointables_metadata_compatibility_test": {
        r"test_checkpointables_metadata_compatibility\d+": (
            "Could not recognize the checkpoint",
            _UNDESCRIBED,
        ),
    },
    "experimental.v1._src.layout.orbax_layout_multiprocess_test": {r"test_partial_save_.*": MIXED},
    "_src.metadata.tree_test": {r"test_\w+": (r"(?i)trees (\(arrays\) )?0 and 1", MIXED)},
    "_src.multihost.dispatchers_test": {r"test_.*": MIXED},
    "experimental.v1._src.serialization.numpy_leaf_handler_test": {r"test_simple_checkpoint\d+": _UNREAD},
    "experimental.v1._src.context.context_test": {
        r"test_(collect_ids_with_collections|context_var_reset_.*|frozen_ids_.*)": PRIVATE,
    },
    "experimental.v1._src.partial.saving_test": {r"test_finalize_(file_collision|rename_os_error)": _PARTIAL},
    "experimental.v1._src.partial.saving_multihost_test": {
        r"test_finalize_(file_collision|rename_os_error)": _PARTIAL,
    },
    "experimental.v1._src.serialization.array_leaf_handler_test": {r"test_simple_checkpoint\d+": _UNREAD},
    "experimental.v1._src.serialization.scalar_leaf_handler_test": {r"test_simple_checkpoint\d+": _UNREAD},
    "experimental.v1._src.serialization.options_resolution_test": {r"test_resolve_.*": MIXED},
    "experimental.v1._src.context.options_test": {
        r"test_v0_conversion_.*": "options have no method `v0`",
        r"test_memory_options_propagation": PRIVATE,
    },
    "experimental.v1._src.layout.safetensors_layout_test": {r"test_.*read_chunk_bytes.*": MIXED},
}


def reason_of(file: str, test: str, why: str) -> str | None:
    """Return why a failure does not count; None if it does.

    Args:
        file: Of the tests, as its results are called.
        test: Class and method.
        why: What was said of the failure.
    """
    method = test.rpartition(".")[2]
    for pattern, known in _NAMED.get(file, {}).items():
        said, reason = ("", known) if isinstance(known, str) else known
        if re.fullmatch(pattern, method) and re.search(said, why):
            return reason

    return next((reason for pattern, reason in _RULES if re.search(pattern, why)), None)

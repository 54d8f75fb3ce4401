"""Overrides of what Orbax's classes call and ours do not: a program that relies on one hears of it."""

from __future__ import annotations

__all__ = ("NEVER_CALLED", "WarnsOfOverrides")

import warnings
from abc import ABCMeta
from collections.abc import Mapping
from typing import Any, Final

_OURS: Final = __name__.rpartition(".")[0]

NEVER_CALLED: Final[Mapping[str, tuple[str, ...]]] = {
    "CheckpointManager": (
        *("_add_checkpoint_info", "_configure_checkpointer_common", "_finalize", "_get_metrics"),
        *("_configure_checkpointer_from_handler_registry", "_configure_checkpointer_legacy_init"),
        *("_configure_checkpointer_from_item_names_and_handlers", "_get_read_step_directory"),
        *("_get_root_metadata", "_get_save_directory", "_get_step_metadata", "_get_write_step_directory"),
        *("_is_continuous_checkpointing_enabled", "_maybe_await_cleanup_tmp_directory"),
        *("_maybe_get_default_item", "_maybe_save_root_metadata", "_metrics_handler"),
        *("_root_metadata_file_path", "_sort_checkpoints_by_metrics", "_validate_args"),
        *("_wait_for_checkpointers",),
    ),
    "Checkpointer": (
        *("_restore", "_save_step_metadata", "create_temporary_path", "get_temporary_path"),
        *("synchronize_next_awaitable_signal_operation_id",),
    ),
    "AsyncCheckpointer": ("_make_on_commit_callback", "_prepare_destination_async", "_save"),
    "PyTreeCheckpointHandler": ("_get_internal_metadata", "_maybe_deserialize", "_read_aggregate_file"),
    "BasePyTreeCheckpointHandler": (
        *("_async_partial_save", "_finalize_async", "_get_param_infos", "_get_param_infos_with_write_shape"),
        *("_maybe_deserialize", "_partial_restore_with_omission", "_partial_restore_with_placeholders"),
        *("_read_metadata_file", "_write_metadata_after_commits", "_write_metadata_file", "get_param_names"),
    ),
    "ArrayCheckpointHandler": ("_is_supported_type",),
    "CompositeCheckpointHandler": (
        *("_get_all_registered_and_unregistered_items_and_handlers", "_get_item_handlers"),
        *("_get_item_metadata", "_get_item_temporary_directory", "_get_metadata_base", "_items_exist"),
    ),
}
"""By class: names that methods of Orbax's class ask `self` for, and those of ours do not."""


class WarnsOfOverrides:
    """Base of classes that have hooks in Orbax: overriding one that nothing calls is a UserWarning."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        ours = [base.__name__ for base in cls.__mro__ if base.__module__.startswith(_OURS)]
        names = sorted({name for one in ours for name in NEVER_CALLED.get(one, ())} & vars(cls).keys())
        if names and not cls.__module__.startswith(_OURS):
            warnings.warn(
                f"{cls.__qualname__} overrides {', '.join(names)}, which Orbax calls and penstock never does",
                stacklevel=2 + isinstance(cls, ABCMeta),  # which makes classes in Python
            )

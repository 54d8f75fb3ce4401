"""How the directories of steps are named, and found, under Orbax's names."""

from __future__ import annotations

__all__ = (
    "TMP_DIR_SUFFIX",
    "Metadata",
    "NameFormat",
    "any_checkpoint_step",
    "as_name_format",
    "build_step_metadatas",
    "build_step_path",
    "checkpoint_steps",
    "checkpoint_steps_paths",
    "composite_name_format",
    "find_step_path",
    "get_save_directory",
    "is_checkpoint_finalized",
    "is_path_finalized",
    "is_path_temporary",
    "is_standard_name_format",
    "is_tmp_checkpoint",
    "latest_step_metadata",
    "maybe_find_step_metadata",
    "standard_name_format",
    "step_from_checkpoint_name",
    "step_metadata_of_checkpoint_path",
    "step_prefix_with_underscore",
    "tmp_checkpoints",
)

from penstock.orbax.v0.manager.step_lookup import (
    build_step_metadatas,
    build_step_path,
    find_step_path,
    is_standard_name_format,
    latest_step_metadata,
    maybe_find_step_metadata,
    step_metadata_of_checkpoint_path,
    step_prefix_with_underscore,
)
from penstock.orbax.v0.manager.step_name_formats import (
    Metadata,
    NameFormat,
    as_name_format,
    composite_name_format,
    get_save_directory,
    standard_name_format,
)
from penstock.orbax.v0.manager.step_paths import (
    TMP_DIR_SUFFIX,
    any_checkpoint_step,
    checkpoint_steps,
    checkpoint_steps_paths,
    is_checkpoint_finalized,
    is_tmp_checkpoint,
    step_from_checkpoint_name,
    tmp_checkpoints,
)

is_path_finalized = is_checkpoint_finalized
is_path_temporary = is_tmp_checkpoint

"""Which handlers save to buckets and restore from them, and what is known of a checkpoint there."""

from __future__ import annotations

__all__ = ("check_handler", "check_options", "metadata_in_bucket")

from collections.abc import Callable
from typing import Any, Protocol, cast

import jax

from penstock.checkpointer.description import CheckpointMetadata
from penstock.kernel.errors import ConfigError, PathError
from penstock.orbax.common.handler_paths import path_as_given
from penstock.orbax.v0.common.joint_directory import active_processes, check_processes, is_joint
from penstock.orbax.v0.common.step_metadata import StepMetadata
from penstock.orbax.v0.common.v0_options import FileOptions, MultiprocessingOptions
from penstock.orbax.v0.handlers.checkpoint_handler import saves_together
from penstock.orbax.v0.handlers.composite_handler import CompositeCheckpointHandler

_jax: Any = jax


class _Trees(Protocol):
    about: Callable[[Any], CheckpointMetadata]


def check_handler(handler: object, url: str) -> None:
    """Refuse a handler that needs a directory of the operating system. Items are looked at one by one, later.

    Raises:
        PathError: If it does. It is a ValueError.
    """
    if not (saves_together(handler) or isinstance(handler, CompositeCheckpointHandler)):
        name = type(handler).__name__
        raise PathError(
            url,
            f"is in a bucket, and a {name} reads and writes files by itself. The handlers of trees "
            "(StandardCheckpointHandler, PyTreeCheckpointHandler) save there, and several trees and JSON "
            "(CompositeCheckpointHandler)",
        )


def check_options(processes: MultiprocessingOptions, files: FileOptions, url: str) -> None:
    """Refuse what a save to a bucket cannot do.

    Raises:
        ConfigError: If directories are to have permissions, or some of a job's processes are to save
            together. It is a ValueError.
    """
    check_processes(processes)
    active = active_processes(processes)
    if is_joint(processes) and len(active) < int(_jax.process_count()):
        some = f"are {list(active)}, and {url} is in a bucket"
        raise ConfigError("active_processes", f"{some}, where all processes of a job save together, or one")
    if files.path_permission_mode is not None:
        raise ConfigError("file_options", "a bucket has no directories, and so no permissions of them")


def metadata_in_bucket(handler: Any, url: str) -> StepMetadata:
    """Return what a checkpoint in a bucket records of itself, and what its handler knows of the tree.

    Raises:
        FileNotFoundError: If there is none.
        ValueError: If it is damaged.
    """
    if isinstance(handler, CompositeCheckpointHandler):
        return handler.metadata(path_as_given(url))

    about = cast("_Trees", handler).about(url)
    return StepMetadata(
        item_handlers=handler.typestr(),
        item_metadata=handler.metadata(path_as_given(url)),
        custom_metadata=dict(about.custom_metadata or {}),
        init_timestamp_nsecs=about.started_at_ns,
        commit_timestamp_nsecs=about.committed_at_ns,
    )

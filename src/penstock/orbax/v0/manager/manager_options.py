"""Options of a `CheckpointManager`, under Orbax's names."""

from __future__ import annotations

__all__ = ("CheckpointManagerOptions", "policies_of")

import datetime
from collections.abc import Callable, Container
from dataclasses import dataclass, field
from typing import Any

from penstock.kernel.errors import ConfigError
from penstock.orbax.v0.common.v0_options import (
    AsyncOptions,
    AtomicityOptions,
    FileOptions,
    MultiprocessingOptions,
)
from penstock.orbax.v0.manager.own_policies import as_decision_policy, as_preservation_policy
from penstock.orbax.v0.manager.preservation_policy import (
    AnyPreservationPolicy,
    BestN,
    EveryNSeconds,
    EveryNSteps,
    LatestN,
    PreservationPolicy,
)
from penstock.orbax.v0.manager.save_decision_policy import SaveDecisionPolicy, default_policy
from penstock.steps.keep_policies import KeepPolicy
from penstock.steps.save_policies import SavePolicy

_WRITING = {
    "save_interval_steps": 0,
    "max_to_keep": None,
    "keep_time_interval": None,
    "keep_period": None,
    "create": False,
    "cleanup_tmp_directories": False,
    "save_on_steps": None,
    "todelete_subdir": None,
    "todelete_full_path": None,
    "should_save_fn": None,
}
"""What options are with `read_only`."""


@dataclass
class CheckpointManagerOptions:
    """When a manager saves, what it keeps, and how.

    Attributes:
        save_interval_steps: Steps that are a multiple of it are saved, and the first one.
        max_to_keep: How many stay: the latest, or with `best_fn` the best. None for all.
        keep_time_interval: Beside them, a step stays after each such time.
        keep_period: Beside them, steps that are a multiple of it stay.
        best_fn: Makes a number of a step's metrics.
        best_mode: Whether the greatest or the least is best: `max` or `min`.
        keep_checkpoints_without_metrics: Whether steps without metrics stay beside the best.
        step_prefix: What stands before the number of a step, and an underscore.
        step_format_fixed_length: To how many digits it is filled up with zeros.
        step_name_format: How steps are named instead; see `penstock.orbax.step`.
        create: Whether the directory is made if it is not there.
        cleanup_tmp_directories: Whether what crashed saves left is removed.
        save_on_steps: Steps that are saved, too.
        single_host_load_and_broadcast: Without effect: there is one process.
        todelete_subdir: A folder that steps are moved to instead of being removed.
        todelete_full_path: Not supported: for object stores.
        enable_background_delete: Whether a save does not wait for steps being removed.
        num_deletion_threads: Without effect.
        read_only: Whether nothing is saved or deleted.
        enable_async_checkpointing: Whether `save` returns when the objects are copied.
        async_options: How saves go on in the background.
        multiprocessing_options: Which processes save.
        should_save_fn: Says of a step and the latest one if it is saved, instead of the other options.
        file_options: What directories are like.
        atomicity_options: How a step becomes visible.
        save_root_metadata: Whether the manager's `metadata` is kept.
        temporary_path_class: Not supported; see `atomicity_options`.
        save_decision_policy: Says which steps are saved, instead of the other options; also one of
            penstock's own, as `penstock.steps.EverySteps`.
        preservation_policy: Says which steps stay, instead of the other options; also one of penstock's
            own, as `penstock.steps.KeepLast`.
        prevent_write_metrics: Whether metrics are looked at but not written.
        enable_should_save_is_saving_in_progress_check: If off, policies are told that no save goes on.
        enable_per_process_directory_creation: Without effect; needs a `primary_host` of None.
        lightweight_initialize: Whether time and metrics of steps that are there are not read.

    Raises:
        ValueError: If options contradict each other.
    """

    save_interval_steps: int = 1
    max_to_keep: int | None = None
    keep_time_interval: datetime.timedelta | None = None
    keep_period: int | None = None
    best_fn: Callable[[Any], float] | None = None
    best_mode: str = "max"
    keep_checkpoints_without_metrics: bool = True
    step_prefix: str | None = None
    step_format_fixed_length: int | None = None
    step_name_format: Any = None
    create: bool = True
    cleanup_tmp_directories: bool = False
    save_on_steps: Container[int] | None = None
    single_host_load_and_broadcast: bool = False
    todelete_subdir: str | None = None
    todelete_full_path: str | None = None
    enable_background_delete: bool = False
    num_deletion_threads: int | None = None
    read_only: bool = False
    enable_async_checkpointing: bool = True
    async_options: AsyncOptions | None = None
    multiprocessing_options: MultiprocessingOptions = field(default_factory=MultiprocessingOptions)
    should_save_fn: Callable[[int, int | None], bool] | None = None
    file_options: FileOptions = field(default_factory=FileOptions)
    atomicity_options: AtomicityOptions | None = None
    save_root_metadata: bool = True
    temporary_path_class: Any = None
    save_decision_policy: SaveDecisionPolicy | SavePolicy | None = None
    preservation_policy: PreservationPolicy | KeepPolicy | None = None
    prevent_write_metrics: bool = False
    enable_should_save_is_saving_in_progress_check: bool = True
    enable_per_process_directory_creation: bool = False
    lightweight_initialize: bool = False

    def __post_init__(self) -> None:
        broadcast = bool(getattr(self.step_name_format, "single_host_load_and_broadcast", False))
        if self.step_name_format is not None and broadcast != self.single_host_load_and_broadcast:
            raise ConfigError(
                "single_host_load_and_broadcast", "is not the same here and in step_name_format"
            )
        if self.best_mode not in ("min", "max"):
            raise ConfigError("best_mode", f"must be 'min' or 'max', not {self.best_mode!r}")
        if self.preservation_policy is None and self.max_to_keep is not None and self.max_to_keep < 0:
            raise ConfigError("max_to_keep", f"must be None or not negative, not {self.max_to_keep}")

        if self.read_only:
            for name, value in _WRITING.items():
                setattr(self, name, value)
        if self.todelete_subdir is not None and self.todelete_full_path is not None:
            raise ConfigError("todelete_full_path", "cannot be set together with todelete_subdir")
        if (
            self.enable_per_process_directory_creation
            and self.multiprocessing_options.primary_host is not None
        ):
            raise ConfigError("enable_per_process_directory_creation", "needs a primary_host of None")

        steps: Any = self.save_on_steps or ()
        self.save_on_steps = frozenset(steps)


def policies_of(options: CheckpointManagerOptions) -> tuple[SaveDecisionPolicy, PreservationPolicy]:
    """Return what options say of when to save and what to keep.

    Raises:
        ConfigError: If there are a preservation policy and other options that say the same.
    """
    deciding = default_policy(options.save_interval_steps, options.save_on_steps, options.should_save_fn)
    if options.save_decision_policy is not None:
        deciding = as_decision_policy(options.save_decision_policy)

    others = options.keep_time_interval or options.max_to_keep or options.keep_period
    if options.preservation_policy is None:
        return deciding, _preservation(options)
    if others:
        raise ConfigError("preservation_policy", "is instead of the other options that say what stays")

    return deciding, as_preservation_policy(options.preservation_policy)


def _preservation(options: CheckpointManagerOptions) -> PreservationPolicy:
    policies: list[PreservationPolicy] = []
    if options.keep_period is not None:
        policies.append(EveryNSteps(options.keep_period))
    if options.keep_time_interval is not None:
        policies.append(EveryNSeconds(interval_secs=int(options.keep_time_interval.total_seconds())))
    if options.best_fn is None:
        policies.append(LatestN(options.max_to_keep))
    else:
        best = BestN(
            get_metric_fn=options.best_fn,
            reverse=options.best_mode == "min",
            n=options.max_to_keep,
            keep_checkpoints_without_metrics=options.keep_checkpoints_without_metrics,
        )
        policies.append(best)

    return AnyPreservationPolicy(policies)

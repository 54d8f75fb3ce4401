"""The options of a `CheckpointManager`, and the policies that follow from them, penstock's own included."""

from __future__ import annotations

__all__ = (
    "CheckpointManagerOptions",
    "check_metrics",
    "needs_metrics",
    "own_policy_of",
    "policies_of",
    "to_delete",
)

import datetime
import inspect
import math
import time
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast, final

from penstock.embedding import missing_metrics, steps_to_delete
from penstock.errors import ConfigError
from penstock.orbax.options import AsyncOptions, AtomicityOptions, FileOptions, MultiprocessingOptions
from penstock.orbax.preservation_policy import (
    AnyPreservationPolicy,
    BestN,
    EveryNSeconds,
    EveryNSteps,
    LatestN,
    PreservationContext,
    PreservationPolicy,
)
from penstock.orbax.save_decision_policy import (
    DecisionContext,
    PolicyCheckpointInfo,
    SaveDecisionPolicy,
    default_policy,
)
from penstock.steps import KeepPolicy, SaveMoment, SavePolicy, StepInfo

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
"""The values of these options with `read_only`."""


@dataclass
class CheckpointManagerOptions:
    """The options of a manager: which steps it saves and keeps, and the way that it does.

    Attributes:
        save_interval_steps: Saves steps that are a multiple of it, and the first step.
        max_to_keep: How many steps to keep: the latest, or with `best_fn` the best. None for all.
        keep_time_interval: Also keeps one step per such interval.
        keep_period: Also keeps steps that are a multiple of it.
        best_fn: Turns the metrics of a step into a number.
        best_mode: `max` if the greatest number is best, `min` if the least is.
        keep_checkpoints_without_metrics: Whether steps without metrics are kept beside the best.
        step_prefix: What precedes the number of a step, followed by an underscore.
        step_format_fixed_length: The number of digits, filled up with zeros.
        step_name_format: How steps are named, in place of the other two; see `penstock.orbax.step`.
        create: Whether to create the directory if it does not exist.
        cleanup_tmp_directories: Whether to remove what crashed saves left.
        save_on_steps: More steps to save.
        single_host_load_and_broadcast: Has no effect: every process lists the directory.
        todelete_subdir: A folder that deleted steps are moved to; by default they are removed. In a bucket
            they always are, which is logged.
        todelete_full_path: Not supported: nothing is moved in a bucket.
        enable_background_delete: Whether old steps are removed in the background.
        num_deletion_threads: Has no effect.
        read_only: Whether nothing is saved or deleted.
        enable_async_checkpointing: Whether `save` returns when the objects have been copied.
        async_options: How saves work in the background.
        multiprocessing_options: Which processes save.
        should_save_fn: Decides from a step and the latest one whether to save, in place of other options.
        file_options: The permissions of directories.
        atomicity_options: How a step becomes visible.
        save_root_metadata: Whether the manager's `metadata` is written.
        temporary_path_class: Not supported; use `atomicity_options`.
        save_decision_policy: Decides which steps are saved, in place of the other options; also one of
            penstock's own, as `penstock.steps.EverySteps`.
        preservation_policy: Decides which steps stay, in place of the other options; also one of penstock's
            own, as `penstock.steps.KeepLast`.
        prevent_write_metrics: Whether metrics are used but not written.
        enable_should_save_is_saving_in_progress_check: If False, policies do not see that a save runs.
        enable_per_process_directory_creation: Has no effect; needs a `primary_host` of None.
        lightweight_initialize: Whether to skip reading time and metrics of existing steps.

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


def policies_of(
    options: CheckpointManagerOptions,
) -> tuple[SaveDecisionPolicy, PreservationPolicy | KeepPolicy]:
    """Return the policies that the options describe: when to save, and what to keep.

    Raises:
        ConfigError: If both a preservation policy and other options say what stays.
    """
    deciding = default_policy(options.save_interval_steps, options.save_on_steps, options.should_save_fn)
    if options.save_decision_policy is not None:
        deciding = as_decision_policy(options.save_decision_policy)

    others = options.keep_time_interval or options.max_to_keep or options.keep_period
    if options.preservation_policy is None:
        return deciding, _preservation(options)
    if others:
        raise ConfigError("preservation_policy", "excludes the other options that say what stays")

    return deciding, options.preservation_policy


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


def as_decision_policy(policy: SaveDecisionPolicy | SavePolicy) -> SaveDecisionPolicy:
    """Return a save policy as one of Orbax's kind; one of that kind is returned as it is.

    Both kinds have `should_save`: penstock's takes one moment, Orbax's takes steps and a context.
    """
    function: Any = policy.should_save
    if "context" in inspect.signature(function).parameters:
        return cast("SaveDecisionPolicy", policy)

    return _SaveAdapter(cast("SavePolicy", policy))


def own_policy_of(policy: SaveDecisionPolicy) -> SavePolicy | None:
    """Return the policy of penstock's kind that one of Orbax's kind stands for; None if it is no such."""
    return policy.policy if isinstance(policy, _SaveAdapter) else None


def needs_metrics(policy: PreservationPolicy | KeepPolicy) -> bool:
    """Return whether a policy of penstock's ranks by metrics, which are then kept with the steps."""
    return isinstance(policy, KeepPolicy) and "metrics" in policy.needs


def check_metrics(
    policy: PreservationPolicy | KeepPolicy, metrics: Any, steps: Sequence[StepInfo]
) -> Sequence[str]:
    """Name the metrics that a policy of penstock's ranks by, and that neither these nor any step has.

    Raises:
        ValueError: If one is misspelt; the nearest name is in it.
    """
    if not isinstance(policy, KeepPolicy) or not isinstance(metrics, Mapping) or not metrics:
        return ()

    return missing_metrics(policy, cast("Mapping[str, Any]", metrics), _with_mappings(steps))


def to_delete(
    policy: PreservationPolicy | KeepPolicy,
    steps: Sequence[StepInfo],
    described: Callable[[StepInfo], PolicyCheckpointInfo],
) -> list[int]:
    """Return the steps that a policy of either kind does not keep.

    Args:
        policy: What stays. One of penstock's keeps the last step in any case, one of Orbax's need not.
        steps: All of them, ascending.
        described: Returns a step as a policy of Orbax's sees it.
    """
    if not isinstance(policy, KeepPolicy):
        return steps_to_delete(_KeptByOrbax(policy, described), steps, time.time(), keeps_last=False)

    is_timed = "time" in policy.needs
    known = [
        replace(info, is_readable=info.is_readable and not (is_timed and math.isnan(info.time_s)))
        for info in _with_mappings(steps)
    ]
    return steps_to_delete(policy, known, time.time())


@final
@dataclass(frozen=True, slots=True)
class _KeptByOrbax(KeepPolicy):
    policy: PreservationPolicy
    described: Callable[[StepInfo], PolicyCheckpointInfo]

    @property
    def needs(self) -> Any:
        return frozenset({"time", "metrics"})

    def keep(self, steps: Sequence[StepInfo], now_s: float, /) -> Collection[int]:
        shown = list(map(self.described, steps))
        stays = self.policy.should_preserve(shown, context=PreservationContext())
        return [info.step for info, stay in zip(steps, stays, strict=True) if stay]


def _with_mappings(steps: Sequence[StepInfo]) -> list[StepInfo]:
    """Leave out metrics that are no mapping, of which penstock's policies know nothing."""
    return [info if isinstance(info.metrics, Mapping) else replace(info, metrics=None) for info in steps]


@final
@dataclass(frozen=True, slots=True)
class _SaveAdapter:
    policy: SavePolicy
    opened_s: float = field(default_factory=time.time)

    def should_save(
        self,
        step: PolicyCheckpointInfo,
        previous_steps: Sequence[PolicyCheckpointInfo],
        *,
        context: DecisionContext,
    ) -> bool:
        began_s = [info.time.timestamp() for info in previous_steps[-1:] if info.time.year > 1]
        moment = SaveMoment(
            step=step.step,
            now_s=step.time.timestamp(),
            steps=[info.step for info in previous_steps],
            saved_s=max([self.opened_s, *began_s]),
            saving=context.is_saving_in_progress,
            preempted=context.reached_preemption,
        )
        return self.policy.should_save(moment)

"""Policies for the steps that a manager saves and keeps, under Orbax's names; penstock's own serve as well.

Both APIs show this module under two names each: one for the policies of saving, one for those of keeping.
"""

from __future__ import annotations

__all__ = (
    "AnyPreservationPolicy",
    "AnySavePolicy",
    "BestN",
    "ContinuousCheckpointingPolicy",
    "CustomSteps",
    "DecisionContext",
    "EveryNSeconds",
    "EveryNSteps",
    "EveryNStepsClosest",
    "FixedIntervalPolicy",
    "InitialSavePolicy",
    "LatestDuration",
    "LatestN",
    "PolicyCheckpointInfo",
    "PreemptionCheckpointingPolicy",
    "PreservationContext",
    "PreservationPolicy",
    "PreserveAll",
    "SaveDecisionPolicy",
    "SpecificStepsPolicy",
)

import datetime
import inspect
import math
import time
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from dataclasses import InitVar, dataclass, field, replace
from types import SimpleNamespace
from typing import Any, Final, Protocol, TypeVar, cast, final, runtime_checkable

from penstock.embedding import follows_from_step, missing_metrics, steps_to_delete
from penstock.orbax.options import MultiprocessingOptions
from penstock.steps import KeepPolicy, SaveMoment, SavePolicy, StepInfo


class PolicyCheckpointInfo(Protocol):
    """A step as policies see it."""

    step: int
    metrics: dict[str, Any] | None
    time: datetime.datetime


InfoT = TypeVar("InfoT", bound=PolicyCheckpointInfo)


@dataclass(kw_only=True)
class DecisionContext:
    """The circumstances in which a policy is asked.

    Attributes:
        is_saving_in_progress: Whether a save is running in the background.
        reached_preemption: Whether the job is to end after this step.
        multiprocessing_options: Those of the manager.
    """

    is_saving_in_progress: bool
    reached_preemption: bool
    multiprocessing_options: MultiprocessingOptions


@runtime_checkable
class SaveDecisionPolicy(Protocol):
    """Decides whether a step is saved."""

    def should_save(
        self,
        step: PolicyCheckpointInfo,
        previous_steps: Sequence[PolicyCheckpointInfo],
        *,
        context: DecisionContext,
    ) -> bool:
        """Return whether to save `step`, given the steps that exist, in ascending order."""
        ...


@dataclass
class FixedIntervalPolicy(SaveDecisionPolicy):
    """Saves steps that are a multiple of `interval`."""

    interval: int

    def should_save(
        self,
        step: PolicyCheckpointInfo,
        previous_steps: Sequence[PolicyCheckpointInfo],
        *,
        context: DecisionContext,
    ) -> bool:
        return step.step % self.interval == 0


@dataclass
class SpecificStepsPolicy(SaveDecisionPolicy):
    """Saves the given steps."""

    steps: Container[int]

    def should_save(
        self,
        step: PolicyCheckpointInfo,
        previous_steps: Sequence[PolicyCheckpointInfo],
        *,
        context: DecisionContext,
    ) -> bool:
        return step.step in self.steps


@dataclass(kw_only=True)
class ContinuousCheckpointingPolicy(SaveDecisionPolicy):
    """Saves as soon as the previous save has finished.

    Attributes:
        minimum_interval_secs: The least time from one save to the next.
    """

    minimum_interval_secs: int | None = None

    def should_save(
        self,
        step: PolicyCheckpointInfo,
        previous_steps: Sequence[PolicyCheckpointInfo],
        *,
        context: DecisionContext,
    ) -> bool:
        if context.is_saving_in_progress:
            return False
        if not previous_steps or self.minimum_interval_secs is None:
            return True

        return (step.time - previous_steps[-1].time).total_seconds() >= self.minimum_interval_secs


class PreemptionCheckpointingPolicy(SaveDecisionPolicy):
    """Saves when the job is about to end."""

    def should_save(
        self,
        step: PolicyCheckpointInfo,
        previous_steps: Sequence[PolicyCheckpointInfo],
        *,
        context: DecisionContext,
    ) -> bool:
        return context.reached_preemption


class InitialSavePolicy(SaveDecisionPolicy):
    """Saves the first step if none exists."""

    def should_save(
        self,
        step: PolicyCheckpointInfo,
        previous_steps: Sequence[PolicyCheckpointInfo],
        *,
        context: DecisionContext,
    ) -> bool:
        return not previous_steps


@dataclass
class AnySavePolicy(SaveDecisionPolicy):
    """Saves if any of its policies does."""

    policies: Sequence[SaveDecisionPolicy]

    def should_save(
        self,
        step: PolicyCheckpointInfo,
        previous_steps: Sequence[PolicyCheckpointInfo],
        *,
        context: DecisionContext,
    ) -> bool:
        return any(policy.should_save(step, previous_steps, context=context) for policy in self.policies)


@dataclass
class ShouldSaveFnPolicy(SaveDecisionPolicy):
    """Asks a function of the step and the latest one."""

    should_save_fn: Callable[[int, int | None], bool]

    def should_save(
        self,
        step: PolicyCheckpointInfo,
        previous_steps: Sequence[PolicyCheckpointInfo],
        *,
        context: DecisionContext,
    ) -> bool:
        return self.should_save_fn(step.step, previous_steps[-1].step if previous_steps else None)


@dataclass(kw_only=True)
class PreservationContext:
    """The circumstances in which a policy is asked: none yet."""


class PreservationPolicy(Protocol):
    """Decides which steps stay."""

    def should_preserve(
        self, checkpoints: Sequence[PolicyCheckpointInfo], *, context: PreservationContext
    ) -> Sequence[bool]:
        """Return for each step, in ascending order, whether it stays."""
        ...


@dataclass
class PreserveAll(PreservationPolicy):
    """Keeps every step."""

    def should_preserve(
        self, checkpoints: Sequence[PolicyCheckpointInfo], *, context: PreservationContext
    ) -> Sequence[bool]:
        return [True] * len(checkpoints)


@dataclass
class LatestN(PreservationPolicy):
    """Keeps the last `n` steps; all of them if `n` is None."""

    n: int | None = None

    def should_preserve(
        self, checkpoints: Sequence[PolicyCheckpointInfo], *, context: PreservationContext
    ) -> Sequence[bool]:
        count = len(checkpoints)
        return [self.n is None or at >= count - self.n for at in range(count)]


@dataclass
class EveryNSeconds(PreservationPolicy):
    """Keeps the first step, then each step at least `interval_secs` later than the last one kept."""

    interval_secs: int

    def should_preserve(
        self, checkpoints: Sequence[PolicyCheckpointInfo], *, context: PreservationContext
    ) -> Sequence[bool]:
        interval = datetime.timedelta(seconds=self.interval_secs)
        last: datetime.datetime | None = None
        stay: list[bool] = []
        for info in checkpoints:
            stay.append(last is None or info.time - last >= interval)
            last = info.time if stay[-1] else last

        return stay


@dataclass
class EveryNSteps(PreservationPolicy):
    """Keeps steps that are a multiple of `interval_steps`.

    Attributes:
        interval_steps: Not 0.
        exact_interval: If False, keeps the first step, then each at least `interval_steps` after the last.
        max_to_keep: How many of those are kept at most, the latest ones; None for all.
    """

    interval_steps: int
    exact_interval: bool = True
    max_to_keep: int | None = None

    def should_preserve(
        self, checkpoints: Sequence[PolicyCheckpointInfo], *, context: PreservationContext
    ) -> Sequence[bool]:
        _check_interval(self.interval_steps)
        if self.exact_interval:
            return _last([info.step % self.interval_steps == 0 for info in checkpoints], self.max_to_keep)

        last: int | None = None
        stay: list[bool] = []
        for info in checkpoints:
            stay.append(last is None or info.step - last >= self.interval_steps)
            last = info.step if stay[-1] else last

        return _last(stay, self.max_to_keep)


@dataclass
class EveryNStepsClosest(PreservationPolicy):
    """Keeps the step closest to each multiple of `interval_steps`, the later of two, and the last step.

    Attributes:
        interval_steps: Not 0.
        max_to_keep: How many of those are kept at most, the latest ones; None for all.
    """

    interval_steps: int
    max_to_keep: int | None = None

    def should_preserve(
        self, checkpoints: Sequence[PolicyCheckpointInfo], *, context: PreservationContext
    ) -> Sequence[bool]:
        _check_interval(self.interval_steps)
        closest: dict[int, tuple[int, int]] = {}
        for at, info in enumerate(checkpoints):
            target = round(info.step / self.interval_steps)
            distance = abs(info.step - target * self.interval_steps)
            if target not in closest or distance <= closest[target][0]:
                closest[target] = (distance, at)

        kept = {at for _, at in closest.values()} | {len(checkpoints) - 1}
        return _last([at in kept for at in range(len(checkpoints))], self.max_to_keep)


@dataclass
class CustomSteps(PreservationPolicy):
    """Keeps the given steps."""

    steps: InitVar[Sequence[int]]
    _steps_set: set[int] = field(init=False)

    def __post_init__(self, steps: Sequence[int]) -> None:
        self._steps_set = set(steps)

    def should_preserve(
        self, checkpoints: Sequence[PolicyCheckpointInfo], *, context: PreservationContext
    ) -> Sequence[bool]:
        return [info.step in self._steps_set for info in checkpoints]


@dataclass
class AnyPreservationPolicy(PreservationPolicy):
    """Keeps whatever any of its policies keeps."""

    policies: Sequence[PreservationPolicy]

    def should_preserve(
        self, checkpoints: Sequence[PolicyCheckpointInfo], *, context: PreservationContext
    ) -> Sequence[bool]:
        answers = [policy.should_preserve(checkpoints, context=context) for policy in self.policies]
        return [any(answer[at] for answer in answers) for at in range(len(checkpoints))]


@dataclass(kw_only=True)
class BestN(PreservationPolicy):
    """Keeps the steps that a function of their metrics ranks highest, the later of two equal ones.

    Attributes:
        get_metric_fn: Turns the metrics of a step into a number.
        reverse: Whether the lowest are best.
        n: How many steps to keep; None for all.
        keep_checkpoints_without_metrics: Whether steps without metrics are kept, too, unless `n` is 0.
    """

    get_metric_fn: Callable[[Any], float]
    reverse: bool = False
    n: int | None = None
    keep_checkpoints_without_metrics: bool = True

    def should_preserve(
        self, checkpoints: Sequence[PolicyCheckpointInfo], *, context: PreservationContext
    ) -> Sequence[bool]:
        count = len(checkpoints)
        if self.n is None or count <= self.n:
            return [True] * count
        if self.n == 0:
            return [False] * count

        ranked = sorted(
            (rank(self.get_metric_fn(info.metrics), self.reverse), at)
            for at, info in enumerate(checkpoints)
            if info.metrics is not None
        )
        best = {at for _, at in ranked[-self.n :]}
        others = self.keep_checkpoints_without_metrics
        return [at in best or (others and info.metrics is None) for at, info in enumerate(checkpoints)]


@dataclass
class LatestDuration(PreservationPolicy):
    """Keeps steps that were saved within `duration`, and all steps after the first of them."""

    duration: datetime.timedelta

    def should_preserve(
        self, checkpoints: Sequence[PolicyCheckpointInfo], *, context: PreservationContext
    ) -> Sequence[bool]:
        now = datetime.datetime.now(tz=datetime.UTC)
        young = [now - info.time <= self.duration for info in checkpoints]
        first = young.index(True) if True in young else len(young)
        return [at >= first for at in range(len(young))]


def best_of(infos: Sequence[InfoT], best_fn: Callable[[Any], float], lowest_is_best: bool) -> InfoT | None:
    """Return the step with the best metrics, the last of equals; None if no step has metrics."""
    measured = [info for info in infos if info.metrics is not None]
    ranked = [(rank(best_fn(info.metrics), lowest_is_best), at) for at, info in enumerate(measured)]
    return measured[max(ranked)[1]] if ranked else None


def rank(value: Any, lowest_is_best: bool) -> tuple[bool, float]:
    """Return a sort key that is greater for a better value. Values that are not finite come last."""
    number = float(value)
    if not math.isfinite(number):
        return (False, 0.0)

    return (True, -number if lowest_is_best else number)


def _check_interval(steps: int) -> None:
    if steps == 0:
        raise ValueError("interval_steps must not be 0.")


def _last(stay: list[bool], count: int | None) -> list[bool]:
    """Keep only the last `count` of the steps that stay."""
    kept = [at for at, stays in enumerate(stay) if stays]
    kept = kept if count is None else kept[max(0, len(kept) - count) :] if count else kept
    return [at in set(kept) for at in range(len(stay))]


def as_decision_policy(policy: SaveDecisionPolicy | SavePolicy) -> SaveDecisionPolicy:
    """Return a save policy as one of Orbax's kind; one of that kind is returned as it is.

    Both kinds have `should_save`: penstock's takes one moment, Orbax's takes steps and a context.
    """
    function: Any = policy.should_save
    if "context" in inspect.signature(function).parameters:
        return cast("SaveDecisionPolicy", policy)

    return _SaveAdapter(cast("SavePolicy", policy))


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


def kept_by(policy: PreservationPolicy | KeepPolicy) -> KeepPolicy:
    """Return a policy of Orbax's as one of penstock's, which keeps the last step in any case."""
    if isinstance(policy, KeepPolicy):
        return policy

    def described(info: StepInfo) -> PolicyCheckpointInfo:
        when = datetime.datetime.fromtimestamp(info.time_s, tz=datetime.UTC)
        return cast("PolicyCheckpointInfo", SimpleNamespace(step=info.step, time=when, metrics=info.metrics))

    return _KeptByOrbax(policy, described)


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


_ALIKE: Final = (FixedIntervalPolicy, SpecificStepsPolicy, InitialSavePolicy, PreemptionCheckpointingPolicy)


def is_same_everywhere(policy: SaveDecisionPolicy) -> bool:
    """Return whether a policy decides by the steps alone, or by what jax says in all processes alike."""
    if type(policy) is AnySavePolicy:
        return all(map(is_same_everywhere, policy.policies))

    return follows_from_step(policy.policy) if isinstance(policy, _SaveAdapter) else type(policy) in _ALIKE

"""Policies for the steps that a manager keeps, under Orbax's names."""

from __future__ import annotations

__all__ = (
    "AnyPreservationPolicy",
    "BestN",
    "CustomSteps",
    "EveryNSeconds",
    "EveryNSteps",
    "EveryNStepsClosest",
    "LatestDuration",
    "LatestN",
    "PreservationContext",
    "PreservationPolicy",
    "PreserveAll",
    "best_of",
    "rank",
)

import datetime
import math
from collections.abc import Callable, Sequence
from dataclasses import InitVar, dataclass, field
from typing import Any, Protocol, TypeVar

from penstock.orbax.save_decision_policy import PolicyCheckpointInfo

InfoT = TypeVar("InfoT", bound=PolicyCheckpointInfo)


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

"""Which steps a manager keeps, under Orbax's names."""

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

from penstock.orbax.v0.manager.save_decision_policy import PolicyCheckpointInfo

InfoT = TypeVar("InfoT", bound=PolicyCheckpointInfo)


@dataclass(kw_only=True)
class PreservationContext:
    """What else policies look at: nothing yet."""


class PreservationPolicy(Protocol):
    """Says which steps stay."""

    def should_preserve(
        self, checkpoints: Sequence[PolicyCheckpointInfo], *, context: PreservationContext
    ) -> Sequence[bool]:
        """Say of each step, the latest one last, whether it stays."""
        ...


@dataclass
class PreserveAll(PreservationPolicy):
    """Everything."""

    def should_preserve(
        self, checkpoints: Sequence[PolicyCheckpointInfo], *, context: PreservationContext
    ) -> Sequence[bool]:
        return [True] * len(checkpoints)


@dataclass
class LatestN(PreservationPolicy):
    """The last `n` steps; all of them if that is None."""

    n: int | None = None

    def should_preserve(
        self, checkpoints: Sequence[PolicyCheckpointInfo], *, context: PreservationContext
    ) -> Sequence[bool]:
        count = len(checkpoints)
        return [self.n is None or at >= count - self.n for at in range(count)]


@dataclass
class EveryNSeconds(PreservationPolicy):
    """The first step, and then each that is at least so much later than the last one that stays."""

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
    """Steps that are a multiple of `interval_steps`.

    Attributes:
        interval_steps: Not 0.
        exact_interval: If off: the first step, and then each that is at least so many after the last one.
        max_to_keep: The last so many of them.
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
    """Of each multiple of `interval_steps` the step closest to it, the later of two; and the last step.

    Attributes:
        interval_steps: Not 0.
        max_to_keep: The last so many of them.
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
    """The steps given."""

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
    """Whatever any of the policies keeps."""

    policies: Sequence[PreservationPolicy]

    def should_preserve(
        self, checkpoints: Sequence[PolicyCheckpointInfo], *, context: PreservationContext
    ) -> Sequence[bool]:
        answers = [policy.should_preserve(checkpoints, context=context) for policy in self.policies]
        return [any(answer[at] for answer in answers) for at in range(len(checkpoints))]


@dataclass(kw_only=True)
class BestN(PreservationPolicy):
    """The steps that a function of their metrics ranks highest, the later of two that are equal.

    Attributes:
        get_metric_fn: Returns a number.
        reverse: Whether the lowest are best.
        n: How many; None for all.
        keep_checkpoints_without_metrics: Whether steps without metrics stay beside them; not if `n` is 0.
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
    """Steps that were saved at most so long ago, and all that follow one of them."""

    duration: datetime.timedelta

    def should_preserve(
        self, checkpoints: Sequence[PolicyCheckpointInfo], *, context: PreservationContext
    ) -> Sequence[bool]:
        now = datetime.datetime.now(tz=datetime.UTC)
        young = [now - info.time <= self.duration for info in checkpoints]
        first = young.index(True) if True in young else len(young)
        return [at >= first for at in range(len(young))]


def best_of(infos: Sequence[InfoT], best_fn: Callable[[Any], float], lowest_is_best: bool) -> InfoT | None:
    """Return the step whose metrics are best, the last of equals; None if none has metrics."""
    measured = [info for info in infos if info.metrics is not None]
    ranked = [(rank(best_fn(info.metrics), lowest_is_best), at) for at, info in enumerate(measured)]
    return measured[max(ranked)[1]] if ranked else None


def rank(value: Any, lowest_is_best: bool) -> tuple[bool, float]:
    """Return what is greater for what is better. What is not finite is worse than anything finite."""
    number = float(value)
    if not math.isfinite(number):
        return (False, 0.0)

    return (True, -number if lowest_is_best else number)


def _check_interval(steps: int) -> None:
    if steps == 0:
        raise ValueError("interval_steps must not be 0.")


def _last(stay: list[bool], count: int | None) -> list[bool]:
    """Leave the last `count` of those that stay."""
    kept = [at for at, stays in enumerate(stay) if stays]
    kept = kept if count is None else kept[max(0, len(kept) - count) :] if count else kept
    return [at in set(kept) for at in range(len(stay))]

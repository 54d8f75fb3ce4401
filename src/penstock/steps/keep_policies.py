"""Policies that decide which steps to keep. Small, pure values that look at all steps.

Policies are combined with `|` (what any keeps) and `&` (what all keep): `KeepLast(3) | KeepEvery(1000)`.
"""

from __future__ import annotations

__all__ = (
    "KeepAll",
    "KeepAllOf",
    "KeepAnyOf",
    "KeepBest",
    "KeepEvery",
    "KeepEverySeconds",
    "KeepLast",
    "KeepPolicy",
    "KeepRecent",
    "KeepSteps",
    "Metric",
    "Mode",
    "Needs",
    "StepInfo",
    "as_keep_policy",
    "best_of",
    "check_ranking",
    "has_metric",
    "ranked_names",
    "ranking_of",
    "steps_to_delete",
)

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, Protocol, TypeAlias, cast, final, runtime_checkable

from penstock.kernel.errors import SpecError
from penstock.steps.step_names import check_all, check_count, check_seconds, check_steps

Mode: TypeAlias = Literal["min", "max"]
Metric: TypeAlias = str | Callable[[Mapping[str, Any]], Any]
"""A metric's name (`"loss"`, or `"eval/loss"` of nested ones), or a function from all of them to a number."""
Needs: TypeAlias = frozenset[Literal["time", "metrics"]]

NOTHING: Final[Needs] = frozenset()
EVERYTHING: Final[Needs] = frozenset({"time", "metrics"})


@final
@dataclass(frozen=True, slots=True)
class StepInfo:
    """The facts about one step that a policy may look at."""

    step: int
    time_s: float = math.nan  #: when it became durable, seconds since the epoch; NaN if no policy needs it
    metrics: Mapping[str, Any] | None = None  #: None if it has none, or no policy needs them
    is_readable: bool = True
    """False if what a policy needs of it is damaged, lost, or was never recorded. Such a step stays, and no
    policy is shown it."""


@runtime_checkable
class KeepPolicy(Protocol):
    """Says which steps stay."""

    def keep(self, steps: Sequence[StepInfo], now_s: float, /) -> Collection[int]:
        """Return the steps to keep.

        Args:
            steps: All durable ones, ascending.
            now_s: Seconds since the epoch.
        """
        ...

    @property
    def needs(self) -> Needs:
        """The facts of a `StepInfo` that it needs besides the number. Each costs reading a file per step."""
        ...


class _Combinable:
    """Gives `|` and `&` to the policies of this module."""

    __slots__ = ()

    @property
    def needs(self) -> Needs:
        return NOTHING

    def __or__(self: KeepPolicy, other: KeepPolicy) -> KeepAnyOf:
        return KeepAnyOf((self, other))

    def __and__(self: KeepPolicy, other: KeepPolicy) -> KeepAllOf:
        return KeepAllOf((self, other))


@final
@dataclass(frozen=True, slots=True)
class KeepAnyOf(_Combinable):
    """Keeps what any of the policies keeps; with no policies, nothing."""

    policies: Sequence[KeepPolicy]

    def __post_init__(self) -> None:
        check_all(type(self).__name__, self.policies, KeepPolicy)

    @property
    def needs(self) -> Needs:
        return NOTHING.union(*[policy.needs for policy in self.policies])

    def keep(self, steps: Sequence[StepInfo], now_s: float, /) -> Collection[int]:
        return {step for policy in self.policies for step in policy.keep(steps, now_s)}


@final
@dataclass(frozen=True, slots=True)
class KeepAllOf(_Combinable):
    """Keeps what all of the policies keep; with no policies, everything."""

    policies: Sequence[KeepPolicy]

    def __post_init__(self) -> None:
        check_all(type(self).__name__, self.policies, KeepPolicy)

    @property
    def needs(self) -> Needs:
        return NOTHING.union(*[policy.needs for policy in self.policies])

    def keep(self, steps: Sequence[StepInfo], now_s: float, /) -> Collection[int]:
        kept = {info.step for info in steps}
        return kept.intersection(*[policy.keep(steps, now_s) for policy in self.policies])


@final
@dataclass(frozen=True, slots=True)
class KeepAll(_Combinable):
    """Keeps every step."""

    def keep(self, steps: Sequence[StepInfo], now_s: float, /) -> Collection[int]:
        return [info.step for info in steps]


@final
@dataclass(frozen=True, slots=True)
class KeepLast(_Combinable):
    """Keeps the last `n` steps."""

    n: int

    def __post_init__(self) -> None:
        check_count("n of KeepLast", self.n, least=0)

    def keep(self, steps: Sequence[StepInfo], now_s: float, /) -> Collection[int]:
        return [info.step for info in steps[max(0, len(steps) - self.n) :]]


@final
@dataclass(frozen=True, slots=True)
class KeepEvery(_Combinable):
    """Keeps steps whose number is a multiple of `n`."""

    n: int

    def __post_init__(self) -> None:
        check_count("n of KeepEvery", self.n, least=1)

    def keep(self, steps: Sequence[StepInfo], now_s: float, /) -> Collection[int]:
        return [info.step for info in steps if info.step % self.n == 0]


@final
@dataclass(frozen=True, slots=True)
class KeepEverySeconds(_Combinable):
    """Keeps the first step, then each one durable at least `seconds` after the last kept one."""

    seconds: float

    def __post_init__(self) -> None:
        check_seconds("seconds of KeepEverySeconds", self.seconds)

    @property
    def needs(self) -> Needs:
        return frozenset({"time"})

    def keep(self, steps: Sequence[StepInfo], now_s: float, /) -> Collection[int]:
        kept: list[int] = []
        since = -math.inf
        for info in steps:
            if info.time_s - since >= self.seconds:
                kept.append(info.step)
                since = info.time_s

        return kept


@final
@dataclass(frozen=True, slots=True)
class KeepRecent(_Combinable):
    """Keeps steps that became durable at most `seconds` ago."""

    seconds: float

    def __post_init__(self) -> None:
        check_seconds("seconds of KeepRecent", self.seconds, positive=False)

    @property
    def needs(self) -> Needs:
        return frozenset({"time"})

    def keep(self, steps: Sequence[StepInfo], now_s: float, /) -> Collection[int]:
        return [info.step for info in steps if now_s - info.time_s <= self.seconds]


@final
@dataclass(frozen=True, slots=True)
class KeepSteps(_Combinable):
    """Keeps the steps given."""

    steps: Collection[int]

    def __post_init__(self) -> None:
        check_steps("KeepSteps", self.steps)

    def keep(self, steps: Sequence[StepInfo], now_s: float, /) -> Collection[int]:
        return [info.step for info in steps if info.step in self.steps]


@final
@dataclass(frozen=True, slots=True)
class KeepBest(_Combinable):
    """Keeps the `n` steps with the best metric.

    Of two equal steps the later one is better. A metric that is not finite is worse than every finite one:
    a loss of NaN or of minus infinity is an accident, not an achievement.

    Attributes:
        n: How many.
        metric: Which metric; by its name, or computed from all of them.
        mode: Whether the least or the greatest is best.
        without_metric: Whether steps without the metric are kept in addition to the `n`.
    """

    n: int
    metric: Metric
    mode: Mode = "min"
    without_metric: bool = True

    def __post_init__(self) -> None:
        check_count("n of KeepBest", self.n, least=0)
        check_ranking(self.metric, self.mode)
        if not isinstance(cast("object", self.without_metric), bool):
            raise SpecError(f"without_metric is True or False, not {self.without_metric!r}")

    @property
    def needs(self) -> Needs:
        return frozenset({"metrics"})

    def keep(self, steps: Sequence[StepInfo], now_s: float, /) -> Collection[int]:
        values = [(_value(info, self.metric), info.step) for info in steps]
        ranked = sorted([(_rank(value, self.mode), step) for value, step in values if value is not None])
        kept = [step for _, step in ranked[max(0, len(ranked) - self.n) :]]
        if self.without_metric:
            kept += [step for value, step in values if value is None]

        return kept


def check_ranking(metric: object, mode: object) -> None:
    """Raise `SpecError` if steps cannot be ranked by a metric in this way."""
    if not isinstance(metric, str) and not callable(metric):
        raise SpecError(f"metric is a name such as 'loss', or a function of all metrics, not {metric!r}")
    if mode not in ("min", "max"):
        raise SpecError(f"mode must be 'min' or 'max', not {mode!r}")


def as_keep_policy(given: KeepPolicy | int | None) -> KeepPolicy:
    """Return a policy: a number means that so many of the last steps are kept, None that all are.

    Raises:
        SpecError: If it is neither.
    """
    if given is None:
        return KeepAll()
    if isinstance(given, int) and not isinstance(given, bool):
        return KeepLast(given)
    if not isinstance(cast("object", given), KeepPolicy):
        raise SpecError(f"keep is a policy such as KeepLast(3), or a number of steps, not {given!r}")

    return cast("KeepPolicy", given)


def best_of(steps: Iterable[StepInfo], metric: Metric, mode: Mode) -> int | None:
    """Return the step with the best metric, the later of two that are equal; None if none is finite."""
    values = [(_value(info, metric), info.step) for info in steps]
    finite = [(value, step) for value, step in values if value is not None and math.isfinite(value)]
    return max([(_rank(value, mode), step) for value, step in finite])[1] if finite else None


def ranking_of(policy: KeepPolicy) -> tuple[Metric, Mode] | None:
    """Return what the first `KeepBest` in a policy ranks by."""
    if isinstance(policy, KeepBest):
        return policy.metric, policy.mode
    if isinstance(policy, (KeepAnyOf, KeepAllOf)):
        found = (ranking_of(part) for part in policy.policies)
        return next((ranking for ranking in found if ranking is not None), None)

    return None


def ranked_names(policy: KeepPolicy) -> list[str]:
    """Return the names of all metrics that a policy ranks by; functions have none."""
    if isinstance(policy, KeepBest):
        return [policy.metric] if isinstance(policy.metric, str) else []
    if isinstance(policy, (KeepAnyOf, KeepAllOf)):
        return [name for part in policy.policies for name in ranked_names(part)]

    return []


def has_metric(info: StepInfo, name: str) -> bool:
    """True if a step has a metric, NaN included."""
    return _value(info, name) is not None


def steps_to_delete(
    policy: KeepPolicy,
    steps: Sequence[StepInfo],
    now_s: float,
    pinned: Collection[int] = (),
    *,
    keeps_last: bool = True,
) -> list[int]:
    """Return the steps to delete: those that the policy does not keep, but not the last one.

    Nor one of which is not known what the policy would look at: damage must not delete it.

    Args:
        policy: What to keep.
        steps: All durable steps, ascending.
        now_s: Seconds since the epoch.
        pinned: Steps that stay, whatever the policy says.
        keeps_last: Whether the last one stays, too.

    Returns:
        Ascending.
    """
    if not steps:
        return []

    known = [info for info in steps if info.is_readable]
    last = [info.step for info in known[-1:]] if keeps_last else []
    kept = {*policy.keep(known, now_s), *pinned, *last}
    return [info.step for info in known if info.step not in kept]


def _value(info: StepInfo, metric: Metric) -> float | None:
    """The metric of a step as a number; None if it has none."""
    if info.metrics is None:
        return None

    found: Any = info.metrics
    if callable(metric):
        found = metric(info.metrics)
    elif metric in info.metrics:
        found = info.metrics[metric]
    else:
        for name in metric.split("/"):
            found = cast("Mapping[str, Any]", found).get(name) if isinstance(found, Mapping) else None

    value: Any = found
    return None if value is None or isinstance(value, (str, Mapping)) else float(value)


def _rank(value: float, mode: Mode) -> tuple[bool, float]:
    """Greater is better; what is not finite comes first."""
    if not math.isfinite(value):
        return (False, 0.0)

    return (True, -value if mode == "min" else value)

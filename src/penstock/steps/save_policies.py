"""Policies that decide whether a step is saved. Small, pure values.

Policies are combined with `|` and `&`: `EverySteps(1000) | OnPreemption()`.
"""

from __future__ import annotations

__all__ = (
    "Always",
    "EverySeconds",
    "EverySteps",
    "FirstSave",
    "Never",
    "OnPreemption",
    "OnSteps",
    "SaveAllOf",
    "SaveAnyOf",
    "SaveMoment",
    "SavePolicy",
    "WhenIdle",
    "as_save_policy",
    "awaits_preemption",
    "follows_from_step",
)

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol, cast, final, runtime_checkable

from penstock.kernel.errors import SpecError
from penstock.steps.step_names import check_all, check_count, check_seconds, check_steps


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class SaveMoment:
    """The facts that a policy may look at."""

    step: int  #: the one that could be saved
    now_s: float  #: seconds on a monotonic clock
    steps: Sequence[int] = ()  #: those that are saved or being saved, ascending
    saved_s: float = 0.0  #: when the last save began, on that clock; or the manager was opened
    saving: bool = False  #: whether a save is under way
    preempted: bool = False  #: whether this process was asked to end and has not begun a save since


@runtime_checkable
class SavePolicy(Protocol):
    """Decides whether a step is saved."""

    def should_save(self, moment: SaveMoment, /) -> bool: ...


class _Combinable:
    """Gives `|` and `&` to the policies of this module."""

    __slots__ = ()

    def __or__(self: SavePolicy, other: SavePolicy) -> SaveAnyOf:
        return SaveAnyOf((self, other))

    def __and__(self: SavePolicy, other: SavePolicy) -> SaveAllOf:
        return SaveAllOf((self, other))


@final
@dataclass(frozen=True, slots=True)
class SaveAnyOf(_Combinable):
    """Saves if any of the policies wants to; with no policies, never."""

    policies: Sequence[SavePolicy]

    def __post_init__(self) -> None:
        check_all(type(self).__name__, self.policies, SavePolicy)

    def should_save(self, moment: SaveMoment, /) -> bool:
        return any(policy.should_save(moment) for policy in self.policies)


@final
@dataclass(frozen=True, slots=True)
class SaveAllOf(_Combinable):
    """Saves if all of the policies want to; with no policies, always."""

    policies: Sequence[SavePolicy]

    def __post_init__(self) -> None:
        check_all(type(self).__name__, self.policies, SavePolicy)

    def should_save(self, moment: SaveMoment, /) -> bool:
        return all(policy.should_save(moment) for policy in self.policies)


@final
@dataclass(frozen=True, slots=True)
class Always(_Combinable):
    """Saves every step that `save` is called with."""

    def should_save(self, moment: SaveMoment, /) -> bool:
        return True


@final
@dataclass(frozen=True, slots=True)
class Never(_Combinable):
    """Saves no step, except with `force=True`."""

    def should_save(self, moment: SaveMoment, /) -> bool:
        return False


@final
@dataclass(frozen=True, slots=True)
class EverySteps(_Combinable):
    """Saves steps whose number is a multiple of `n`."""

    n: int

    def __post_init__(self) -> None:
        check_count("n of EverySteps", self.n, least=1)

    def should_save(self, moment: SaveMoment, /) -> bool:
        return moment.step % self.n == 0


@final
@dataclass(frozen=True, slots=True)
class EverySeconds(_Combinable):
    """Saves when the last save began at least `seconds` ago; or the manager was opened, if there was none."""

    seconds: float

    def __post_init__(self) -> None:
        check_seconds("seconds of EverySeconds", self.seconds)

    def should_save(self, moment: SaveMoment, /) -> bool:
        return moment.now_s - moment.saved_s >= self.seconds


@final
@dataclass(frozen=True, slots=True)
class OnSteps(_Combinable):
    """Saves the steps given."""

    steps: Collection[int]

    def __post_init__(self) -> None:
        check_steps("OnSteps", self.steps)

    def should_save(self, moment: SaveMoment, /) -> bool:
        return moment.step in self.steps


@final
@dataclass(frozen=True, slots=True)
class FirstSave(_Combinable):
    """Saves the first step of a root that has none."""

    def should_save(self, moment: SaveMoment, /) -> bool:
        return not moment.steps


@final
@dataclass(frozen=True, slots=True)
class WhenIdle(_Combinable):
    """Saves as soon as the previous save has finished, so as often as the medium allows.

    Attributes:
        least_seconds: The minimum time between the starts of two saves.
    """

    least_seconds: float = 0.0

    def __post_init__(self) -> None:
        check_seconds("least_seconds of WhenIdle", self.least_seconds, positive=False)

    def should_save(self, moment: SaveMoment, /) -> bool:
        if moment.saving:
            return False

        return not moment.steps or moment.now_s - moment.saved_s >= self.least_seconds


@final
@dataclass(frozen=True, slots=True)
class OnPreemption(_Combinable):
    """Saves the first step after the process was asked to end, by SIGTERM or `manager.preempt()`."""

    def should_save(self, moment: SaveMoment, /) -> bool:
        return moment.preempted


def as_save_policy(given: SavePolicy | int | None) -> SavePolicy:
    """Return a policy: a number means that each step that is a multiple of it is saved, None that all are.

    Raises:
        SpecError: If it is neither.
    """
    if given is None:
        return Always()
    if isinstance(given, int) and not isinstance(given, bool):
        return EverySteps(given)
    if not isinstance(cast("object", given), SavePolicy):
        raise SpecError(f"save_when is a policy such as EverySteps(100), or a number of steps, not {given!r}")

    return cast("SavePolicy", given)


def awaits_preemption(policy: SavePolicy) -> bool:
    """True if a policy is or contains `OnPreemption`."""
    if isinstance(policy, (SaveAnyOf, SaveAllOf)):
        return any(awaits_preemption(part) for part in policy.policies)

    return isinstance(policy, OnPreemption)


def follows_from_step(policy: SavePolicy) -> bool:
    """True if what a policy says depends on nothing but the step; never known of a policy of others."""
    if isinstance(policy, (SaveAnyOf, SaveAllOf)):
        return all(follows_from_step(part) for part in policy.policies)

    return isinstance(policy, (Always, Never, EverySteps, OnSteps))

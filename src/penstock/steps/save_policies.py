"""When to save: small values that look at a step and say yes or no. Pure.

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
)

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol, final, runtime_checkable

from penstock.kernel.errors import SpecError


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class SaveMoment:
    """What a policy may look at."""

    step: int  #: that could be saved
    now_s: float  #: seconds on a clock that never goes back
    steps: Sequence[int] = ()  #: those that are saved, or being saved, ascending
    saved_s: float = 0.0  #: when the last save began, on that clock; or the manager was opened
    saving: bool = False  #: whether a save is under way
    preempted: bool = False  #: whether this process was told to end, and no save was begun since


@runtime_checkable
class SavePolicy(Protocol):
    """Says whether a step is to be saved."""

    def should_save(self, moment: SaveMoment, /) -> bool: ...


class _Combinable:
    """Gives `|` and `&` to the policies here."""

    __slots__ = ()

    def __or__(self: SavePolicy, other: SavePolicy) -> SaveAnyOf:
        return SaveAnyOf((self, other))

    def __and__(self: SavePolicy, other: SavePolicy) -> SaveAllOf:
        return SaveAllOf((self, other))


@final
@dataclass(frozen=True, slots=True)
class SaveAnyOf(_Combinable):
    """If any of the policies wants it; with none, never."""

    policies: Sequence[SavePolicy]

    def should_save(self, moment: SaveMoment, /) -> bool:
        return any(policy.should_save(moment) for policy in self.policies)


@final
@dataclass(frozen=True, slots=True)
class SaveAllOf(_Combinable):
    """If all of the policies want it; with none, always."""

    policies: Sequence[SavePolicy]

    def should_save(self, moment: SaveMoment, /) -> bool:
        return all(policy.should_save(moment) for policy in self.policies)


@final
@dataclass(frozen=True, slots=True)
class Always(_Combinable):
    """Every step that `save` is called with."""

    def should_save(self, moment: SaveMoment, /) -> bool:
        return True


@final
@dataclass(frozen=True, slots=True)
class Never(_Combinable):
    """No step but those saved with `force=True`."""

    def should_save(self, moment: SaveMoment, /) -> bool:
        return False


@final
@dataclass(frozen=True, slots=True)
class EverySteps(_Combinable):
    """Steps that are a multiple of `n`."""

    n: int

    def __post_init__(self) -> None:
        if self.n < 1:
            raise SpecError(f"EverySteps needs a positive number of steps, not {self.n}")

    def should_save(self, moment: SaveMoment, /) -> bool:
        return moment.step % self.n == 0


@final
@dataclass(frozen=True, slots=True)
class EverySeconds(_Combinable):
    """When the last save began at least so long ago, or none did and the manager is open so long."""

    seconds: float

    def __post_init__(self) -> None:
        if not self.seconds > 0:
            raise SpecError(f"EverySeconds needs a positive number of seconds, not {self.seconds}")

    def should_save(self, moment: SaveMoment, /) -> bool:
        return moment.now_s - moment.saved_s >= self.seconds


@final
@dataclass(frozen=True, slots=True)
class OnSteps(_Combinable):
    """The steps given."""

    steps: Collection[int]

    def should_save(self, moment: SaveMoment, /) -> bool:
        return moment.step in self.steps


@final
@dataclass(frozen=True, slots=True)
class FirstSave(_Combinable):
    """Whatever step comes first in a root that has none."""

    def should_save(self, moment: SaveMoment, /) -> bool:
        return not moment.steps


@final
@dataclass(frozen=True, slots=True)
class WhenIdle(_Combinable):
    """As soon as the previous save has finished: as often as the medium can follow.

    Attributes:
        least_seconds: From the beginning of one save to that of the next.
    """

    least_seconds: float = 0.0

    def should_save(self, moment: SaveMoment, /) -> bool:
        if moment.saving:
            return False

        return not moment.steps or moment.now_s - moment.saved_s >= self.least_seconds


@final
@dataclass(frozen=True, slots=True)
class OnPreemption(_Combinable):
    """The first step after the process was told to end: by SIGTERM, or by `manager.preempt()`."""

    def should_save(self, moment: SaveMoment, /) -> bool:
        return moment.preempted

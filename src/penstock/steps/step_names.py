"""Maps steps to directory names and back, and checks the arguments of names and policies. Pure.

Source:
    ORBAX_FORMAT.md §3.4.
"""

from __future__ import annotations

__all__ = (
    "AnyNames",
    "NameFormat",
    "StepNames",
    "check_all",
    "check_count",
    "check_seconds",
    "check_steps",
    "step_number",
)

import operator
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final, Protocol, SupportsIndex, cast, final, runtime_checkable

from penstock.handlers.stores.publishing.paths import TEMPORARY_SUFFIX
from penstock.kernel.errors import SpecError

# Any number of 18 digits fits into 64 bits.
MOST_DIGITS: Final = 18


@runtime_checkable
class NameFormat(Protocol):
    """A way to name steps."""

    def name(self, step: int, /) -> str:
        """Return the name of the directory of a step."""
        ...

    def step(self, name: str, /) -> int | None:
        """Return the step that a name means; None if it is not the name of a step."""
        ...


@final
@dataclass(frozen=True, slots=True)
class StepNames:
    """`7`, `0007`, `step_7` or `step_0007`, as Orbax names its steps.

    Attributes:
        prefix: Stands before the number, followed by an underscore; None for no prefix.
        digits: The width to which the number is padded with zeros; None for no padding. A name with
            any other padding is not a step.
    """

    prefix: str | None = None
    digits: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(cast("object", self.prefix), str | None):
            raise SpecError(f"prefix is a text, not {self.prefix!r}")
        if self.digits is not None:
            check_count("digits", self.digits, least=1)
        if any(part in (self.prefix or "") for part in ("/", "\0", TEMPORARY_SUFFIX)):
            raise SpecError(f"a step cannot be called {self.prefix!r}_<number>")
        if self.digits is not None and not 0 < self.digits <= MOST_DIGITS:
            raise SpecError(f"digits must be 1 to {MOST_DIGITS}, not {self.digits}")

    def name(self, step: int, /) -> str:
        """Return the name of the directory of a step."""
        return f"{self._before}{step:0{self.digits or 1}d}"

    def step(self, name: str, /) -> int | None:
        """Return the step that a name means; None if it is not the name of a step."""
        before = self._before
        number = name[len(before) :]
        if len(number) > MOST_DIGITS or not (number.isascii() and number.isdigit()):
            return None

        step = int(number)
        return step if self.name(step) == name else None

    @property
    def _before(self) -> str:
        return "" if self.prefix is None else f"{self.prefix}_"


@final
@dataclass(frozen=True, slots=True)
class AnyNames:
    """Names steps in the first of several formats, and finds those named in any of them.

    Attributes:
        formats: At least one. A step that exists under several names is found under the first.

    Raises:
        SpecError: If there is none, or one that is no format.
    """

    formats: Sequence[NameFormat] = ()

    def __post_init__(self) -> None:
        formats = cast("object", self.formats)
        listed = isinstance(formats, Sequence) and not isinstance(formats, str | bytes)
        wrong = [each for each in cast("Sequence[object]", formats) if not _is_format(each)] if listed else []
        if not listed or not formats or wrong:
            given = repr(wrong[0]) if wrong else "none" if listed else repr(self.formats)
            raise SpecError(
                "AnyNames takes a list of the formats in which steps may be named, the first for new ones, "
                f"such as AnyNames([StepNames(), StepNames('step')]); it was given {given}"
            )

    def name(self, step: int, /) -> str:
        """Return the name of the directory of a new step."""
        return self.formats[0].name(step)

    def step(self, name: str, /) -> int | None:
        """Return the step that a name means; None if it is not the name of a step."""
        return next((step for step in (form.step(name) for form in self.formats) if step is not None), None)


def _is_format(each: object) -> bool:
    return isinstance(each, NameFormat) and not isinstance(each, type)  # StepNames, without its parentheses


def check_count(what: str, number: object, *, least: int) -> None:
    """Raise `SpecError` if a number of things is no whole number, or too small."""
    try:
        value = operator.index(cast("SupportsIndex", number))
    except TypeError as error:
        raise SpecError(f"{what} is a whole number, not {number!r}") from error

    if value < least:
        raise SpecError(f"{what} is at least {least}, not {number!r}")


def check_seconds(what: str, seconds: object, *, positive: bool = True) -> None:
    """Raise `SpecError` if a time is no number, or has to be positive and is not."""
    if not isinstance(seconds, int | float) or (positive and not seconds > 0):
        raise SpecError(f"{what} is a {'positive ' if positive else ''}number, not {seconds!r}")


def check_all(what: str, policies: object, kind: type[object]) -> None:
    """Raise `SpecError` if policies are no sequence of such; a number stands for one in a manager alone."""
    if not isinstance(policies, Sequence):
        raise SpecError(f"{what} takes a sequence of policies, not {policies!r}")
    for policy in cast("Sequence[object]", policies):
        if not isinstance(policy, kind):
            raise SpecError(f"{what} takes policies, not {policy!r}")


def check_steps(what: str, steps: object) -> None:
    """Raise `SpecError` if steps are no collection of steps."""
    if not isinstance(steps, Collection) or isinstance(steps, str | bytes):
        raise SpecError(f"{what} takes steps such as [10, 100], not {steps!r}")
    for step in cast("Collection[SupportsIndex]", steps):
        step_number(step)


def step_number(step: SupportsIndex) -> int:
    """Return a step as an int.

    Raises:
        SpecError: If it is not an integer, negative, or too large to be found again.
    """
    try:
        number = operator.index(step)
    except TypeError as error:
        raise SpecError(f"a step is an integer, not {step!r}") from error

    if not 0 <= number < 10**MOST_DIGITS:
        raise SpecError(f"a step has 1 to {MOST_DIGITS} digits and no sign, unlike {number}")

    return number

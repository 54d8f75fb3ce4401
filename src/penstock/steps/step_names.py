"""Maps steps to directory names and back. Pure.

Source:
    ORBAX_FORMAT.md §3.4.
"""

from __future__ import annotations

__all__ = ("AnyNames", "NameFormat", "StepNames", "step_number")

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol, SupportsIndex, final, runtime_checkable

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
    """

    formats: Sequence[NameFormat]

    def name(self, step: int, /) -> str:
        """Return the name of the directory of a new step."""
        return self.formats[0].name(step)

    def step(self, name: str, /) -> int | None:
        """Return the step that a name means; None if it is not the name of a step."""
        return next((step for step in (form.step(name) for form in self.formats) if step is not None), None)


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

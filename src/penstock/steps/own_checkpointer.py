"""The Checkpointer of a manager: one of its own, or one that its caller has open."""

from __future__ import annotations

__all__ = ("own_or_given",)

from collections.abc import Mapping
from typing import Any

from penstock.checkpointer.checkpointer import Checkpointer
from penstock.kernel.errors import SpecError


def own_or_given(given: Checkpointer | None, options: Mapping[str, Any]) -> Checkpointer:
    """Return the Checkpointer that was given, or a new one with the options.

    Raises:
        SpecError: If there is one and an option beside it.
    """
    if given is None:
        return Checkpointer(**options)

    unused = [name for name, value in options.items() if value is not None]
    if unused:
        raise SpecError(f"{', '.join(unused)}: an option of the checkpointer, which is given already")

    return given

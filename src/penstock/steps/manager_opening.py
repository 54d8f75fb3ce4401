"""Opens a manager, with a Checkpointer of its own or a given one."""

from __future__ import annotations

__all__ = ("Opening", "check_trash", "own_or_given")

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

from penstock.checkpointer.checkpointer import Checkpointer
from penstock.kernel.errors import SpecError
from penstock.steps.step_names import NameFormat


@final
@dataclass(frozen=True, slots=True)
class Opening:
    """The way in which a root is opened."""

    owned: Checkpointer | None  #: entered and left with it
    metadata: Mapping[str, Any] | None  #: the caller's own, for a new root
    writes: bool  #: whether to create the root
    clean: bool  #: whether to remove what crashed saves left there
    sigterm: bool  #: whether a SIGTERM counts as a preemption


def own_or_given(
    given: Checkpointer | None, options: Mapping[str, Any]
) -> tuple[Checkpointer, Checkpointer | None]:
    """Return the Checkpointer that was given, or a new one with the options; and that one if it is new.

    Raises:
        SpecError: If there is one and an option beside it.
    """
    if given is None:
        made = Checkpointer(**options)
        return made, made

    unused = [name for name, value in options.items() if value is not None and value != ()]
    if unused:
        raise SpecError(f"{', '.join(unused)}: an option of the checkpointer, which is given already")

    return given, None


def check_trash(trash: str | None, names: NameFormat) -> None:
    """Refuse a name for the folder of deleted steps that is no plain name, or that of a step.

    Raises:
        SpecError: If it is one.
    """
    if trash is not None and (not trash or "/" in trash or names.step(trash) is not None):
        raise SpecError(f"a folder for deleted steps cannot be called {trash!r}")

"""Sharing unchanged files between steps: a manager names the earlier step, handlers of trees link to it."""

from __future__ import annotations

__all__ = ("StepLinks", "links_in_force")

import os
from collections.abc import Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final, final

from penstock.handlers.formats.common.temporary_names import TEMPORARY_SUFFIX


@final
class StepLinks:
    """A step that is being saved, and the one whose files it may share.

    Args:
        step: The path that it will have.
        base: The path of the other one; None if there is none.
    """

    def __init__(self, step: str, base: str | None) -> None:
        self._step = step
        self._base = base
        self._saved: list[tuple[str, str, Callable[[str, str], object]]] = []

    @contextmanager
    def in_force(self) -> Generator[None]:
        """Make it known to handlers that are called inside."""
        token = _IN_FORCE.set(self)
        try:
            yield
        finally:
            _IN_FORCE.reset(token)

    def base_of(self, directory: str) -> str | None:
        """Return the directory of the base that matches one being saved; None if it has none."""
        item = self._item(directory)
        path = "" if item is None or self._base is None else os.path.join(self._base, item)
        return path if path and os.path.isdir(path) else None

    def when_complete(self, directory: str, tell: Callable[[str, str], object]) -> None:
        """Call `tell` once the step is complete.

        Args:
            directory: That is being saved.
            tell: Takes its path then, and the one that it will have.
        """
        item = self._item(directory)
        if item is not None:
            built = os.path.join(os.path.dirname(directory), item)
            self._saved.append((built, os.path.join(self._step, item), tell))

    def complete(self) -> None:
        """Call everybody who asked for it: all is written, and the step is about to get its own path.

        Afterwards somebody else could have replaced it there.
        """
        for built, path, tell in self._saved:
            tell(built, path)

        self._saved.clear()

    def _item(self, directory: str) -> str | None:
        """Return the item that a directory becomes; None if it does not belong to the step."""
        parent, name = os.path.split(directory)
        return (
            name.removesuffix(TEMPORARY_SUFFIX)
            if parent.removesuffix(TEMPORARY_SUFFIX) == self._step
            else None
        )


_IN_FORCE: Final[ContextVar[StepLinks | None]] = ContextVar("penstock.orbax.links", default=None)


def links_in_force() -> StepLinks | None:
    """Return the links of the manager that is saving right now; None if none is."""
    return _IN_FORCE.get()

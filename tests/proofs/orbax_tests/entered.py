"""Which functions of penstock's face a test enters: one that enters none runs Orbax's own code alone."""

from __future__ import annotations

__all__ = ("Entered",)

import sys
import threading
from inspect import CO_OPTIMIZED
from pathlib import Path
from types import CodeType, FrameType

import penstock.orbax

_FACE = Path(penstock.orbax.__file__).parent
# It answers whenever Orbax's code asks what an object is.
_ASKED_BY_ORBAX = _FACE / "installation.py"


class Entered:
    """Notes the functions of `penstock.orbax` that are called, in any thread, since it was cleared.

    What every object has does not count: its making, its comparison, its text.
    """

    def __init__(self) -> None:
        self.names: set[str] = set()
        self._known: dict[CodeType, str] = {}

    def start(self) -> None:
        """Begin, in this thread and in each that is started from now on."""
        threading.setprofile(self._note)
        sys.setprofile(self._note)

    def clear(self) -> None:
        """Forget what was noted, and go on."""
        self.names.clear()
        sys.setprofile(self._note)  # a time limit that ends a test in `_note` has ended the noting, too

    def _note(self, frame: FrameType, event: str, argument: object) -> None:
        del argument
        if event != "call":
            return

        code = frame.f_code
        name = self._known.get(code)
        if name is None:
            name = self._known[code] = _counted(code)
        if name:
            self.names.add(name)


def _counted(code: CodeType) -> str:
    """Return the name of a function that counts, or nothing."""
    path = Path(code.co_filename)
    if not code.co_flags & CO_OPTIMIZED:  # the body of a class or a module
        return ""
    if not path.is_relative_to(_FACE) or path == _ASKED_BY_ORBAX or code.co_name.startswith(("__", "<")):
        return ""

    return f"{path.stem}.{code.co_qualname}"

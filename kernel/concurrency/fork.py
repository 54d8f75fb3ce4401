"""The process that owns an object. A fork of it has neither its event loop nor its threads."""

from __future__ import annotations

__all__ = ("HomeProcess",)

import os
from typing import final

from penstock.kernel.errors import ForkedError


@final
class HomeProcess:
    """The process that created this object."""

    __slots__ = ("_pid",)

    def __init__(self) -> None:
        self._pid = os.getpid()

    @property
    def is_here(self) -> bool:
        """True if the code runs in that process, and not in a fork of it."""
        return os.getpid() == self._pid

    def check(self, what: str) -> None:
        """Raise unless this is that process.

        Raises:
            ForkedError: In a fork, where anything that waits for the loop would hang.
        """
        if not self.is_here:
            raise ForkedError(what, self._pid)

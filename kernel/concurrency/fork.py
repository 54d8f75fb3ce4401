"""The process that something belongs to: in a fork of it there is neither its event loop nor its threads."""

from __future__ import annotations

__all__ = ("HomeProcess",)

import os
from typing import final

from penstock.kernel.errors import ForkedError


@final
class HomeProcess:
    """The process that this is made in."""

    __slots__ = ("_pid",)

    def __init__(self) -> None:
        self._pid = os.getpid()

    @property
    def is_here(self) -> bool:
        """Whether this is still that process, and not a fork of it."""
        return os.getpid() == self._pid

    def check(self, what: str) -> None:
        """Raise unless this is that process.

        Raises:
            ForkedError: In a fork of it, where whatever waits for its loop would wait for ever.
        """
        if not self.is_here:
            raise ForkedError(what, self._pid)

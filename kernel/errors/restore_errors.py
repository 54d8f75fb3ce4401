"""Errors of a restore, or of a tool that reads, that was not begun or was given up."""

from __future__ import annotations

__all__ = ("InsufficientMemoryError", "ReplacedError")

from typing import final

from penstock.kernel.errors.families import PenstockError, StorageError


@final
class InsufficientMemoryError(PenstockError, MemoryError):
    """The machine has less memory than the result would take. Pass `only`, `mmap` or another sharding.

    Attributes:
        path: The checkpoint.
        key_path: The largest leaf; None if it is not known.
        asked: Bytes of the whole result; None if it is not known.
        available: Bytes of memory that there are; None if it is not known.
    """

    def __init__(
        self, path: str, asked: int | None = None, available: int | None = None, key_path: str | None = None
    ) -> None:
        figures = "" if asked is None else f": {asked} bytes were asked for, of {available} that there are"
        largest = f" (the largest leaf is {key_path})" if key_path is not None else ""
        super().__init__(f"{path}: there is not enough memory{figures}{largest}")
        self.path, self.asked, self.available, self.key_path = path, asked, available, key_path


@final
class ReplacedError(StorageError):
    """What was being read was replaced by something else, and so nothing was made of it.

    Restores and tools begin again by themselves. A stream, which has given values away, cannot.

    Attributes:
        times: How many attempts there were.
    """

    def __init__(self, path: str, times: int = 1) -> None:
        often = "" if times == 1 else f" {times} times"
        advice = "" if times == 1 else "; read it when nobody overwrites it, or have steps saved side by side"
        super().__init__("read", path, f"was replaced{often} while it was being read{advice}")
        self.times = times

"""Errors of scarce means, of which there are too little, and of sources that were replaced meanwhile."""

from __future__ import annotations

__all__ = ("InsufficientMemoryError", "NoThreadError", "ReplacedError")

from typing import final

from penstock.kernel.errors.families import PenstockError, StorageError


@final
class InsufficientMemoryError(PenstockError, MemoryError):
    """The machine has less memory than the result of a restore would take, or a save would.

    Pass `only`, `mmap` or another sharding to the restore, or a lower `memory_limit` to the Checkpointer.

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
class NoThreadError(PenstockError, RuntimeError):
    """The operating system refuses another thread. Have fewer, or raise the limit."""

    def __init__(self, problem: str) -> None:
        super().__init__(
            f"no thread can be started ({problem}): have fewer threads and processes, or raise their limit "
            "(`ulimit -u`, in a container its `pids.max`)"
        )


@final
class ReplacedError(StorageError):
    """The source was replaced while it was being read, and so nothing was made of it.

    Restores and tools begin again by themselves. A stream, which has given values away, cannot.

    Attributes:
        times: How many attempts there were.
    """

    def __init__(self, path: str, times: int = 1) -> None:
        often = "" if times == 1 else f" {times} times"
        advice = "" if times == 1 else "; read it when nobody overwrites it, or have steps saved side by side"
        super().__init__("read", path, f"was replaced{often} while it was being read{advice}")
        self.times = times

"""Which files this process has open."""

from __future__ import annotations

__all__ = ("at_most", "open_below", "open_paths")

import os
import resource
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.memory_folder import MEMORY


def open_paths() -> Counter[str]:
    """The files and folders that are open, wherever they are, and how often; no pipes, no sockets.

    What the system says of itself does not count: a checkpointer that an earlier test left to the
    collector may be reading how much memory is free.
    """
    descriptors = Path("/proc/self/fd")
    if not descriptors.exists():
        return Counter()

    found: Counter[str] = Counter()
    for descriptor in os.listdir(descriptors):
        with suppress(FileNotFoundError):  # the descriptor of the listing itself is closed by now
            found[os.readlink(descriptors / descriptor)] += 1

    return Counter({target: n for target, n in found.items() if _is_stored(target)})


def open_below(folder: Path) -> list[str]:
    """The files and folders in a folder that are open, each as often as it is."""
    return sorted(target for target in open_paths().elements() if Path(target).is_relative_to(folder))


@contextmanager
def at_most(descriptors: int) -> Generator[None]:
    """Let this process open so many files more than it has open, and no more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + descriptors, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def _is_stored(target: str) -> bool:
    if target.startswith(f"{MEMORY}/"):
        return True

    return target.startswith("/") and not target.startswith(("/proc/", "/sys/", "/dev/"))

"""Reports to `jax.monitoring` under the names that Orbax uses, so that existing listeners keep working.

Durations of steps that penstock does not have, such as merging the files of processes, are not reported.

Source:
    The names are those that Orbax 0.12.8 uses.
"""

from __future__ import annotations

__all__ = (
    "READ",
    "WRITE",
    "WRITE_ASYNC",
    "record_saved_duration",
    "recorded",
    "tell_of_async_save",
    "timed",
)

import time
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, Final, cast

import jax

READ: Final = "/jax/orbax/read/"
WRITE: Final = "/jax/orbax/write/"
WRITE_ASYNC: Final = ("/jax/orbax/write/async/", "/jax/checkpoint/write/async/")


@contextmanager
def recorded(prefix: str) -> Generator[None]:
    """Report the start of an operation and, unless it raises, its duration and its success."""
    _tell(f"{prefix}start")
    with timed(f"{prefix}blocking_duration_secs", f"{prefix}total_duration_secs"):
        yield

    _tell(f"{prefix}success")


@contextmanager
def timed(*names: str) -> Generator[None]:
    """Report the duration of the block in seconds, unless it raises."""
    since = time.perf_counter()
    yield
    _tell_duration(time.perf_counter() - since, *names)


def tell_of_async_save(begun: float | None = None) -> None:
    """Report the start of a save in the background or, given its `time.perf_counter()` then, its success."""
    if begun is None:
        _tell(f"{WRITE_ASYNC[0]}start")
        return

    taken = time.perf_counter() - begun
    _tell_duration(taken, *[f"{prefix}total_duration_secs" for prefix in WRITE_ASYNC])
    _tell(f"{WRITE}success")


def record_saved_duration(checkpoint_start_time: float) -> None:
    """Report how much of the program's time a checkpoint covers: since the one before, or the start.

    Args:
        checkpoint_start_time: When its save began, in seconds since the epoch.
    """
    covered = checkpoint_start_time - _LATEST_SAVE.began
    _LATEST_SAVE.began = checkpoint_start_time
    _tell_duration(covered, "/jax/checkpoint/write/duration_since_last_checkpoint_secs")


class _LatestSave:
    """The time at which the latest save of this process began, or the process itself."""

    def __init__(self) -> None:
        self.began = time.time()


_LATEST_SAVE: Final = _LatestSave()
"""What `record_saved_duration` reports is of the process: the function takes nothing that could hold it."""


def _tell(name: str) -> None:
    cast("Any", jax.monitoring).record_event(name)


def _tell_duration(seconds: float, *names: str) -> None:
    for name in names:
        cast("Any", jax.monitoring).record_event_duration_secs(name, seconds)

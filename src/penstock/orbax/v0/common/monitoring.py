"""What Orbax tells `jax.monitoring`, under the same names: whoever listens to it goes on hearing.

Durations of what is not a part of penstock's way to save, such as merging what processes wrote, are not told.

Source:
    The names are those that Orbax 0.12.8 uses.
"""

from __future__ import annotations

__all__ = ("READ", "WRITE", "WRITE_ASYNC", "recorded", "tell_of_async_save", "timed")

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
    """Tell that an operation begins, and if it does not raise, how long it took and that it is well."""
    _tell(f"{prefix}start")
    with timed(f"{prefix}blocking_duration_secs", f"{prefix}total_duration_secs"):
        yield

    _tell(f"{prefix}success")


@contextmanager
def timed(*names: str) -> Generator[None]:
    """Tell how long the block took, in seconds, if it does not raise."""
    since = time.perf_counter()
    yield
    _tell_duration(time.perf_counter() - since, *names)


def tell_of_async_save(begun: float | None = None) -> None:
    """Tell that a save in the background begins; or, with its `time.perf_counter` then, that it is well."""
    if begun is None:
        _tell(f"{WRITE_ASYNC[0]}start")
        return

    taken = time.perf_counter() - begun
    _tell_duration(taken, *[f"{prefix}total_duration_secs" for prefix in WRITE_ASYNC])
    _tell(f"{WRITE}success")


def _tell(name: str) -> None:
    cast("Any", jax.monitoring).record_event(name)


def _tell_duration(seconds: float, *names: str) -> None:
    for name in names:
        cast("Any", jax.monitoring).record_event_duration_secs(name, seconds)

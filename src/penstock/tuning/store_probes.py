"""What a store does by itself, without a pipeline: bytes through and past the page cache, and small files."""

from __future__ import annotations

__all__ = ("probe_store",)

import os
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Final, Literal

import numpy as np

from penstock.handlers.stores.local import LocalStore
from penstock.kernel.errors import StorageError
from penstock.kernel.protocols.stores import Store
from penstock.kernel.reports.stage_report import size_text
from penstock.kernel.storage.paths import bucket_of

_MOST_BYTES: Final = 64 << 20
_PIECE: Final = 16 << 20
_SMALL: Final = bytes(4096)
_TIMES: Final = 9


def probe_store(
    store: Store, directory: str, nbytes: int, clock: Callable[[], float] = time.perf_counter
) -> Sequence[str]:
    """Return a sentence for each thing that was measured. Blocking.

    Args:
        store: Where the directory lies.
        directory: Exists. What is written there stays: the caller removes it.
        nbytes: How much is written at once, at most; no more than 64 MiB is.
        clock: Seconds.
    """
    nbytes = max(min(nbytes, _MOST_BYTES), 1)
    small = _small_file(store, os.path.join(directory, "probe-small"), clock)
    if bucket_of(directory) is not None:
        return [_object(store, os.path.join(directory, "probe-large"), nbytes, clock), small]

    return [
        _large_file("buffered", directory, nbytes, clock),
        _large_file("direct", directory, nbytes, clock),
        small,
    ]


def _large_file(
    io: Literal["buffered", "direct"], directory: str, nbytes: int, clock: Callable[[], float]
) -> str:
    way = "through the page cache" if io == "buffered" else "past the page cache"
    try:
        return f"One file of {size_text(nbytes)} {way}: {_timed_file(io, directory, nbytes, clock)}."
    except StorageError as error:
        return f"One file {way}: not possible here ({error})."


def _timed_file(
    io: Literal["buffered", "direct"], directory: str, nbytes: int, clock: Callable[[], float]
) -> str:
    store, path = LocalStore(io=io), os.path.join(directory, f"probe-{io}")
    piece = memoryview(np.random.default_rng(0).bytes(min(nbytes, _PIECE)))
    start = clock()
    file = store.create_data_file(path)
    try:
        for offset in range(0, nbytes, _PIECE):
            file.write_at(offset, [piece[: nbytes - offset]])

        file.sync()
        went_direct = file.transfers.direct_bytes > 0
    finally:
        file.close()

    seconds = max(clock() - start, 1e-9)
    written = f"durable after {seconds:.3f} s ({size_text(nbytes / seconds)}/s)"
    return (
        written if io == "buffered" or went_direct else f"{written}, but the file system gives no direct I/O"
    )


def _object(store: Store, path: str, nbytes: int, clock: Callable[[], float]) -> str:
    data = np.random.default_rng(0).bytes(nbytes)
    start = clock()
    store.write_file(path, data)
    put = clock()
    store.read_file(path)
    got = clock()
    return f"One object of {size_text(nbytes)}: put in {put - start:.3f} s, got in {got - put:.3f} s."


def _small_file(store: Store, path: str, clock: Callable[[], float]) -> str:
    seconds: list[float] = []
    for _ in range(_TIMES):
        start = clock()
        store.write_file(path, _SMALL)
        seconds.append(clock() - start)

    return f"4 KiB are durable after {1000 * median(seconds):.1f} ms (median of {_TIMES})."

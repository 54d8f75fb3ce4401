"""A store that fails, hangs or tears a write on request. Public as `penstock.testing.FaultyStore`."""

from __future__ import annotations

__all__ = ("UNCOUNTED", "FaultyStore", "Hang", "Operation")

import errno
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeVar, final

from anyio import to_thread

from penstock.kernel.errors import StorageError
from penstock.kernel.protocols.stores import (
    BuildToken,
    DataFile,
    ReadableFile,
    Store,
    StoreWrapper,
    Transfers,
)

T = TypeVar("T")

UNCOUNTED: Final = frozenset(
    {
        "kvstore_spec",
        "relies_on_single_writer",
        "request_figures",
        "collect",
        "hold_root",
        "renew_leases",
        "marked_folders",
        "is_unmarked",
    }
)
"""Of these, none is counted: they do no I/O, or tests of faults have no use for them."""

_CREATING: Final = frozenset({"create_data_file", "create_long_file", "open_for_writing"})
"""These return a file that is written, whose operations are counted, too."""


@final
@dataclass(frozen=True, slots=True)
class _Tear:
    error: Exception | None


@final
class FaultyStore(StoreWrapper):
    """A store that fails, hangs or tears a write where the test says, and counts operations.

    Operations are counted from 1, including those of the files it opens. A fault happens once and
    before the operation does anything, except for `close`, which closes the file in any case.
    It can do what the inner store can, and no more. Thread-safe.

    Args:
        inner: The store that does the work.
    """

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self._lock = threading.Lock()
        self._operations: list[Operation] = []
        self._counts: Counter[str] = Counter()
        self._faults: dict[int | tuple[str, int], Exception | Hang | _Tear] = {}
        self._open_files = 0

    def call(self, operation: str, *given: Any, **options: Any) -> Any:
        action = partial(super().call, operation, *given, **options)
        if operation in UNCOUNTED:
            return action()

        path, torn = _path_of(operation, *given), None
        if operation in _CREATING:
            return self.perform(operation, path, lambda: _FaultyDataFile(self, path, action()))
        if operation == "open_data_file":
            return self.perform(operation, path, lambda: _FaultyReadableFile(self, path, action()))
        if operation == "write_file" and not options.get("create"):  # else it is whole or not at all
            data = given[1]
            torn = partial(super().call, operation, path, data[: len(data) // 2])

        return self.perform(operation, path, action, torn)

    @property
    def operations(self) -> tuple[Operation, ...]:
        """The operations begun so far, in order."""
        with self._lock:
            return tuple(self._operations)

    @property
    def open_files(self) -> int:
        """Files opened and not yet closed."""
        return self._open_files

    def fail_at(self, k: int, error: Exception | None = None) -> None:
        """Have the k-th operation raise `error`, by default a `StorageError` with EIO."""
        self._faults[k] = error or _injected()

    def fail_on(self, name: str, nth: int = 1, error: Exception | None = None) -> None:
        """Have the n-th operation called `name` raise `error`, by default a `StorageError` with EIO."""
        self._faults[name, nth] = error or _injected()

    def hang_at(self, k: int, then: Exception | None = None) -> Hang:
        """Have the k-th operation block its thread until the hang is released."""
        hang = self._faults[k] = Hang(then)
        return hang

    def hang_on(self, name: str, nth: int = 1, then: Exception | None = None) -> Hang:
        """Have the n-th operation called `name` block its thread until the hang is released."""
        hang = self._faults[name, nth] = Hang(then)
        return hang

    def tear_at(self, k: int, error: Exception | None = None) -> None:
        """Have the k-th operation write the first half of its bytes, if it has any, and fail."""
        self._faults[k] = _Tear(error)

    def tear_on(self, name: str, nth: int = 1, error: Exception | None = None) -> None:
        """Have the n-th operation called `name` write the first half of its bytes and fail."""
        self._faults[name, nth] = _Tear(error)

    def forget_faults(self) -> None:
        """Let every operation from now on work normally."""
        with self._lock:
            self._faults.clear()

    def perform(
        self, name: str, path: str, action: Callable[[], T], torn: Callable[[], object] | None = None
    ) -> T:
        """Count an operation and perform it, or the fault set for it. Also used by the files."""
        operation = Operation(name, path)
        with self._lock:
            self._operations.append(operation)
            self._counts[name] += 1
            by_name = self._faults.pop((name, self._counts[name]), None)
            fault = self._faults.pop(len(self._operations), None) or by_name

        if isinstance(fault, Hang):
            fault.hold(operation)
        elif isinstance(fault, _Tear):
            if torn is not None:
                torn()

            raise fault.error or _injected()
        elif fault is not None:
            raise fault

        return action()

    def opened(self, by: int) -> None:
        """Note that so many files were opened, or closed if it is negative. Called by the files."""
        with self._lock:
            self._open_files += by


@final
class _FaultyDataFile:
    def __init__(self, store: FaultyStore, path: str, inner: DataFile) -> None:
        self._store = store
        self._path = path
        self._inner = inner
        self._is_open = True
        store.opened(1)

    @property
    def transfers(self) -> Transfers:
        return self._inner.transfers

    def allocate(self, nbytes: int) -> None:
        self._store.perform("data.allocate", self._path, lambda: self._inner.allocate(nbytes))

    def write_at(self, offset: int, buffers: Sequence[memoryview]) -> None:
        def torn() -> None:
            whole = b"".join(buffers)
            self._inner.write_at(offset, [memoryview(whole)[: len(whole) // 2]])

        self._store.perform("data.write_at", self._path, lambda: self._inner.write_at(offset, buffers), torn)

    def sync(self) -> None:
        self._store.perform("data.sync", self._path, self._inner.sync)

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            self._inner.close()
            self._store.opened(-1)
            self._store.perform("data.close", self._path, lambda: None)


@final
class _FaultyReadableFile:
    def __init__(self, store: FaultyStore, path: str, inner: ReadableFile) -> None:
        self._store = store
        self._path = path
        self._inner = inner
        self._is_open = True
        store.opened(1)

    @property
    def transfers(self) -> Transfers:
        return self._inner.transfers

    def read_at(self, offset: int, buffers: Sequence[memoryview]) -> None:
        self._store.perform("file.read_at", self._path, lambda: self._inner.read_at(offset, buffers))

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            self._inner.close()
            self._store.opened(-1)
            self._store.perform("file.close", self._path, lambda: None)


def _path_of(operation: str, first: object = "", *_: object) -> str:
    """Return the path that an operation is about; empty if it is about many."""
    if isinstance(first, BuildToken):
        return first.place if operation == "discard" else first.built

    return first if isinstance(first, str) else ""


def _injected() -> StorageError:
    return StorageError("test", "FaultyStore", "injected failure", errno.EIO)


@final
@dataclass(frozen=True, slots=True)
class Operation:
    """One call of a store, or of a file it opened."""

    name: str  #: as in `publish`, `data.write_at` (of a file being written), `file.read_at` (being read)
    path: str


@final
class Hang:
    """An operation that blocks until it is released.

    Args:
        then: What it raises when released; None to go on as usual.
        limit_s: Seconds after which it fails by itself, so that a broken test ends.
    """

    __slots__ = ("_limit_s", "_reached", "_released", "_then")

    def __init__(self, then: Exception | None = None, limit_s: float = 30.0) -> None:
        self._then = then
        self._limit_s = limit_s
        self._reached = threading.Event()
        self._released = threading.Event()

    async def wait_reached(self) -> None:
        """Wait until the operation hangs.

        Cancellation:
            The waiting thread is abandoned, for no longer than `limit_s`.
        """
        await to_thread.run_sync(self.wait_reached_blocking, abandon_on_cancel=True)

    def wait_reached_blocking(self) -> None:
        """Wait until the operation hangs, in a thread."""
        if not self._reached.wait(self._limit_s):
            raise TimeoutError(f"the operation did not begin within {self._limit_s} s")

    def release(self) -> None:
        """Let the operation go on. Idempotent; may be called before the operation begins."""
        self._released.set()

    def skip(self) -> None:
        """Note that the operation will not happen, which ends all waits for it. Idempotent."""
        self._reached.set()
        self._released.set()

    def hold(self, operation: Operation) -> None:
        """Block the calling thread, which performs the operation. Called by the store.

        Raises:
            StorageError: If it is not released in time.
            Exception: The one given as `then`.
        """
        self._reached.set()
        if not self._released.wait(self._limit_s):
            raise StorageError(operation.name, operation.path, f"still hung after {self._limit_s} s")
        if self._then is not None:
            raise self._then

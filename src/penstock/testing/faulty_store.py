"""A store that fails, hangs or tears a write on request. Public as `penstock.testing.FaultyStore`."""

from __future__ import annotations

__all__ = ("UNCOUNTED", "FaultyStore", "Hang", "Operation")

import errno
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Literal, TypeVar, cast, final

from anyio import to_thread

from penstock.kernel.errors import StorageError
from penstock.kernel.protocols.store_capabilities import Hold, Placement
from penstock.kernel.protocols.stores import BuildToken, DataFile, ReadableFile, Store, Transfers

T = TypeVar("T")

UNCOUNTED: Final = frozenset(
    {
        "kvstore_spec",
        "relies_on_single_writer",
        "over_network",
        "placement",
        "request_figures",
        "collect",
        "hold_root",
        "renew_leases",
        "marked_folders",
        "is_unmarked",
    }
)
"""Of these, none is counted: they do no I/O, or tests of faults have no use for them."""

_OPENING: Final = frozenset({"create_long_file", "open_for_writing"})
"""These return a file, whose operations are counted, too."""


@final
@dataclass(frozen=True, slots=True)
class _Tear:
    error: Exception | None


@final
class FaultyStore:
    """A store that fails, hangs or tears a write where the test says, and counts operations.

    Operations are counted from 1, including those of the files it opens. A fault happens once and
    before the operation does anything, except for `close`, which closes the file in any case.
    It has the capabilities of the inner store and no others. Thread-safe.

    Args:
        inner: The store that does the work.
    """

    free_bytes: Callable[[str], int | None]
    make_held: Callable[[str], Hold]
    placement: Placement

    def __init__(self, inner: Store) -> None:
        self._inner = inner
        self._lock = threading.Lock()
        self._operations: list[Operation] = []
        self._counts: Counter[str] = Counter()
        self._faults: dict[int | tuple[str, int], Exception | Hang | _Tear] = {}
        self._open_files = 0

    def __getattr__(self, name: str) -> Any:
        """Return what the inner store can do beyond the required part, as `isinstance` then finds."""
        if name.startswith("_"):
            raise AttributeError(name)  # also while it is unpickled, before there is an inner store

        own = getattr(self._inner, name)
        if name in UNCOUNTED or not callable(own):
            return own

        def performed(*arguments: Any, **options: Any) -> Any:
            first = arguments[0] if arguments else ""
            path = first.built if isinstance(first, BuildToken) else first if isinstance(first, str) else ""
            if name in _OPENING:

                def open_file(_: str) -> DataFile:
                    return cast("DataFile", own(*arguments, **options))

                return self.perform(name, path, lambda: self._wrap_data(path, open_file))

            return self.perform(name, path, lambda: own(*arguments, **options))

        return performed

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

    def kind(self, path: str) -> Literal["file", "directory"] | None:
        return self.perform("kind", path, lambda: self._inner.kind(path))

    def size(self, path: str) -> int:
        return self.perform("size", path, lambda: self._inner.size(path))

    def identity(self, path: str) -> object:
        return self.perform("identity", path, lambda: self._inner.identity(path))

    def check_writable(self, path: str) -> None:
        self.perform("check_writable", path, lambda: self._inner.check_writable(path))

    def make_directory(self, path: str) -> None:
        self.perform("make_directory", path, lambda: self._inner.make_directory(path))

    def list_directory(self, path: str) -> Sequence[str]:
        return self.perform("list_directory", path, lambda: self._inner.list_directory(path))

    def read_file(self, path: str) -> bytes:
        return self.perform("read_file", path, lambda: self._inner.read_file(path))

    def write_file(self, path: str, data: bytes, *, create: bool = False) -> bool:
        def torn() -> None:
            if not create:  # which is whole or not at all
                self._inner.write_file(path, data[: len(data) // 2])

        write = partial(self._inner.write_file, path, data, create=create)
        return self.perform("write_file", path, write, torn)

    def create_data_file(self, path: str) -> DataFile:
        return self.perform(
            "create_data_file", path, lambda: self._wrap_data(path, self._inner.create_data_file)
        )

    def open_data_file(self, path: str) -> ReadableFile:
        return self.perform("open_data_file", path, lambda: self._wrap_readable(path))

    def sync_directory(self, path: str) -> None:
        self.perform("sync_directory", path, lambda: self._inner.sync_directory(path))

    def remove_tree(self, path: str) -> None:
        self.perform("remove_tree", path, lambda: self._inner.remove_tree(path))

    def begin_build(self, final: str, beside: str, file: str | None = None) -> BuildToken:
        return self.perform("begin_build", final, lambda: self._inner.begin_build(final, beside, file))

    def publish(self, token: BuildToken) -> None:
        self.perform("publish", token.built, lambda: self._inner.publish(token))

    def discard(self, token: BuildToken) -> None:
        self.perform("discard", token.place, lambda: self._inner.discard(token))

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

    def closed(self) -> None:
        """Note that a file was closed. Called by the files."""
        with self._lock:
            self._open_files -= 1

    def _wrap_data(self, path: str, open_file: Callable[[str], DataFile]) -> _FaultyDataFile:
        file = _FaultyDataFile(self, path, open_file(path))
        self._opened()
        return file

    def _wrap_readable(self, path: str) -> _FaultyReadableFile:
        file = _FaultyReadableFile(self, path, self._inner.open_data_file(path))
        self._opened()
        return file

    def _opened(self) -> None:
        with self._lock:
            self._open_files += 1


@final
class _FaultyDataFile:
    def __init__(self, store: FaultyStore, path: str, inner: DataFile) -> None:
        self._store = store
        self._path = path
        self._inner = inner
        self._is_open = True

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
            self._store.closed()
            self._store.perform("data.close", self._path, lambda: None)


@final
class _FaultyReadableFile:
    def __init__(self, store: FaultyStore, path: str, inner: ReadableFile) -> None:
        self._store = store
        self._path = path
        self._inner = inner
        self._is_open = True

    @property
    def transfers(self) -> Transfers:
        return self._inner.transfers

    def read_at(self, offset: int, buffers: Sequence[memoryview]) -> None:
        self._store.perform("file.read_at", self._path, lambda: self._inner.read_at(offset, buffers))

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            self._inner.close()
            self._store.closed()
            self._store.perform("file.close", self._path, lambda: None)


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
            The waiting thread is left behind, for no longer than `limit_s`.
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

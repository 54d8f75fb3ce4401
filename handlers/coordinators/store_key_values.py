"""Small values that several processes see as files in a store: a service for those that have no other.

For processes whose job has ended, and its service with it. It is slow: each call is some operations of the
store, and who waits looks again and again.
"""

from __future__ import annotations

__all__ = ("StoreKeyValues",)

import errno
import time
import uuid
from collections.abc import Iterator, Mapping
from typing import Final, final
from urllib.parse import quote, unquote

from crc32c import crc32c

from penstock.kernel.errors import CoordinationError, StorageError
from penstock.kernel.protocols.stores import Store

_VALUE, _COUNT = ".value", ".count"
"""End the names of directories: with a file that has the value, and with a file for each count."""

_FILE: Final = "is"  # in a directory, since stores remove directories

_LOOKS_S: Final = (0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
"""Between looks for a value; the last again and again. Each is a request, and who waits for a host that is
lost looks for as long as no other job comes."""

_SEAL_BYTES: Final = 4
_TORN_READS, _TORN_S = 50, 0.01

_GONE: Final = frozenset({errno.ENOENT, errno.ENOTDIR})


@final
class StoreKeyValues:
    """The `KeyValues` of processes that see one store. Thread-safe.

    Args:
        store: It creates a file in one step, which must not exist.
        place: A directory in it for this alone; made if it does not exist.
    """

    __slots__ = ("_place", "_store")

    def __init__(self, store: Store, place: str) -> None:
        self._store, self._place = store, place

    def put(self, key: str, value: bytes, replace: bool, /) -> bool:
        """See `KeyValues.put`."""
        place = self._path(key) + _VALUE
        try:
            self._store.make_directory(place)
            return self._store.write_file(f"{place}/{_FILE}", _sealed(value), create=not replace)
        except StorageError as error:
            if error.errno == errno.EEXIST and not replace:
                return False

            raise _translated(error) from error

    def wait(self, key: str, timeout_s: float, /) -> bytes | None:
        """See `KeyValues.wait`."""
        end, path, n_looks = time.monotonic() + timeout_s, f"{self._path(key)}{_VALUE}/{_FILE}", 0
        while (found := self._read(path)) is None:
            left_s = end - time.monotonic()
            if left_s <= 0:
                break

            time.sleep(min(_LOOKS_S[min(n_looks, len(_LOOKS_S) - 1)], left_s))
            n_looks += 1

        return found

    def under(self, prefix: str, /) -> Mapping[str, bytes]:
        """See `KeyValues.under`."""
        found: dict[str, bytes] = {}
        for key in self._keys(self._path(prefix.rstrip("/"))):
            value = self._read(f"{self._path(prefix + key)}{_VALUE}/{_FILE}")
            if value is not None:  # it was deleted just now
                found[key] = value

        return found

    def count(self, key: str, /) -> int:
        """See `KeyValues.count`."""
        place, mine = self._path(key) + _COUNT, uuid.uuid4().bytes
        counted = 1 + max([int(name) for name in self._list(place) if name.isdigit()], default=0)
        try:
            self._store.make_directory(place)
            while not self._claim(f"{place}/{counted}", mine):
                counted += 1
        except StorageError as error:
            raise _translated(error) from error

        return counted

    def delete(self, prefix: str, /) -> None:
        """See `KeyValues.delete`."""
        path = self._path(prefix.rstrip("/"))
        ends = ("",) if prefix.endswith("/") else (_VALUE, _COUNT)
        try:
            for end in ends:
                if self._store.kind(path + end) is not None:
                    self._store.remove_tree(path + end)
        except StorageError as error:
            if error.errno not in _GONE:
                raise _translated(error) from error

    def _claim(self, path: str, mine: bytes) -> bool:
        try:
            return self._store.write_file(path, mine, create=True)
        except StorageError as error:
            if error.errno == errno.EEXIST:
                return False

            raise

    def _path(self, key: str) -> str:
        return "/".join((self._place, *[quote(part, safe="") for part in key.split("/") if part]))

    def _read(self, path: str) -> bytes | None:
        """Return a value. One that is just being replaced may be seen in part: it is read again."""
        for _ in range(_TORN_READS):
            try:
                found = self._store.read_files([path])[0]
            except StorageError as error:
                if error.errno in _GONE:
                    return None

                raise _translated(error) from error

            if found is None or found == _sealed(found[_SEAL_BYTES:]):
                return None if found is None else found[_SEAL_BYTES:]

            time.sleep(_TORN_S)

        return None  # who wrote it has died in the middle

    def _list(self, path: str) -> list[str]:
        try:
            return list(self._store.list_directory(path))
        except StorageError as error:
            if error.errno in _GONE:
                return []

            raise _translated(error) from error

    def _keys(self, path: str, before: str = "") -> Iterator[str]:
        for name in self._list(path):
            if name.endswith(_VALUE):
                yield before + unquote(name.removesuffix(_VALUE))
            elif not name.endswith(_COUNT):
                yield from self._keys(f"{path}/{name}", f"{before}{unquote(name)}/")


def _sealed(value: bytes) -> bytes:
    return crc32c(value).to_bytes(_SEAL_BYTES, "big") + value


def _translated(error: StorageError) -> CoordinationError:
    return CoordinationError(f"the store that the processes agree by refuses: {error}")

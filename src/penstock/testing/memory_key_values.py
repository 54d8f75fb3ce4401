"""A coordination service in memory, for processes that are tasks of one test."""

from __future__ import annotations

__all__ = ("MemoryKeyValues", "StoppableKeyValues")

import threading
import time
from collections.abc import Callable, Mapping
from typing import TypeVar, final

from penstock.kernel.protocols.coordinator import KeyValues

T = TypeVar("T")


@final
class MemoryKeyValues:
    """The `KeyValues` of one process, for any number of threads."""

    __slots__ = ("_changed", "_values")

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()

    @property
    def keys(self) -> list[str]:
        """The stored keys, in order."""
        with self._changed:
            return sorted(self._values)

    def put(self, key: str, value: bytes, replace: bool, /) -> bool:
        """See `KeyValues.put`."""
        with self._changed:
            if key in self._values and not replace:
                return False

            self._values[key] = bytes(value)
            self._changed.notify_all()
            return True

    def wait(self, key: str, timeout_s: float, /) -> bytes | None:
        """See `KeyValues.wait`."""
        end = time.monotonic() + timeout_s
        with self._changed:
            while key not in self._values:
                left_s = end - time.monotonic()
                if left_s <= 0 or not self._changed.wait(left_s):
                    break

            return self._values.get(key)

    def under(self, prefix: str, /) -> Mapping[str, bytes]:
        """See `KeyValues.under`."""
        with self._changed:
            found = {key: value for key, value in self._values.items() if key.startswith(prefix)}

        return {key.removeprefix(prefix): value for key, value in found.items()}

    def count(self, key: str, /) -> int:
        """See `KeyValues.count`."""
        with self._changed:
            counted = int(self._values.get(key, b"0")) + 1
            self._values[key] = str(counted).encode()
            return counted

    def delete(self, prefix: str, /) -> None:
        """See `KeyValues.delete`."""
        with self._changed:
            for key in list(self._values):
                if key == prefix or (prefix.endswith("/") and key.startswith(prefix)):
                    del self._values[key]


@final
class StoppableKeyValues:
    """The service as a stopped process sees it: its calls do not return until it goes on.

    Args:
        service: The service itself.
    """

    __slots__ = ("_going", "_service")

    def __init__(self, service: KeyValues) -> None:
        self._service = service
        self._going = threading.Event()
        self._going.set()

    def stop(self) -> None:
        """Let no call begin, and none return."""
        self._going.clear()

    def go_on(self) -> None:
        """Let all calls go on."""
        self._going.set()

    def put(self, key: str, value: bytes, replace: bool, /) -> bool:
        """See `KeyValues.put`."""
        return self._do(self._service.put, key, value, replace)

    def wait(self, key: str, timeout_s: float, /) -> bytes | None:
        """See `KeyValues.wait`."""
        return self._do(self._service.wait, key, timeout_s)

    def under(self, prefix: str, /) -> Mapping[str, bytes]:
        """See `KeyValues.under`."""
        return self._do(self._service.under, prefix)

    def count(self, key: str, /) -> int:
        """See `KeyValues.count`."""
        return self._do(self._service.count, key)

    def delete(self, prefix: str, /) -> None:
        """See `KeyValues.delete`."""
        self._do(self._service.delete, prefix)

    def _do(self, call: Callable[..., T], *args: object) -> T:
        self._going.wait()
        found = call(*args)
        self._going.wait()
        return found

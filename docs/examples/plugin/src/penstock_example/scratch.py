"""The URL scheme `scratch`, in one file: `scratch://experiment/run` lies below the directory `$SCRATCH`.

A program then names one place on every cluster, and a path of one of them stands in no configuration.
"""

from __future__ import annotations

__all__ = ("SCRATCH",)

import os
from collections.abc import Iterable
from typing import Any, Final

from penstock.errors import ConfigError
from penstock.handlers import LocalStore
from penstock.kernel import Scheme, Store, StoreWrapper


class _Below(StoreWrapper):
    """The files of a directory under URLs. It can do what the local store can, which does it."""

    def __init__(self, url: str, directory: str) -> None:
        super().__init__(LocalStore())
        self._url = url
        self._directory = directory

    def call(self, operation: str, *given: Any, **options: Any) -> Any:
        return super().call(operation, *map(self._local, given), **options)

    def _local(self, given: Any) -> Any:
        if isinstance(given, str):
            return self._directory + given[len(self._url) :] if given.startswith(self._url) else given

        is_paths = isinstance(given, Iterable) and not isinstance(given, bytes | bytearray | memoryview)
        return [self._local(each) for each in given] if is_paths else given


def _open(url: str, options: Scheme) -> Store:
    if "SCRATCH" not in os.environ:
        raise ConfigError("store", f"{url} is below $SCRATCH, which is not set")

    return _Below(url, os.path.join(os.environ["SCRATCH"], url.partition("://")[2]))


SCRATCH: Final = Scheme(_open)

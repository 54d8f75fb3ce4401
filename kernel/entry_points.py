"""Entry points of other distributions, found and loaded one by one."""

from __future__ import annotations

__all__ = (
    "Plugin",
    "find_plugins",
)

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any, final


@final
@dataclass(frozen=True, slots=True)
class Plugin:
    """An entry point that is found but not imported."""

    name: str  #: of the entry point
    distribution: str  #: that declares it, as `name version`
    load: Callable[[], Any]  #: blocking; imports the distribution's code and may raise anything

    def __str__(self) -> str:
        return f"entry point {self.name!r} of {self.distribution}"


def find_plugins(group: str) -> tuple[Plugin, ...]:
    """List the entry points of `group` on `sys.path`, in order of name; nothing is imported.

    Blocking: reads the metadata of every installed distribution, unless no distribution was added or removed
    since the last call.
    """
    return _find_plugins(group, tuple([(folder, _changed_ns(folder)) for folder in sys.path]))


@lru_cache(maxsize=8)
def _find_plugins(group: str, _: tuple[tuple[str, int], ...]) -> tuple[Plugin, ...]:
    found = (Plugin(point.name, _distribution(point), point.load) for point in entry_points(group=group))
    return tuple(sorted(found, key=lambda plugin: (plugin.name, plugin.distribution)))


def _changed_ns(folder: str) -> int:
    """When an entry of a folder was added or removed; every distribution has one of its own."""
    try:
        return os.stat(folder or os.curdir).st_mtime_ns
    except OSError:
        return 0


def _distribution(point: EntryPoint) -> str:
    return f"{point.dist.name} {point.dist.version}" if point.dist else "an unknown distribution"

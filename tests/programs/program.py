"""A public program that was written for Orbax: where it comes from, and what is known to be different."""

from __future__ import annotations

__all__ = ("Program", "Tests", "stand_in")

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, final


@final
@dataclass(frozen=True, slots=True)
class Tests:
    """Tests that a program brings: they must end with penstock as they end with Orbax.

    Attributes:
        files: Below the folder of the repository.
        deselected: Names of tests that fail or hang with either library, or need what is not here.
    """

    files: Sequence[str]
    deselected: Sequence[str] = ()


@final
@dataclass(frozen=True, slots=True)
class Program:
    """One program. The module that declares it has `save(directory)` and `restore(directory)`, or `tests`.

    Each returns facts: names, and values that may be trees of arrays, texts, numbers and exceptions. They are
    compared between the two libraries; those of `restore` also across, with the files that the other wrote.
    What both name alike must be the same with Orbax, too.

    Attributes:
        name: As its authors write it, with the part that is driven.
        wheels: Released packages, with their versions, the program itself first. They are installed without
            what they depend on.
        repository: `owner/name@commit` of a public repository. Its folder is put in front of `sys.path`.
        path: Where its packages are below the folder of the repository.
        others: Repositories that it needs, likewise.
        tests: Tests of its own that are run.
        devices: How many devices jax shows.
        meant: What stays different, and why, by the name that the difference is reported with.
    """

    name: str
    wheels: Sequence[str] = ()
    repository: str = ""
    path: str = ""
    others: Sequence[str] = ()
    tests: Tests | None = None
    devices: int = 8
    meant: Mapping[str, str] = field(default_factory=dict[str, str])


class _StandIn(ModuleType):
    """A module that is not here. Whatever is asked of it is a class that does nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        found = type(
            name, (), {"__init__": _take_anything, "__class_getitem__": classmethod(lambda cls, _: cls)}
        )
        setattr(self, name, found)
        return found


def _take_anything(self: object, *arguments: object, **named: object) -> None:
    """Do nothing."""


def stand_in(*names: str) -> None:
    """Put modules that the driven part imports, and never uses, where there are none.

    Args:
        names: Of the modules, parents included.
    """
    for name in names:
        if name in sys.modules:
            continue

        module = _StandIn(name)
        module.__spec__ = ModuleSpec(name, None)  # some ask whether it can be found
        module.__path__ = []
        sys.modules[name] = module
        parent, _, child = name.rpartition(".")
        if parent in sys.modules:
            setattr(sys.modules[parent], child, module)

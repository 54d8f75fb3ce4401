"""A public program that was written for Orbax: where it comes from, and what is known to be different."""

from __future__ import annotations

__all__ = ("Program", "Tests", "stand_in")

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec
from types import ModuleType
from typing import Any, final


@final
@dataclass(frozen=True, slots=True)
class Tests:
    """Tests that a program brings: they must end with penstock as they end with Orbax.

    Attributes:
        files: Below the folder of the repository.
        deselected: Names of tests that fail or hang with either library, or need what is not here.
        conftest: Whether its `conftest.py` can be loaded after jax.
    """

    files: Sequence[str]
    deselected: Sequence[str] = ()
    conftest: bool = True


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


class _Anything(type):
    """The class of whatever a module that is not here would have: a class that does nothing."""

    def __getattr__(cls, name: str) -> Any:
        return _anything(name)

    def __getitem__(cls, item: object) -> Any:
        return cls


def _anything(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)

    return _Anything(name, (), {"__init__": _take_anything, "__call__": _decorate})


def _take_anything(self: object, *arguments: object, **named: object) -> None:
    """Do nothing."""


def _decorate(self: object, decorated: Any = None, *arguments: object, **named: object) -> Any:
    return decorated


class _StandIn(ModuleType):
    def __getattr__(self, name: str) -> Any:
        return _anything(name)


@final
class _StandIns(MetaPathFinder, Loader):
    def __init__(self, names: Sequence[str]) -> None:
        self._names = names

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None, /
    ) -> ModuleSpec | None:
        found = f"{fullname}.".startswith(tuple(f"{name}." for name in self._names))
        return ModuleSpec(fullname, self, is_package=True) if found else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Leave it empty."""


def stand_in(*names: str) -> None:
    """Put modules that do nothing in the place of those that the driven part imports, and does not use.

    Args:
        names: Of the modules, whose submodules can be imported, too.
    """
    finder = _StandIns(names)
    sys.meta_path.insert(0, finder)
    for name in names:
        if name not in sys.modules:
            sys.modules[name] = module_from_spec(ModuleSpec(name, finder, is_package=True))
        parent, _, child = name.rpartition(".")
        if parent in sys.modules:
            setattr(sys.modules[parent], child, sys.modules[name])

"""Comparing what two libraries call by one name."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any


def signature_difference(ours: Any, theirs: Any) -> str | None:
    """Say how two signatures differ in names, kinds or defaults of parameters; None if they do not."""
    mine, other = _parameters(ours), _parameters(theirs)
    if list(mine) != list(other):
        return f"parameters {list(mine)}, Orbax has {list(other)}"

    for name, parameter in mine.items():
        wanted = other[name]
        if parameter.kind != wanted.kind:
            return f"{name} is {parameter.kind.description}, in Orbax {wanted.kind.description}"
        if not _same(parameter.default, wanted.default):
            return f"{name} is {parameter.default!r} by default, in Orbax {wanted.default!r}"

    return None


def differences_with_methods(ours: Any, theirs: Any, methods: Iterable[str]) -> list[str]:
    """Say all that differs between two functions, or two classes and those of `methods` that theirs has."""
    problems = [signature_difference(ours, theirs)]
    if inspect.isclass(theirs):
        problems += [
            signature_difference(getattr(ours, method), getattr(theirs, method))
            for method in methods
            if hasattr(theirs, method)
        ]

    return [problem for problem in problems if problem is not None]


def methods_of(class_: type) -> set[str]:
    """Names of the public methods and properties."""
    return {name for name in dir(class_) if not name.startswith("_")}


def _parameters(what: Any) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(what).parameters)


def _same(mine: object, other: object) -> bool:
    if mine is other or (type(mine) is type(other) and mine == other):
        return True

    # Each library has classes of its own: enumerations, option objects.
    return type(mine).__name__ == type(other).__name__ and repr(mine) == repr(other)

"""Where each leaf of a result comes from, once that is decided: plain data, and its few helpers."""

from __future__ import annotations

__all__ = (
    "Function",
    "Input",
    "Matching",
    "Origin",
    "call_foreign",
    "described",
    "keep",
    "rule_difference",
    "why_abstract",
)

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.core import Tracer

from penstock.kernel.errors import HandlerFailedError, PenstockError, TreeDifference
from penstock.kernel.messages.restore_options import Change
from penstock.kernel.protocols.leaf import ParamInfo, StoredLeaf


@dataclass(frozen=True, slots=True)
class Input:
    """A stored leaf that a function needs, and what it is to be restored as."""

    stored: StoredLeaf
    like: Any = None
    has_like: bool = False  #: False: as it was saved


@dataclass(frozen=True, slots=True)
class Function:
    """A caller's function over stored leaves."""

    name: str  #: for messages
    inputs: tuple[Input, ...]
    call: Callable[[Sequence[Any]], object]  #: of the inputs' values, in order


@dataclass(frozen=True, slots=True)
class Origin:
    """How one leaf of the result comes about: read, made by a function, or else the target's own."""

    info: ParamInfo  #: in the result
    like: Any = None
    has_like: bool = False
    read: StoredLeaf | None = None
    function: Function | None = None

    @property
    def is_kept(self) -> bool:
        """Whether the target's value stays."""
        return self.read is None and self.function is None


@dataclass(slots=True)
class Matching:
    """One origin for each leaf of the result, in its order, and what is to be told about them."""

    origins: list[Origin] = field(default_factory=list[Origin])
    differences: list[TreeDifference] = field(default_factory=list[TreeDifference])
    changes: list[Change] = field(default_factory=list[Change])


def keep(matching: Matching, info: ParamInfo, value: object) -> None:
    """Have the target's value stay, if it is one."""
    problem = why_abstract(value)
    if problem:
        text = f"would be kept from the target, where it is {problem}"
        matching.differences.append(rule_difference(info.key_path, text))

    matching.origins.append(Origin(info, value, has_like=True))
    matching.changes.append(Change("kept", info.key_path))


def why_abstract(value: object) -> str:
    """Say why a leaf of a target is no value that could be kept; empty if it is one."""
    if isinstance(value, type):
        return f"a type ({value.__name__})"
    if isinstance(value, jax.ShapeDtypeStruct):
        return "abstract (jax.ShapeDtypeStruct)"
    if isinstance(value, Tracer):
        return "a tracer"
    if isinstance(value, jax.Array) and value.is_deleted():
        return "a deleted or donated array"

    return ""


def rule_difference(key_path: str, problem: str) -> TreeDifference:
    """Make the difference that says why what was asked for cannot be done at `key_path`."""
    return TreeDifference("rule", key_path, problem)


def described(role: str, function: object) -> str:
    """Name a caller's function, for messages."""
    return f"{role} {getattr(function, '__qualname__', function)!s}"


def call_foreign(function: Callable[..., Any], name: str, key_path: str, *arguments: object) -> Any:
    """Call a caller's function.

    Raises:
        HandlerFailedError: If it raises; its own error is the cause.
    """
    try:
        return function(*arguments)
    except PenstockError:
        raise
    except Exception as error:
        raise HandlerFailedError(key_path, name, f"{type(error).__name__}: {error}") from error

"""Describes where each leaf of a result comes from: plain data and a few helpers."""

from __future__ import annotations

__all__ = (
    "ABSENT",
    "Function",
    "Input",
    "Matching",
    "StoredInfos",
    "TargetLeaves",
    "call_foreign",
    "computed",
    "describe_stored",
    "describe_target",
    "described",
    "keep",
    "key_columns",
    "rule_difference",
    "spec_column",
)

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, final, overload

import jax
from jax.core import Tracer

from penstock.kernel.errors import HandlerFailedError, PenstockError, TreeDifference
from penstock.kernel.messages.restore import Change
from penstock.kernel.protocols.layouts import LeafColumns
from penstock.kernel.protocols.leaf import KeyKind, KeyPath, LeafSpec, ParamInfo, StoredLeaf

ABSENT: Final = -1
"""A row with this value means that no stored leaf is read for this leaf of the result."""

MOST_INPUTS_SHOWN: Final = 8


@dataclass(frozen=True, slots=True)
class TargetLeaves:
    """The leaves of a restore target, in flatten order, as two columns of one length."""

    infos: Sequence[ParamInfo]
    values: Sequence[Any]


@dataclass(frozen=True, slots=True)
class Input:
    """A stored leaf that a function needs, and the restore target for it."""

    stored: StoredLeaf
    like: Any = None
    has_like: bool = False  #: False to restore it as it was saved


@dataclass(frozen=True, slots=True)
class Function:
    """A caller's function that makes a leaf from stored leaves."""

    name: str  #: for messages
    inputs: tuple[Input, ...]
    call: Callable[[Sequence[Any]], object]  #: takes the values of the inputs, in order


@dataclass(slots=True)
class Matching:
    """The source of each leaf of a result, with the differences and changes to report.

    A leaf is read if it has a row, made if it has a function, and else keeps the target's own value.
    """

    infos: Sequence[ParamInfo]  #: of each leaf of the result
    likes: Sequence[Any] | None  #: of each leaf of the target; None for a restore without a target
    rows: Sequence[int]  #: places in the stored leaves, or `ABSENT`
    functions: dict[int, Function] = field(default_factory=dict[int, Function])  #: by place in the result
    differences: list[TreeDifference] = field(default_factory=list[TreeDifference])
    changes: list[Change] = field(default_factory=list[Change])


def keep(matching: Matching, info: ParamInfo, value: object) -> None:
    """Record that a leaf keeps the target's value, and a difference if there is no value to keep."""
    problem = _why_abstract(value)
    if problem:
        text = f"would be kept from the target, where it is {problem}"
        matching.differences.append(rule_difference(info.key_path, text))

    matching.changes.append(Change("kept", info.key_path))


def computed(info: ParamInfo, function: Function) -> Change:
    """Return the change that a report shows for a computed leaf."""
    stored = [each.stored.info.key_path for each in function.inputs]
    shown = ", ".join(stored[:MOST_INPUTS_SHOWN]) + (", ..." if len(stored) > MOST_INPUTS_SHOWN else "")
    return Change("computed", info.key_path, shown)


def _why_abstract(value: object) -> str:
    """Return why a leaf of a target has no value to keep; empty if it has one."""
    if isinstance(value, type):
        return f"a type ({value.__name__})"
    if isinstance(value, jax.ShapeDtypeStruct):
        return "abstract (jax.ShapeDtypeStruct)"
    if isinstance(value, Tracer):
        return "a tracer"
    if isinstance(value, jax.Array) and value.is_deleted():
        return "a deleted or donated array"

    return ""


def describe_target(value: Any) -> str:
    """Describe a leaf of a target, as in `float32[8, 12]`, `int`."""
    if isinstance(value, type):
        return value.__name__

    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    return type(value).__name__ if shape is None else f"{dtype}{list(shape)}"


def describe_stored(stored: StoredLeaf) -> str:
    """Describe a stored leaf, as in `float32[8, 12]`, `string`."""
    spec = stored.spec
    return spec.typestr if spec.shape is None else f"{spec.dtype}{list(spec.shape)}"


def rule_difference(key_path: str, problem: str) -> TreeDifference:
    """Make the difference for a request that cannot be met at `key_path`."""
    return TreeDifference("rule", key_path, problem)


def described(role: str, function: object) -> str:
    """Name a caller's function, for messages."""
    return f"{role} {getattr(function, '__qualname__', function)!s}"


def call_foreign(function: Callable[..., Any], name: str, key_path: str, *arguments: object) -> Any:
    """Call a caller's function.

    Raises:
        HandlerFailedError: If it raises; its error is the cause. A `PenstockError` passes unchanged.
    """
    try:
        return function(*arguments)
    except PenstockError:
        raise
    except Exception as error:
        raise HandlerFailedError(key_path, name, f"{type(error).__name__}: {error}") from error


def key_columns(stored: Sequence[StoredLeaf]) -> tuple[Sequence[KeyPath], Sequence[tuple[KeyKind, ...]]]:
    """Return the keys of each leaf, and the kinds of these keys."""
    if isinstance(stored, LeafColumns):
        return stored.keys, stored.kinds

    return [leaf.info.keys for leaf in stored], [leaf.info.kinds for leaf in stored]


def spec_column(stored: Sequence[StoredLeaf]) -> Sequence[LeafSpec]:
    """Return the spec of each leaf."""
    return stored.specs if isinstance(stored, LeafColumns) else [leaf.spec for leaf in stored]


@final
class StoredInfos(Sequence[ParamInfo]):
    """The infos of some stored leaves. Each `ParamInfo` is made on access.

    Args:
        stored: All leaves of the checkpoint.
        rows: Places of the chosen leaves.
    """

    __slots__ = ("_rows", "_stored")

    def __init__(self, stored: Sequence[StoredLeaf], rows: Sequence[int]) -> None:
        self._stored = stored
        self._rows = rows

    def key_columns(self) -> tuple[Sequence[KeyPath], Sequence[tuple[KeyKind, ...]]]:
        """Return the keys of each chosen leaf, and the kinds of these keys."""
        keys, kinds = key_columns(self._stored)
        if len(self._rows) == len(keys):
            return keys, kinds

        return [keys[row] for row in self._rows], [kinds[row] for row in self._rows]

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, at: int, /) -> ParamInfo: ...
    @overload
    def __getitem__(self, at: slice, /) -> tuple[ParamInfo, ...]: ...
    def __getitem__(self, at: int | slice, /) -> ParamInfo | tuple[ParamInfo, ...]:
        if isinstance(at, slice):
            return tuple([self._stored[row].info for row in self._rows[at]])

        return self._stored[self._rows[at]].info

"""Values that each process of a job has for itself, as a node of a tree."""

from __future__ import annotations

__all__ = ("PROCESS_KEY", "Divide", "PerProcess", "ProcessEntry", "process_key", "settled")

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Generic, TypeAlias, TypeVar, cast, final

from jax import tree_util

from penstock.kernel.errors import InvalidLeafError
from penstock.kernel.protocols.leaf import KeyKind, ParamInfo

T = TypeVar("T")
Divide: TypeAlias = Callable[[Sequence[Any], int, int], Any]

PROCESS_KEY: Final = re.compile(r"process_(\d+)-of-(\d+)")
"""The key below which the value of one process is stored: its index, and how many there were."""


@final
@dataclass(frozen=True, slots=True)
class PerProcess(Generic[T]):
    """Marks a value of which each process of a job has its own, such as the state of a data iterator.

    A save by several processes stores it once for each, and a restore gives each process its own. A save by
    one process stores the value as if it were not marked. To jax it is a node with one child.

    Stored, the value of process 1 of 4 lies below the key `process_1-of-4`. A restore without a target gives
    all of them, in one process, too.

    Args:
        value: Any tree of leaves that this process holds whole. Its structure may differ between processes.
        divide: What a restore by another number of processes asks for this process's value. It gets the
            values of all processes that saved, each as a restore without a target gives it, the index of
            this process, and how many there are now. Without it, such a restore is refused. In a target whose
            value is None it says that any structure is right: as many processes get their values as they
            were saved.
    """

    value: T
    divide: Divide | None = None


@final
@dataclass(frozen=True, slots=True)
class ProcessEntry:
    """The key entry of the only child, as jax prints it."""

    def __str__(self) -> str:
        return ".value"


def process_key(index: int, count: int) -> str:
    """Return the key below which the value of a process is stored."""
    return f"process_{index}-of-{count}"


def settled(info: ParamInfo, process: tuple[int, int]) -> ParamInfo:
    """Return where a leaf below a `PerProcess` is stored.

    Args:
        info: With a key of the kind `PROCESS`.
        process: The index of this process, and how many there are. If it is alone, there is no such key.

    Raises:
        InvalidLeafError: If it lies below two of them.
    """
    index, count = process
    at = info.kinds.index(KeyKind.PROCESS)
    if KeyKind.PROCESS in info.kinds[at + 1 :]:
        raise InvalidLeafError(info.key_path, "a PerProcess lies within another one")

    keys, kinds = ((process_key(index, count),), (KeyKind.MAPPING,)) if count > 1 else ((), ())
    return replace(
        info,
        keys=(*info.keys[:at], *keys, *info.keys[at + 1 :]),
        kinds=(*info.kinds[:at], *kinds, *info.kinds[at + 1 :]),
        own_from=at,
    )


def _flatten(node: PerProcess[Any]) -> tuple[tuple[Any, ...], Divide | None]:
    return (node.value,), node.divide


def _flatten_with_keys(node: PerProcess[Any]) -> tuple[tuple[tuple[ProcessEntry, Any], ...], Divide | None]:
    return ((ProcessEntry(), node.value),), node.divide


def _unflatten(divide: Divide | None, children: Sequence[Any]) -> PerProcess[Any]:
    return PerProcess(children[0], divide)


cast("Any", tree_util).register_pytree_with_keys(PerProcess, _flatten_with_keys, _unflatten, _flatten)

"""The values that a restore target has for its own process: the stored leaves that it means.

Pure, but for the functions that it returns.
"""

from __future__ import annotations

__all__ = ("NOTHING_OWN", "OwnValues", "find_own")

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias, cast, final

from jax import tree_util

from penstock.kernel.errors import TreeDifference
from penstock.kernel.protocols.leaf import KeyPath, ParamInfo, StoredLeaf
from penstock.stages.planning.leaf_sources import Function, Input, described, key_columns, rule_difference
from penstock.stages.pytree.flattening import PROCESS_KEY, Divide, PerProcess, nest, step

_jax: Any = tree_util
_Saved: TypeAlias = Mapping[int, Sequence[int]]
"""The rows of one node, by the process that saved them."""


@final
@dataclass(frozen=True, slots=True, eq=False)
class OwnValues:
    """The stored leaves that a target's values of this process mean."""

    hidden: AbstractSet[int] = frozenset()  #: rows of leaves that are of other processes
    functions: Mapping[KeyPath, Function] = field(default_factory=dict[KeyPath, Function])
    """What makes a value anew from those of all processes that saved."""
    differences: Sequence[TreeDifference] = ()
    whole: AbstractSet[int] = frozenset()  #: identities of the nodes that the functions make


NOTHING_OWN: Final = OwnValues()


def find_own(
    stored: Sequence[StoredLeaf], like: object, infos: Sequence[ParamInfo], process: tuple[int, int]
) -> OwnValues:
    """Find which stored leaves are the values of this process.

    Args:
        stored: All leaves of the checkpoint.
        like: The restore target.
        infos: Of its leaves.
        process: The index of this process, and how many there are.
    """
    nodes = {info.keys[: info.own_from] for info in infos if info.own_from is not None}
    saved = _saved(stored, nodes)
    index, count = process
    hidden = {row for by in saved.values() for one, rows in by.items() if one != index for row in rows}
    odd = {keys: by for keys, by in saved.items() if by and len(by) != count}
    # Where a target has None, it may not say what this process's value looks like.
    if not odd and not any(_is_whole_value(info, count) for info in infos):
        return OwnValues(hidden)

    functions: dict[KeyPath, Function] = {}
    differences: list[TreeDifference] = []
    whole: set[int] = set()
    for path, found in _jax.tree_flatten_with_path(like, is_leaf=_is_own)[0]:
        keys = tuple([step(entry)[0] for entry in path])
        if not _is_own(found):
            continue

        node = cast("PerProcess[Any]", found)
        if keys not in odd:
            mine = saved.get(keys, {}).get(index)
            if mine and node.value is None and node.divide is not None:
                whole.add(id(node))
                hidden.update(mine)
                by = {index: mine}
                functions[keys] = _function(
                    stored, keys, by, _as_it_was, process, is_named=count > 1, kept=node.divide
                )

            continue

        whole.add(id(node))
        hidden.update(row for rows in odd[keys].values() for row in rows)
        if node.divide is None:
            problem = f"saved by {len(odd[keys])} processes, each its own value; now there are {count}"
            advice = "give the PerProcess a function `divide`, or leave it out of the target"
            differences.append(rule_difference(_jax.keystr(path), f"{problem}: {advice}"))
        else:
            is_named = len(odd[keys]) > 1
            functions[keys] = _function(
                stored, keys, odd[keys], node.divide, process, is_named=is_named, kept=node.divide
            )

    return OwnValues(hidden, functions, differences, whole)


def _is_whole_value(info: ParamInfo, count: int) -> bool:
    """Return whether a leaf of the target is all that it has of its process."""
    return info.own_from is not None and len(info.keys) == info.own_from + (count > 1)


def _as_it_was(values: Sequence[Any], index: int, count: int) -> object:
    """Return the value of this process alone, as a restore without a target gives it."""
    return values[0]


def _is_own(node: object) -> bool:
    return isinstance(node, PerProcess)


def _saved(stored: Sequence[StoredLeaf], nodes: AbstractSet[KeyPath]) -> Mapping[KeyPath, _Saved]:
    """Return the rows of each node by process. If no key names a process, one process alone saved it."""
    depths = sorted({len(keys) for keys in nodes})
    rows: dict[KeyPath, list[int]] = {keys: [] for keys in nodes}
    keys_of_rows = key_columns(stored)[0]
    for row, keys in enumerate(keys_of_rows):
        for depth in depths:
            if keys[:depth] in rows:
                rows[keys[:depth]].append(row)

    return {
        node: _by_process([keys_of_rows[row][len(node) :] for row in of], of) for node, of in rows.items()
    }


def _by_process(keys: Sequence[KeyPath], rows: Sequence[int]) -> _Saved:
    named = [PROCESS_KEY.fullmatch(one[0]) if one else None for one in keys]
    found: dict[int, list[int]] = {}
    for match, row in zip(named, rows, strict=True):
        if match is None:
            return {0: rows}

        for process in range(int(match[2])) if not found else ():
            found[process] = []

        found.setdefault(int(match[1]), []).append(row)

    return found


def _function(
    stored: Sequence[StoredLeaf],
    node: KeyPath,
    saved: _Saved,
    divide: Divide,
    process: tuple[int, int],
    *,
    is_named: bool,
    kept: Divide | None,
) -> Function:
    """Return the function that makes this process's value from those of the saving processes.

    Args:
        stored: All leaves of the checkpoint.
        node: Where the values are.
        saved: The rows of each that is needed.
        divide: What makes the value.
        process: The index of this process, and how many there are.
        is_named: Whether the keys below the node name processes.
        kept: What the result has as its `divide`.
    """
    parts = [[stored[row] for row in saved[one]] for one in sorted(saved)]
    infos = [[_below(leaf.info, len(node) + is_named) for leaf in part] for part in parts]

    def call(values: Sequence[Any]) -> object:
        rest = iter(values)
        found = [nest(part, [next(rest) for _ in part]) if part else None for part in infos]
        return PerProcess(divide(found, *process), kept)

    inputs = tuple([Input(leaf) for part in parts for leaf in part])
    return Function(described("divide", divide), inputs, call)


def _below(info: ParamInfo, depth: int) -> ParamInfo:
    return ParamInfo(info.keys[depth:], info.kinds[depth:], info.key_path)

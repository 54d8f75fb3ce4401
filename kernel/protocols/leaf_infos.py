"""The places of the leaves of a tree, in columns: the `ParamInfo` of a leaf is made on access.

Most leaves of a tree are siblings of many others. What siblings share is kept once.
"""

from __future__ import annotations

__all__ = ("Children", "InfoRun", "LeafInfos", "TreeNode", "keys_of", "names_of", "runs_of")

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final, final, overload

from penstock.kernel.protocols.leaf import KeyKind, KeyPath, ParamInfo

SLICE: Final = 8192
"""Leaves of which columns are made at once: so that a million leaves are never written out in full."""


@final
@dataclass(frozen=True, slots=True, eq=False)
class Children:
    """The keys of one container's children, in order."""

    keys: Sequence[str]  #: as they are stored
    kinds: Sequence[KeyKind]
    shown: Callable[[int], str]  #: a key as it is printed in a key path, by number


@final
@dataclass(frozen=True, slots=True, eq=False)
class TreeNode:
    """A container with its place in the tree."""

    keys: KeyPath
    kinds: tuple[KeyKind, ...]
    key_path: str
    children: Children

    def info(self, number: int) -> ParamInfo:
        """Return the place of a child."""
        key, kind = self.children.keys[number], self.children.kinds[number]
        key_path = self.key_path + self.children.shown(number)
        return ParamInfo((*self.keys, key), (*self.kinds, kind), key_path)


@final
@dataclass(frozen=True, slots=True, eq=False)
class InfoRun:
    """Leaves that follow each other and are children of one container."""

    outer: KeyPath  #: keys of the container
    outer_kinds: tuple[KeyKind, ...]
    keys: Sequence[str]  #: the last key of each leaf
    kinds: Sequence[KeyKind]  #: the kind of that key

    @property
    def name_prefix(self) -> str:
        """The beginning of the stored names of all of them."""
        return "".join([f"{key}." for key in self.outer])


@final
class LeafInfos(Sequence[ParamInfo]):
    """The places of all leaves of one tree, in flatten order. Immutable.

    Args:
        runs: The number of the first leaf of each run of siblings; their container; and the first one's
            number among its children. In order.
        n_leaves: All leaves.
    """

    __slots__ = ("_n_leaves", "_runs", "_starts", "distinct")

    def __init__(self, runs: Sequence[tuple[int, TreeNode, int]], n_leaves: int, *, distinct: bool) -> None:
        self._runs = runs
        self._starts = [start for start, _, _ in runs]
        self._n_leaves = n_leaves
        self.distinct = distinct  #: whether all stored names are known to be distinct and valid

    def __len__(self) -> int:
        return self._n_leaves

    @overload
    def __getitem__(self, at: int, /) -> ParamInfo: ...
    @overload
    def __getitem__(self, at: slice, /) -> tuple[ParamInfo, ...]: ...
    def __getitem__(self, at: int | slice, /) -> ParamInfo | tuple[ParamInfo, ...]:
        if isinstance(at, slice):
            return tuple([self[one] for one in range(self._n_leaves)[at]])

        place = range(self._n_leaves)[at]
        start, node, first = self._runs[bisect_right(self._starts, place) - 1]
        return node.info(first + place - start)

    def __iter__(self) -> Iterator[ParamInfo]:
        for count, node, first in self._bounded():
            for number in range(first, first + count):
                yield node.info(number)

    def runs(self) -> Iterator[InfoRun]:
        """Yield all leaves in runs of siblings, of at most `SLICE` each."""
        for count, node, first in self._bounded():
            for at in range(first, first + count, SLICE):
                stop = min(at + SLICE, first + count)
                children = node.children
                yield InfoRun(node.keys, node.kinds, children.keys[at:stop], children.kinds[at:stop])

    def _bounded(self) -> Iterator[tuple[int, TreeNode, int]]:
        """Yield how many leaves each run has, their container, and the number of the first."""
        ends = [*self._starts, self._n_leaves][1:]
        for (start, node, first), end in zip(self._runs, ends, strict=True):
            yield end - start, node, first


def runs_of(infos: Sequence[ParamInfo]) -> Iterator[InfoRun]:
    """Yield leaves in runs of siblings, of at most `SLICE` each. None of them is a bare leaf."""
    if isinstance(infos, LeafInfos):
        yield from infos.runs()
        return

    for at in range(0, len(infos), SLICE):
        for (outer, kinds), group in groupby(infos[at : at + SLICE], _outer):
            siblings = list(group)
            keys = [info.keys[-1] for info in siblings]
            yield InfoRun(outer, kinds, keys, [info.kinds[-1] for info in siblings])


def names_of(infos: Sequence[ParamInfo]) -> list[str]:
    """Return the stored name of each leaf."""
    if not isinstance(infos, LeafInfos):
        return [info.name for info in infos]

    return [prefix + key for run in infos.runs() for prefix in (run.name_prefix,) for key in run.keys]


def keys_of(infos: Sequence[ParamInfo]) -> list[KeyPath]:
    """Return the keys of each leaf."""
    if not isinstance(infos, LeafInfos):
        return [info.keys for info in infos]

    return [(*run.outer, key) for run in infos.runs() for key in run.keys]


def _outer(info: ParamInfo) -> tuple[KeyPath, tuple[KeyKind, ...]]:
    return info.keys[:-1], info.kinds[:-1]

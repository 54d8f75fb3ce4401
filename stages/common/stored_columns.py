"""The leaves of a checkpoint as columns, even if the checkpoint does not provide columns itself."""

from __future__ import annotations

__all__ = ("StoredInfos", "key_columns", "spec_column")

from collections.abc import Sequence
from typing import final, overload

from penstock.kernel.protocols.checkpoints import LeafColumns
from penstock.kernel.protocols.leaf import KeyKind, KeyPath, LeafSpec, ParamInfo, StoredLeaf


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

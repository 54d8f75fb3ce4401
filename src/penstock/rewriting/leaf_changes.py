"""Other names and other dtypes for leaves that are converted."""

from __future__ import annotations

__all__ = ("LeafChanges",)

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, final

from penstock.handlers.leaves.stored_value import StoredValue
from penstock.kernel.errors import SpecError, TreeDifference
from penstock.kernel.messages.restore import Rename, RestoreOptions
from penstock.kernel.protocols.leaf import KeyPath, ParamInfo, StoredLeaf
from penstock.stages.planning.casting import DtypeRule, refit_spec
from penstock.stages.planning.key_patterns import near_leaves
from penstock.stages.planning.renaming import leaves_within_leaves, rename_leaves


@final
class LeafChanges:
    """Applies `rename` and `dtype` to each tree of a checkpoint, and knows which rules did nothing.

    Args:
        rename: As for `Checkpointer.restore`.
        dtype: As for `Checkpointer.restore`, without `"like"`.

    Raises:
        SpecError: If one of them is not what it may be.
    """

    __slots__ = ("_casts", "_keys", "_options", "_unused")

    def __init__(self, rename: Rename | None, dtype: Any) -> None:
        if isinstance(dtype, str) and dtype == "like":
            raise SpecError("dtype='like' is for restores: a conversion has no target")

        self._options = RestoreOptions(rename=rename, dtype=dtype)
        self._casts = DtypeRule(dtype)
        self._keys: list[KeyPath] = []  # of what was cast
        self._unused: dict[str, TreeDifference] | None = None

    def named(self, path: str, leaves: Sequence[StoredLeaf]) -> list[tuple[ParamInfo, StoredLeaf]]:
        """Return the leaves of one tree under the names that they get.

        Args:
            path: Of the checkpoint, for the error.
            leaves: Of the tree.

        Raises:
            SpecError: If two would have one name, or one would be within another.
        """
        if self._options.rename is None:
            return [(leaf.info, leaf) for leaf in leaves]

        renamed = rename_leaves(leaves, range(len(leaves)), self._options.rename, {})
        _check(path, [*renamed.differences, *leaves_within_leaves(renamed.infos)])
        unused = {difference.key_path: difference for difference in renamed.unused}
        self._unused = {rule: unused[rule] for rule in unused if self._unused is None or rule in self._unused}
        return list(zip(renamed.infos, [leaves[row] for row in renamed.rows], strict=True))

    def cast(self, path: str, info: ParamInfo, value: object) -> object:
        """Return a leaf with the dtype that it gets.

        Args:
            path: Of the checkpoint, for the error.
            info: Where the leaf stands in the result.
            value: A `StoredValue`; anything else is no array, and stays as it is.

        Raises:
            SpecError: If it cannot be cast.
        """
        if self._options.dtype is None or not isinstance(value, StoredValue):
            return value

        self._keys.append(info.keys)
        spec = refit_spec(value.stored, info, None, self._options, self._casts)
        if isinstance(spec, TreeDifference):
            _check(path, [spec])
        elif spec.dtype != value.stored.spec.dtype:
            return replace(value, dtype=spec.dtype)

        return value

    def check_used(self, path: str) -> None:
        """Raise unless each rule named a leaf of some tree.

        Raises:
            SpecError: If one did not; the message names it, and a leaf of a similar name.
        """
        _check(path, list((self._unused or {}).values()))
        if self._casts.unused:
            unused = self._casts.unused[0]
            problem = f"dtype names {unused!r}, but no leaf has such a name"
            raise SpecError(f"{path}: {problem}; {near_leaves(unused, self._keys)}")


def _check(path: str, differences: Sequence[TreeDifference]) -> None:
    if differences:
        raise SpecError(f"{path}: {'; '.join(map(_text_of, differences))}")


def _text_of(difference: TreeDifference) -> str:
    if difference.kind != "rule":
        return f"{difference.key_path}: cannot be cast from {difference.on_disk} to {difference.in_like}"

    hint = f"; did you mean {difference.suggestion}?" if difference.suggestion else ""
    return f"{difference.key_path}: {difference.in_like}{hint}"

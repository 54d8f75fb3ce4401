"""The option `only`: selects stored leaves by key path. Pure."""

from __future__ import annotations

__all__ = ("select_rows",)

from collections.abc import Sequence

from penstock.kernel.errors import SpecError
from penstock.kernel.messages.restore import Only
from penstock.kernel.protocols.leaf import KeyPath
from penstock.stages.common.key_patterns import pattern_fits


def select_rows(path: str, keys: Sequence[KeyPath], only: Only) -> list[int]:
    """Return the places of the leaves that `only` selects, in order.

    Args:
        path: The checkpoint, for messages.
        keys: The keys of all stored leaves.
        only: A predicate on key paths, or shell patterns over dotted names, or key paths as they are
            printed. One that matches a node selects every leaf below it.

    Raises:
        SpecError: If a pattern matches no leaf, or no leaf is selected.
    """
    if callable(only):
        rows = [row for row, key_path in enumerate(keys) if only(key_path)]
    else:
        rows = _fitting(path, keys, (only,) if isinstance(only, str) else tuple(only))
    if not rows:
        raise SpecError(f"only selects no leaf of {path}")

    return rows


def _fitting(path: str, keys: Sequence[KeyPath], patterns: Sequence[str]) -> list[int]:
    unused = set(patterns)
    rows: list[int] = []
    for row, key_path in enumerate(keys):
        name = ".".join(key_path)
        fitting = [one for one in patterns if pattern_fits(one, name, key_path)]
        unused.difference_update(fitting)
        if fitting:
            rows.append(row)

    if unused:
        raise SpecError(f"only: no leaf of {path} matches {min(unused)!r}")

    return rows

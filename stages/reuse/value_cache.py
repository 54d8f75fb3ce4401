"""A cache of objects in memory that are equal to leaves of the last few checkpoints."""

from __future__ import annotations

__all__ = ("KnownValues", "references_to")

from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeAlias, final
from weakref import ref

from penstock.kernel.memory.bounded_cache import BoundedCache
from penstock.kernel.messages.save import References
from penstock.kernel.protocols.leaf import ParamInfo, names_of
from penstock.kernel.protocols.leaf_handlers import LeafHandler, SnapshotHandler

_BYTES_OF_A_REFERENCE: Final = 200

ByDirectory: TypeAlias = Mapping[str, References]
"""The known values of the trees of one checkpoint, by the directory of each tree."""


@final
class KnownValues:
    """Remembers the values of the last few checkpoints, without keeping them alive. Thread-safe.

    Args:
        kept: The cache, of `RunCaches`.
    """

    __slots__ = ("_known",)

    def __init__(self, kept: BoundedCache[str, tuple[object, ByDirectory]]) -> None:
        self._known = kept

    def remember(self, path: str, identity: object, references: ByDirectory) -> None:
        """Record the values of the checkpoint at `path`, valid while it has this `identity`.

        Earlier values with the same identity are kept: an array that was saved there and an array that was
        restored from there are different objects with equal values.

        Args:
            path: The checkpoint.
            identity: Its `Store.identity` now.
            references: The values of each tree, by its directory, and by stored name.
        """

        def added(before: tuple[object, ByDirectory] | None) -> tuple[tuple[object, ByDirectory], int]:
            known = {} if before is None or before[0] != identity else dict(before[1])
            for name, found in references.items():
                known[name] = {**known.get(name, {}), **found}

            return (identity, known), _BYTES_OF_A_REFERENCE * sum(map(len, known.values()))

        self._known.change(path, added)

    def moved(self, path: str, to: str, identity: object) -> None:
        """Record that the only tree at `path` is moved to `to`.

        Args:
            path: Where it was saved. Nothing is recorded if no tree is known there.
            to: Its new path.
            identity: Its `Store.identity`, taken where no other process could replace it: before the move,
                which does not change it.
        """
        _, references = self._known.pop(path) or (None, {})
        if path in references:
            found = references[path]
            self._known.put(to, (identity, {to: found}), _BYTES_OF_A_REFERENCE * len(found))

    def find(self, path: str, identity: object) -> ByDirectory:
        """Return the known values of each tree at `path`; empty if the identity has changed."""
        known, references = self._known.get(path) or (None, {})
        return references if known == identity else {}

    def noted(self, path: str) -> ByDirectory:
        """Return the values of each tree that was at `path` last, whether it is still there or not."""
        return (self._known.get(path) or (None, {}))[1]


def references_to(
    infos: Sequence[ParamInfo], values: Sequence[object], handlers: Sequence[LeafHandler]
) -> References:
    """Make weak references to the values that are immutable, by stored name.

    Args:
        infos: Where the leaves stand.
        values: Of the same leaves.
        handlers: Of the same leaves.
    """
    by_number = {id(handler): handler for handler in handlers}
    chosen: set[tuple[type, int]] = set()  # types with handlers: thousands of leaves share a few
    for kind, number in set(zip(map(type, values), map(id, handlers), strict=True)):
        handler = by_number[number]
        # The type has a place for weak references, or it cannot be referred to.
        if kind.__weakrefoffset__ and isinstance(handler, SnapshotHandler) and handler.immutable:
            chosen.add((kind, number))

    found: dict[str, Any] = {}
    if chosen:
        for name, value, handler in zip(names_of(infos), values, handlers, strict=True):
            if (type(value), id(handler)) in chosen:
                found[name] = ref(value)

    return found

"""A cache of objects in memory that are equal to leaves of the last few checkpoints."""

from __future__ import annotations

__all__ = ("KnownValues", "references_to")

from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any, Final, TypeAlias, final
from weakref import ref

from penstock.kernel.memory.bounded_cache import BoundedCache
from penstock.kernel.messages.save import References
from penstock.kernel.protocols.leaf_handlers import LeafHandler, SnapshotHandler

_BYTES_OF_A_REFERENCE: Final = 200

ByDirectory: TypeAlias = Mapping[str, References]
"""The known values of the trees of one checkpoint, by the directory of each tree."""


@final
class KnownValues:
    """Remembers the values of the last few checkpoints, without keeping them alive. Thread-safe.

    Args:
        most: Checkpoints to remember.
    """

    __slots__ = ("_known",)

    def __init__(self, most: int = 4) -> None:
        self._known: BoundedCache[str, tuple[object, ByDirectory]] = BoundedCache(most)

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
            known: ByDirectory = {} if before is None or before[0] != identity else before[1]
            merged = {name: {**known.get(name, {}), **found} for name, found in references.items()}
            return _sized(identity, {**known, **merged})

        self._known.change(path, added)

    def moved(self, path: str, to: str, identity: object) -> None:
        """Record that the only tree at `path` is moved to `to`.

        Args:
            path: Where it was saved. Nothing is recorded if no tree is known there.
            to: Its new path.
            identity: Its `Store.identity`, taken where nobody else could have replaced it: before the move,
                which does not change it.
        """
        _, references = self._known.pop(path) or (None, {})
        if path in references:
            self._known.put(to, *_sized(identity, {to: references[path]}))

    def find(self, path: str, identity: object) -> ByDirectory:
        """Return the known values of each tree at `path`; empty if the identity has changed."""
        known, references = self._known.get(path) or (None, {})
        return references if known == identity else {}


def _sized(identity: object, references: ByDirectory) -> tuple[tuple[object, ByDirectory], int]:
    n_references = sum(map(len, references.values()))
    return (identity, references), _BYTES_OF_A_REFERENCE * n_references


def references_to(values: Iterable[tuple[str, object, LeafHandler]]) -> References:
    """Make weak references to the values that are immutable.

    Args:
        values: The stored name, the value and the handler of each leaf.
    """
    immutable: dict[int, bool] = {}  # by identity: a handler need not be hashable
    found: dict[str, Any] = {}
    for name, value, handler in values:
        never_changes = immutable.get(id(handler))
        if never_changes is None:
            never_changes = isinstance(handler, SnapshotHandler) and handler.immutable
            immutable[id(handler)] = never_changes
        if never_changes:
            with suppress(TypeError):  # its class does not support weak references
                found[name] = ref(value)

    return found

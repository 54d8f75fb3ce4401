"""A cache of objects in memory that equal leaves of the last few checkpoints."""

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
"""What is known of the trees of one checkpoint, by the directory that holds each."""


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
        """Note what lies at `path` while it has this `identity` (see `Store.identity`).

        Adds to what is known of it already, for arrays that were saved there and arrays that were restored
        from there are different objects.

        Args:
            path: The checkpoint.
            identity: As it is now.
            references: For the directory of each tree in it, what lies there, by stored name.
        """

        def added(before: tuple[object, ByDirectory] | None) -> tuple[tuple[object, ByDirectory], int]:
            known: ByDirectory = {} if before is None or before[0] != identity else before[1]
            merged = {name: {**known.get(name, {}), **found} for name, found in references.items()}
            return _sized(identity, {**known, **merged})

        self._known.change(path, added)

    def moved(self, path: str, to: str, identity: object) -> None:
        """Note that the only tree at `path` has been moved to `to`.

        Args:
            path: Where it was saved; nothing is done if that is not known.
            to: Its new place.
            identity: As it is there now.
        """
        _, references = self._known.pop(path) or (None, {})
        if path in references:
            self._known.put(to, *_sized(identity, {to: references[path]}))

    def find(self, path: str, identity: object) -> ByDirectory:
        """Return what is known of each tree at `path`; nothing if something else lies there by now."""
        known, references = self._known.get(path) or (None, {})
        return references if known == identity else {}


def _sized(identity: object, references: ByDirectory) -> tuple[tuple[object, ByDirectory], int]:
    n_references = sum(map(len, references.values()))
    return (identity, references), _BYTES_OF_A_REFERENCE * n_references


def references_to(values: Iterable[tuple[str, object, LeafHandler]]) -> References:
    """Make weak references to those of the values that never change.

    Args:
        values: Stored names, values, and the handlers of those.
    """
    immutable: dict[int, bool] = {}  # by identity: a handler need not be hashable
    found: dict[str, Any] = {}
    for name, value, handler in values:
        never_changes = immutable.get(id(handler))
        if never_changes is None:
            never_changes = isinstance(handler, SnapshotHandler) and handler.immutable
            immutable[id(handler)] = never_changes
        if never_changes:
            with suppress(TypeError):  # of a class without weak references
                found[name] = ref(value)

    return found

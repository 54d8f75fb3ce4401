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
            known: ByDirectory = {} if before is None or before[0] != identity else before[1]
            merged = {name: {**known.get(name, {}), **found} for name, found in references.items()}
            return _sized(identity, {**known, **merged})

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
            self._known.put(to, *_sized(identity, {to: references[path]}))

    def find(self, path: str, identity: object) -> ByDirectory:
        """Return the known values of each tree at `path`; empty if the identity has changed."""
        known, references = self._known.get(path) or (None, {})
        return references if known == identity else {}


def _sized(identity: object, references: ByDirectory) -> tuple[tuple[object, ByDirectory], int]:
    n_references = sum(map(len, references.values()))
    return (identity, references), _BYTES_OF_A_REFERENCE * n_references


def references_to(
    infos: Sequence[ParamInfo], values: Sequence[object], handlers: Sequence[LeafHandler]
) -> References:
    """Make weak references to the values that are immutable, by stored name.

    Args:
        infos: Where the leaves stand.
        values: Of the same leaves.
        handlers: Of the same leaves.
    """
    kinds = {id(handler): handler for handler in handlers}
    immutable = {
        number for number, each in kinds.items() if isinstance(each, SnapshotHandler) and each.immutable
    }
    found: dict[str, Any] = {}
    if not immutable:
        return found

    # Whether there can be a weak reference is a matter of the type.
    firsts = {
        type(value): value for value, each in zip(values, handlers, strict=True) if id(each) in immutable
    }
    types = {kind for kind, value in firsts.items() if _can_be_referred_to(value)}
    for name, value, handler in zip(names_of(infos), values, handlers, strict=True):
        if type(value) in types and id(handler) in immutable:
            found[name] = ref(value)

    return found


def _can_be_referred_to(value: object) -> bool:
    try:
        ref(value)
    except TypeError:
        return False

    return True

"""Which objects in memory are known to equal which leaves of which checkpoints."""

from __future__ import annotations

__all__ = ("KnownValues", "references_to")

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from threading import Lock
from typing import Any, TypeAlias, final
from weakref import ref

from penstock.kernel.pipeline.run_context import References
from penstock.kernel.protocols.leaf_handlers import LeafHandler, SnapshotHandler

ByDirectory: TypeAlias = Mapping[str, References]
"""What is known of the trees of one checkpoint, by the directory that holds each."""


@final
@dataclass(frozen=True, slots=True, eq=False)
class KnownValues:
    """Remembers the values of the last few checkpoints, without keeping them alive. Thread-safe.

    Args:
        most: Checkpoints to remember.
    """

    most: int = 4
    _known: dict[str, tuple[object, ByDirectory]] = field(
        default_factory=dict["str", "tuple[object, ByDirectory]"], init=False, repr=False
    )
    _lock: Lock = field(default_factory=Lock, init=False, repr=False)

    def remember(self, path: str, identity: object, references: ByDirectory) -> None:
        """Note what lies at `path` while it has this `identity` (see `Store.identity`).

        Adds to what is known of it already: arrays that were saved there and arrays restored from there
        are other objects.

        Args:
            path: The checkpoint.
            identity: As it is now.
            references: For the directory of each tree in it, what lies there, by stored name.
        """
        with self._lock:
            known, before = self._known.pop(path, (None, {}))
            if known == identity:
                merged = {name: {**before.get(name, {}), **found} for name, found in references.items()}
                references = {**before, **merged}

            self._known[path] = (identity, references)
            while len(self._known) > self.most:
                del self._known[next(iter(self._known))]

    def moved(self, path: str, to: str, identity: object) -> None:
        """Note that the one tree at `path`, saved there, lies at `to` by now.

        Args:
            path: Where it was saved; nothing is done if that is not known.
            to: Its new place.
            identity: As it is there now.
        """
        with self._lock:
            _, references = self._known.pop(path, (None, {}))
            if path in references:
                self._known[to] = (identity, {to: references[path]})

    def find(self, path: str, identity: object) -> ByDirectory:
        """Return what is known of each tree at `path`; nothing if something else lies there by now."""
        with self._lock:
            known, references = self._known.get(path, (None, {}))

        return references if known == identity else {}


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

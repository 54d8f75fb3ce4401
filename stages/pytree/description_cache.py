"""A cache of saved trees, so that a tree that is saved again need not be described again."""

from __future__ import annotations

__all__ = ("SavedTree", "SavedTrees", "Signed")

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias, final

from penstock.kernel.memory.bounded_cache import BoundedCache, ByIdentity
from penstock.kernel.protocols.leaf import LeafSpec, ParamInfo
from penstock.kernel.protocols.leaf_handlers import LeafHandler

_BYTES_OF_A_LEAF: Final = 32  # two references, and a part in specs that are shared


Signed: TypeAlias = Mapping[int, Mapping[object, LeafSpec]]
"""The spec of each signature, by the identity of the handler that gave it."""


@final
@dataclass(frozen=True, slots=True, eq=False)
class SavedTree:
    """The leaves of one tree, without their values."""

    infos: Sequence[ParamInfo]  #: the same object that the structure cache returns for this structure
    specs: Sequence[LeafSpec]
    handlers: Sequence[LeafHandler]
    save_args: Sequence[object] = ()  #: one for each leaf; empty if there were none
    coded: bool = False  #: whether any leaf has a codec
    signed: Signed = field(default_factory=dict[int, Mapping[object, LeafSpec]])
    is_local: bool = False  #: whether each process writes all that it holds, on a disk of its own


@final
class SavedTrees:
    """Remembers the last few trees that were saved. Thread-safe.

    Args:
        most: Trees to remember.
    """

    __slots__ = ("_known",)

    def __init__(self, most: int = 4) -> None:
        self._known: BoundedCache[ByIdentity, SavedTree] = BoundedCache(most)

    @property
    def caches(self) -> Sequence[BoundedCache[Any, Any]]:
        """See `Caching`."""
        return (self._known,)

    def find(self, infos: Sequence[ParamInfo]) -> SavedTree | None:
        """Return the tree that was saved last with this `infos` object; None if it is not known."""
        return self._known.get(ByIdentity(infos))

    def keep(self, tree: SavedTree) -> None:
        """Remember `tree`; it replaces an earlier tree of the same structure."""
        self._known.put(ByIdentity(tree.infos), tree, _BYTES_OF_A_LEAF * len(tree.specs))

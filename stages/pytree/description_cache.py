"""What is known of trees that were saved before, so that the same one need not be described again."""

from __future__ import annotations

__all__ = ("SavedTree", "SavedTrees")

from collections.abc import Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import Any, final

from penstock.kernel.messages.save import Leaf
from penstock.kernel.protocols.leaf import ParamInfo


@final
@dataclass(frozen=True, slots=True, eq=False)
class SavedTree:
    """The leaves of one tree, without their values."""

    infos: Sequence[ParamInfo]  #: the very object that the structure cache gives for this structure
    leaves: tuple[Leaf, ...]
    signatures: Sequence[object]  #: what each leaf's handler said of its value; None if it must be asked
    save_args: Sequence[object] = ()  #: of each leaf; nothing if there were none
    coded: bool = False  #: whether any leaf has a codec


@final
@dataclass(frozen=True, slots=True, eq=False)
class SavedTrees:
    """Remembers the last few trees that were saved. Thread-safe.

    Args:
        most: Trees to remember.
    """

    most: int = 4
    _known: list[SavedTree] = field(default_factory=list[SavedTree], init=False, repr=False)
    _lock: Lock = field(default_factory=Lock, init=False, repr=False)

    def find(self, infos: Sequence[ParamInfo]) -> SavedTree | None:
        """Return the tree that was saved last with this structure, which is told by identity."""
        with self._lock:
            return next((tree for tree in reversed(self._known) if tree.infos is infos), None)

    def keep(self, tree: SavedTree) -> None:
        """Remember `tree` instead of any other of its structure."""
        with self._lock:
            others: list[Any] = [known for known in self._known if known.infos is not tree.infos]
            self._known[:] = [*others, tree][-self.most :]

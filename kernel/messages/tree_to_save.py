"""The first message of a save: what the caller gave, and what the stages declare before any of them runs."""

from __future__ import annotations

__all__ = ("TreeToSave",)

from collections.abc import Sequence
from typing import TYPE_CHECKING, final

if TYPE_CHECKING:
    from penstock.kernel.messages.changed_specs import CodecChoice, SpecChange


@final
class TreeToSave:
    """The caller's tree, until it is taken.

    Taking it lets go of it: a background save must not keep arrays alive that the caller dropped.

    Args:
        tree: The caller's.
        changes: What the stages behind the first declare that they do to leaves, in order, by stage name.
        codec_choice: The stage that decides which leaves with the codec `auto` get one; None if none does.
    """

    __slots__ = ("_tree", "changes", "codec_choice")

    def __init__(
        self,
        tree: object,
        changes: Sequence[tuple[str, SpecChange]] = (),
        codec_choice: CodecChoice | None = None,
    ) -> None:
        self._tree: list[object] = [tree]
        self.changes = tuple(changes)
        self.codec_choice = codec_choice

    def take(self) -> object:
        """Return the tree and forget it. To be called once."""
        return self._tree.pop()

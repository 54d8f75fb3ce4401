"""Key paths read from a document: how they are shown, and how long they may be."""

from __future__ import annotations

__all__ = ("MOST_LEVELS", "KeyPathBudget", "show_key_path")

from collections.abc import Sequence
from typing import Final, final

from penstock.kernel.errors import UnsupportedFormatError
from penstock.kernel.protocols.leaf import KeyKind, KeyPath

MOST_LEVELS: Final = 256
"""How deep containers may be nested in a document. jax flattens trees by recursion, too."""


def show_key_path(keys: KeyPath, kinds: Sequence[KeyKind]) -> str:
    """Return the path as `jax.tree_util.keystr` prints it, as far as the medium tells: `['opt'][0]['mu']`.

    Attributes and dict keys are not told apart on the medium, so both are shown as dict keys.
    """
    return "".join(
        [
            f"[{key!r}]" if kind is KeyKind.MAPPING else f"[{key}]"
            for key, kind in zip(keys, kinds, strict=True)
        ]
    )


@final
class KeyPathBudget:
    """Limits how many leaves a document has, and the length of their key paths together.

    Each path repeats the keys above it, and each leaf takes some hundred bytes beside it, but perhaps no more
    than one byte in the document. A small document could otherwise take gigabytes.

    Args:
        path: Of the document, for the error.
    """

    MOST_CHARACTERS: Final = 256 * 1024 * 1024
    LEAF_CHARACTERS: Final = 128  #: counted for each leaf beside those of its keys

    __slots__ = ("_left", "_path")

    def __init__(self, path: str) -> None:
        self._path = path
        self._left = self.MOST_CHARACTERS

    def spend(self, keys: KeyPath) -> None:
        """Count the key path of one more leaf.

        Raises:
            UnsupportedFormatError: If all of them together are too long.
        """
        self._left -= self.LEAF_CHARACTERS + sum(map(len, keys))
        if self._left < 0:
            raise UnsupportedFormatError(
                self._path, f"its leaves and key paths take more than {self.MOST_CHARACTERS} characters"
            )

"""Key paths as a medium tells them: shown to people, and kept from being endless."""

from __future__ import annotations

__all__ = ("MOST_LEVELS", "KeyPathBudget", "show_key_path")

from collections.abc import Sequence
from typing import Final, final

from penstock.kernel.errors import UnsupportedFormatError
from penstock.kernel.protocols.leaf import KeyKind, KeyPath

MOST_LEVELS: Final = 256
"""Containers within each other, in a document that nests. jax, too, takes trees apart by recursion."""


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
    """Keeps a small document with long keys far up in it from being spelled out to gigabytes.

    Args:
        path: Of the document, for the error.
    """

    MOST_CHARACTERS: Final = 256 * 1024 * 1024

    __slots__ = ("_left", "_path")

    def __init__(self, path: str) -> None:
        self._path = path
        self._left = self.MOST_CHARACTERS

    def spend(self, keys: KeyPath) -> None:
        """Count the key path of one more leaf.

        Raises:
            UnsupportedFormatError: If all of them together are too long.
        """
        self._left -= sum(map(len, keys))
        if self._left < 0:
            raise UnsupportedFormatError(
                self._path, f"its key paths take more than {self.MOST_CHARACTERS} characters"
            )

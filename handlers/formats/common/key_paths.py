"""Key paths read from a document: how they are shown, how long they may be, and which fit in one tree."""

from __future__ import annotations

__all__ = ("MOST_LEVELS", "KeyPathBudget", "check_tree", "show_key_path")

from collections.abc import Sequence
from typing import Final, final

from penstock.kernel.errors import SpecError, UnsupportedFormatError
from penstock.kernel.protocols.leaf import KeyKind, KeyPath, ParamInfo

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


def check_tree(path: str, names: Sequence[ParamInfo], split: Sequence[ParamInfo], separator: str) -> None:
    """Refuse two equal key paths, and a key path that is a prefix of another.

    Args:
        path: Of the checkpoint, for the error.
        names: The leaves under their names.
        split: The same leaves, in the same order, at their key paths.
        separator: For the error.

    Raises:
        SpecError: Naming both.
    """
    owners: dict[KeyPath, str] = {}
    for flat, info in zip(names, split, strict=True):
        first = owners.setdefault(info.keys, flat.name)
        if first != flat.name:
            raise _collision(path, first, flat.name, separator)

    for flat, info in zip(names, split, strict=True):
        for depth in range(len(info.keys)):
            shorter = owners.get(info.keys[:depth])
            if shorter is not None:
                raise _collision(path, shorter, flat.name, separator)


def _collision(path: str, first: str, second: str, separator: str) -> SpecError:
    return SpecError(
        f"{path}: {first!r} and {second!r} cannot both stand in one tree when names are split at "
        f"{separator!r}; read it flat, without split"
    )

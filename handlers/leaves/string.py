"""Leaves that are strings."""

from __future__ import annotations

__all__ = ("StringHandler",)

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np

from penstock.handlers.leaves.mismatches import different, type_name, type_of
from penstock.kernel.errors import InvalidLeafError, TreeDifference
from penstock.kernel.protocols.leaf import LeafSpec, ParamInfo, StoredLeaf
from penstock.kernel.protocols.reads import Target
from penstock.kernel.protocols.views import FilledLeaf, StagedLeaf
from penstock.kernel.protocols.written import PiecePlan


@final
@dataclass(frozen=True, slots=True)
class StringHandler:
    """Stores a `str` in one of the layout's documents, without pieces or regions."""

    typestr: str = "string"

    def describe(self, value: Any, info: ParamInfo) -> LeafSpec:
        """Return the spec to store for a `str` or `np.str_`.

        Raises:
            InvalidLeafError: If the value is of another subclass of `str`, whose type would be lost, or
                contains surrogates, which UTF-8 cannot encode.
        """
        if type(value) is not str and type(value) is not np.str_:
            raise InvalidLeafError(
                info.key_path,
                f"a {type_name(value)} would come back as str; save str(value), or register a handler",
            )

        text = str(value)
        if not text.isascii():
            try:
                text.encode()
            except UnicodeEncodeError as error:
                raise InvalidLeafError(
                    info.key_path,
                    f"the string is no valid Unicode text ({error.reason}); save bytes as uint8",
                ) from error

        return LeafSpec(self.typestr, text=text)

    def pieces(self, leaf: StagedLeaf, piece_bytes: int) -> Iterator[PiecePlan]:
        return iter(())

    def target(self, stored: StoredLeaf, like: Any, has_like: bool) -> Target | TreeDifference:
        """Accept a string target, or its type, for a stored string; the target's text does not matter."""
        if stored.spec.text is None:
            return different("type", stored, "string")

        return Target(detail=np.str_ if has_like and type_of(like) is np.str_ else str)

    def build(self, leaves: Sequence[FilledLeaf]) -> Sequence[Any]:
        """Return the strings, each as `np.str_` if the target asks for that, else as `str`."""
        texts = (leaf.stored.spec.text for leaf in leaves)
        return [
            np.str_(text) if leaf.target.detail is np.str_ else text
            for leaf, text in zip(leaves, texts, strict=True)
        ]

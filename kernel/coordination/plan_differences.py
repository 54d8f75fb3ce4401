"""What differs between two processes' plans, in words."""

from __future__ import annotations

__all__ = ("MOST_PIECE", "differences", "joined", "pieces_of")

import zlib
from collections.abc import Iterator, Mapping, Sequence

from penstock.kernel.errors import CoordinationError

NOTHING = "nothing"
MOST_PIECE = 64 * 1024
"""Bytes of one value; the service is made for small ones."""


def pieces_of(lines: Sequence[str]) -> Iterator[bytes]:
    """Yield a plan, a line for each leaf, as values for the service."""
    data = zlib.compress("\n".join(lines).encode("utf-8", "surrogateescape"), 1)
    for at in range(0, len(data), MOST_PIECE):
        yield data[at : at + MOST_PIECE]


def joined(pieces: Mapping[str, bytes]) -> list[str]:
    """Return the lines that `pieces_of` cut, by the place of each piece."""
    data = b"".join(pieces[key] for key in sorted(pieces, key=int))
    try:
        return zlib.decompress(data).decode("utf-8", "surrogateescape").split("\n")
    except (zlib.error, ValueError) as error:
        raise CoordinationError(f"the primary's plan cannot be read: {error}") from error


def differences(theirs: Sequence[str], mine: Sequence[str], processes: tuple[int, int]) -> list[str]:
    """Return a line for each leaf that is not the same.

    Args:
        theirs: The primary's plan; a line begins with a leaf's key path and a tab.
        mine: That of another process.
        processes: The index of the primary, and of that other one.
    """
    (primary, index), at_primary, here = processes, _by_leaf(theirs), _by_leaf(mine)
    names = [*at_primary, *[name for name in here if name not in at_primary]]
    return [
        f"{name}: process {primary} has {at_primary.get(name, NOTHING)}, "
        f"process {index} has {here.get(name, NOTHING)}"
        for name in names
        if at_primary.get(name) != here.get(name)
    ]


def _by_leaf(lines: Sequence[str]) -> dict[str, str]:
    return {name: what for name, _, what in [line.partition("\t") for line in lines]}

"""The crc32c of bytes that follow each other, from the crc32c of each part. Pure.

Source:
    The method of zlib's `crc32_combine`: appending zero bytes to a message changes its checksum by a linear
    map over GF(2), and the map for n bytes is a product of maps for powers of two.
"""

from __future__ import annotations

__all__ = ("append_zeros", "append_zeros_to_each", "combined_crc32c")

from collections.abc import Iterable
from functools import lru_cache
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

_POLYNOMIAL: Final = 0x82F63B78  # of crc32c, its bits reversed

_Map: TypeAlias = tuple[int, ...]
"""A linear map of 32 bits: the image of each bit."""


def combined_crc32c(parts: Iterable[tuple[int, int]]) -> int:
    """Return the crc32c of parts that follow each other.

    Args:
        parts: The crc32c and the number of bytes of each part, in order.
    """
    found = 0
    for crc32c, nbytes in parts:
        found = append_zeros(found, nbytes) ^ crc32c

    return found


def append_zeros(crc32c: int, nbytes: int) -> int:
    """Return what a checksum adds to that of the whole message if `nbytes` bytes follow."""
    power = 0
    while nbytes and crc32c:
        if nbytes & 1:
            crc32c = _apply(_zeros(power), crc32c)

        nbytes >>= 1
        power += 1

    return crc32c


def append_zeros_to_each(
    crc32cs: npt.NDArray[np.uint32], nbytes: npt.NDArray[np.int64]
) -> npt.NDArray[np.uint32]:
    """Do what `append_zeros` does for many checksums at once, each with its own number of bytes."""
    found, left, power = crc32cs.copy(), nbytes.copy(), 0
    while left.any():
        odd = np.flatnonzero(left & 1)
        if len(odd):
            images, bits = _images(power), found[odd]
            parts = [images[at][bits >> (8 * at) & 0xFF] for at in range(4)]
            found[odd] = parts[0] ^ parts[1] ^ parts[2] ^ parts[3]

        left >>= 1
        power += 1

    return found


@lru_cache(maxsize=64)
def _images(power: int) -> npt.NDArray[np.uint32]:
    """Return what the map of 2**power zero bytes makes of each value of each byte, by place and value."""
    map_ = _zeros(power)
    return np.array([[_apply(map_, byte << (8 * at)) for byte in range(256)] for at in range(4)], np.uint32)


@lru_cache(maxsize=64)
def _zeros(power: int) -> _Map:
    """Return the map of 2**power zero bytes."""
    if power:
        return _squared(_zeros(power - 1))

    found: _Map = (_POLYNOMIAL, *[1 << bit for bit in range(31)])  # one zero bit
    for _ in range(3):
        found = _squared(found)

    return found


def _squared(map_: _Map) -> _Map:
    return tuple([_apply(map_, image) for image in map_])


def _apply(map_: _Map, bits: int) -> int:
    found = at = 0
    while bits:
        if bits & 1:
            found ^= map_[at]

        bits >>= 1
        at += 1

    return found

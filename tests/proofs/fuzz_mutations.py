"""Changes to bytes that a reader may stumble over: flipped bits, cut and repeated parts, odd numbers."""

from __future__ import annotations

__all__ = ("mutated",)

import json
import random
import re
from collections.abc import Callable, Sequence
from typing import Any, Final

NUMBERS: Final = (0, 1, 2, 127, 128, 255, 256, 2**16, 2**31 - 1, 2**31, 2**32, 2**60, 2**63 - 1, 2**63, 2**64)
VALUES: Final[tuple[Any, ...]] = (
    None, True, False, -1, -(2**63), 1e308, 10**30, "", "x", "\0", "\ud800", "../x", "/etc/passwd", "a/b",
    "é" * 300,     [], {}, [[]], [None], {"": None}, [2**62, 2**62], [0], [1] * 70, *NUMBERS,
)  # fmt: skip

_DIGITS: Final = re.compile(rb"-?\d+")


def mutated(rng: random.Random, data: bytes, others: Sequence[bytes]) -> bytes:
    """Return the bytes with one change, or a few.

    Args:
        rng: Decides.
        data: What to change.
        others: From which parts may be taken.
    """
    for _ in range(rng.choice((1, 1, 1, 2, 2, 3, 5))):
        changes = (
            _CHANGES if data[:1] not in (b"{", b"[") else (*_CHANGES, _member, _member, _digits, _digits)
        )
        data = rng.choice(changes)(rng, data, others)

    return data


def _flip(rng: random.Random, data: bytes, _: Sequence[bytes]) -> bytes:
    changed = bytearray(data or b"\0")
    changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def _byte(rng: random.Random, data: bytes, _: Sequence[bytes]) -> bytes:
    changed = bytearray(data or b"\0")
    changed[rng.randrange(len(changed))] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
    return bytes(changed)


def _number(rng: random.Random, data: bytes, _: Sequence[bytes]) -> bytes:
    width = rng.choice((1, 2, 4, 8))
    number = rng.choice((*NUMBERS, -1, -2)) % (1 << 8 * width)
    at = rng.randrange(len(data) + 1)
    return data[:at] + number.to_bytes(width, rng.choice(("big", "little"))) + data[at + width :]


def _varint(rng: random.Random, data: bytes, _: Sequence[bytes]) -> bytes:
    number, encoded = rng.choice(NUMBERS), bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7

    at = rng.randrange(len(data) + 1)
    return data[:at] + bytes(encoded) + bytes([number]) + data[at + rng.randrange(2) :]


def _cut(rng: random.Random, data: bytes, _: Sequence[bytes]) -> bytes:
    return data[: rng.randrange(len(data) + 1)]


def _removed(rng: random.Random, data: bytes, _: Sequence[bytes]) -> bytes:
    at, n = rng.randrange(len(data) + 1), rng.choice((1, 2, 4, 16, 200))
    return data[:at] + data[at + n :]


def _repeated(rng: random.Random, data: bytes, _: Sequence[bytes]) -> bytes:
    at, n = rng.randrange(len(data) + 1), rng.choice((1, 2, 4, 16, 200))
    return data[:at] + data[at : at + n] * rng.choice((2, 2, 3, 100)) + data[at + n :]


def _spliced(rng: random.Random, data: bytes, others: Sequence[bytes]) -> bytes:
    other = rng.choice(others) if others else data
    at, there = rng.randrange(len(data) + 1), rng.randrange(len(other) + 1)
    n = rng.choice((1, 8, 64, 1024))
    return data[:at] + other[there : there + n] + data[at + rng.choice((0, n)) :]


def _digits(rng: random.Random, data: bytes, _: Sequence[bytes]) -> bytes:
    found = list(_DIGITS.finditer(data))
    if not found:
        return data

    match = rng.choice(found)
    number = rng.choice((*NUMBERS, -1, int(match[0][:15]) + 1))
    return data[: match.start()] + str(number).encode() + data[match.end() :]


def _member(rng: random.Random, data: bytes, _: Sequence[bytes]) -> bytes:
    """Replace, remove, repeat or nest a part of a JSON document."""
    try:
        return json.dumps(_changed(rng, json.loads(data))).encode()
    except (ValueError, RecursionError):  # not JSON, or nested more deeply than Python writes it
        return data


def _changed(rng: random.Random, node: Any) -> Any:
    inner = (
        list(node.items()) if isinstance(node, dict) else list(enumerate(node)) if type(node) is list else []
    )
    if not inner or rng.random() < 0.15:
        return _instead(rng, node)

    key, value = rng.choice(inner)
    if isinstance(node, dict):
        match rng.randrange(12):
            case 0:
                return {name: each for name, each in node.items() if name != key}
            case 1:
                return {(str(rng.choice(VALUES)) if name == key else name): each for name, each in inner}
            case _:
                return node | {key: _changed(rng, value)}

    if rng.randrange(8) == 0:
        return node[:key] + node[key + 1 :] if rng.random() < 0.5 else node + node[key:]

    return [*node[:key], _changed(rng, value), *node[key + 1 :]]


def _instead(rng: random.Random, node: Any) -> Any:
    if isinstance(node, str) and rng.random() < 0.5:  # perhaps a document within a document
        return mutated(rng, node.encode(errors="surrogatepass"), ()).decode(errors="surrogateescape")
    if rng.randrange(20) == 0:
        for _ in range(rng.choice((10, 300, 1200))):
            node = [node] if rng.random() < 0.5 else {"k": node}

        return node

    return rng.choice(VALUES)


_CHANGES: Final[tuple[Callable[[random.Random, bytes, Sequence[bytes]], bytes], ...]] = (
    _flip,
    _byte,
    _number,
    _varint,
    _cut,
    _removed,
    _repeated,
    _spliced,
)
_OF_JSON: Final = (_member, _digits)

"""The codecs `blosc`, and `floats`, which names those of Blosc's that are best for numbers.

Weights that are alike have alike bits in alike places: signs and exponents, not the low bits of a mantissa.
Blosc puts these next to each other before it compresses, bit by bit or byte by byte. zstd alone finds little
in the same bytes, and takes longer. Blosc is in the zarr specification, so Orbax reads what it wrote.

In the metadata of an array both are `blosc`. numcodecs encodes and decodes them in the calling thread, from
and into the bytes of the leaf. Where it is not installed TensorStore does, which takes up to twice as long:
it fills fresh memory and copies. Either reads what the other wrote.
"""

from __future__ import annotations

__all__ = ("BLOSC", "FLOATS", "Blosc")

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any, ClassVar, Final, final

import numpy as np

from penstock.handlers.formats.codecs.tensorstore_codecs import encode_with_tensorstore

_SHUFFLES: Final = ("noshuffle", "shuffle", "bitshuffle")  # in zarr 2 they are 0, 1 and 2
_COMPRESSORS: Final = ("lz4", "lz4hc", "blosclz", "zlib", "zstd")
_WIDEST: Final = 8  # of a complex128, each half by itself
_MOST_BLOCK: Final = 2**30
_HEADER: Final = struct.Struct("<4xI4xI")  # of a frame: bytes before, and bytes after, header included


@final
@dataclass(frozen=True, slots=True)
class Blosc:
    """One of Blosc's compressors, its level from 0 to 9, what is shuffled before, and in blocks of how many.

    Blocks of 0 bytes are as long as Blosc likes.
    """

    compressor: str = "lz4"
    level: int = 5
    shuffle: str = "bitshuffle"
    block_bytes: int = 0

    def __post_init__(self) -> None:
        fits = self.compressor in _COMPRESSORS and self.shuffle in _SHUFFLES
        if not (fits and 0 <= self.level <= 9 and 0 <= self.block_bytes <= _MOST_BLOCK):
            raise ValueError(f"Blosc has no {self.text!r}")

    @property
    def text(self) -> str:
        blocks = f":{self.block_bytes}" if self.block_bytes else ""
        return f"blosc:{self.compressor}:{self.level}:{self.shuffle}{blocks}"

    @property
    def in_tensorstore(self) -> bool:
        return numcodecs_blosc() is None

    def zarr2(self, itemsize: int) -> Mapping[str, Any]:
        return {
            "blocksize": self.block_bytes,
            "clevel": self.level,
            "cname": self.compressor,
            "shuffle": _SHUFFLES.index(self.shuffle),
        }

    def zarr3(self, itemsize: int) -> Mapping[str, Any]:
        return {
            "blocksize": self.block_bytes,
            "clevel": self.level,
            "cname": self.compressor,
            "shuffle": self.shuffle,
            "typesize": min(itemsize, _WIDEST),
        }

    def encode(self, chunks: Sequence[memoryview], itemsize: int) -> Sequence[bytes]:
        width = min(itemsize, _WIDEST)
        library = numcodecs_blosc()
        if library is None:
            return encode_with_tensorstore({"id": "blosc", **self.zarr2(width)}, chunks, width)

        shuffle = _SHUFFLES.index(self.shuffle)
        codec = library.Blosc(self.compressor, self.level, shuffle, self.block_bytes)
        return [codec.encode(np.frombuffer(chunk, f"u{width}")) for chunk in chunks]

    def decode(self, stored: memoryview, memory: memoryview) -> None:
        library = numcodecs_blosc()
        assert library is not None, "TensorStore decodes it"
        if len(stored) < _HEADER.size:
            raise ValueError(f"{len(stored)} bytes are no frame of Blosc's")

        # Blosc itself believes what the frame says of its length, and reads as far.
        nbytes, length = _HEADER.unpack_from(stored)
        if (nbytes, length) != (len(memory), len(stored)):
            raise ValueError(
                f"a frame of {length} bytes for {nbytes}, not of {len(stored)} for {len(memory)}"
            )

        library.decompress(stored, memory)


@cache
def numcodecs_blosc() -> Any:
    """Numcodecs' Blosc, whose calls release the interpreter; None if it is not installed.

    Every call of it is made in a worker thread: in a program's first thread it starts threads of its own.
    """
    try:
        return import_module("numcodecs.blosc")
    except ImportError:
        return None


@final
class _BloscType:
    __slots__ = ()

    usage: ClassVar[str] = "blosc:<compressor>:<0 to 9>:<shuffle>"

    def parse(self, options: str) -> Blosc:
        if not options:
            return Blosc()

        compressor, level, shuffle, *blocks = options.split(":")
        (block_bytes,) = blocks or ["0"]
        return Blosc(compressor, int(level), shuffle, int(block_bytes))

    def from_zarr(self, options: Mapping[str, Any]) -> Blosc:
        shuffle: int | str = options["shuffle"]
        name = shuffle if isinstance(shuffle, str) else _SHUFFLES[shuffle]
        return Blosc(options["cname"], options["clevel"], name, options.get("blocksize", 0))


BLOSC: Final = _BloscType()
"""An entry point."""

_LEVELS: Final[Mapping[str, Blosc]] = {
    # Signs and exponents by bits, at the speed of memory. In blocks of 128 KiB, which the shuffled bits fill
    # four times over, the highest level costs little and finds a hundredth more.
    "": Blosc("lz4", 9, "bitshuffle", 2**17),
    # Bytes of one kind, coded by their frequencies: in blocks of 1 MiB zstd's first level finds all there is
    # in exponents, three per cent above the entropy of bfloat16, and in Blosc's own blocks, of 256 KiB and
    # less, half of it in twice the time. Higher levels look for repetitions, of which numbers have none.
    "archive": Blosc("zstd", 1, "shuffle", 2**20),
}


@final
class _FloatsType:
    __slots__ = ()

    usage: ClassVar[str] = "floats[:archive]"

    def parse(self, options: str) -> Blosc:
        try:
            return _LEVELS[options]
        except KeyError:
            raise ValueError(f"{options!r} is not 'archive'") from None

    def from_zarr(self, options: Mapping[str, Any]) -> Blosc:
        raise NotImplementedError("zarr calls it blosc")


FLOATS: Final = _FloatsType()
"""An entry point."""

"""The codec `blosc`, in one file: `[format] codec = "blosc"`, or `"blosc:lz4:5:bitshuffle"`.

Floating-point numbers that vary little have alike bits in alike places. Blosc puts these next to each other
before it compresses, so that neighbouring weights take less than zstd alone leaves of them.
"""

from __future__ import annotations

__all__ = ("BLOSC", "Blosc")

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final

from penstock.handlers import encode_with_tensorstore

_SHUFFLES: Final = ("noshuffle", "shuffle", "bitshuffle")  # in this order they are 0, 1 and 2
_COMPRESSORS: Final = ("lz4", "lz4hc", "blosclz", "zlib", "zstd")


@dataclass(frozen=True, slots=True)
class Blosc:
    """One of Blosc's compressors, its level from 0 to 9, and what is shuffled before."""

    compressor: str = "lz4"
    level: int = 5
    shuffle: str = "bitshuffle"
    in_tensorstore: ClassVar[bool] = True  # so Orbax reads it, too

    def __post_init__(self) -> None:
        if (
            self.compressor not in _COMPRESSORS
            or self.shuffle not in _SHUFFLES
            or self.level not in range(10)
        ):
            raise ValueError(f"Blosc has no {self.text!r}")

    @property
    def text(self) -> str:
        return f"blosc:{self.compressor}:{self.level}:{self.shuffle}"

    def zarr2(self, itemsize: int) -> Mapping[str, Any]:
        shuffle = _SHUFFLES.index(self.shuffle)
        return {"cname": self.compressor, "clevel": self.level, "shuffle": shuffle, "blocksize": 0}

    def zarr3(self, itemsize: int) -> Mapping[str, Any]:
        options = {"cname": self.compressor, "clevel": self.level, "shuffle": self.shuffle, "blocksize": 0}
        return {**options, "typesize": itemsize}

    def encode(self, chunks: Sequence[memoryview], itemsize: int) -> Sequence[bytes]:
        width = min(itemsize, 8)  # of a complex128, each half by itself
        return encode_with_tensorstore({"id": "blosc", **self.zarr2(width)}, chunks, width)

    def decode(self, stored: memoryview, nbytes: int) -> bytes:
        raise NotImplementedError("TensorStore decodes it")


class _BloscType:
    usage = "blosc:<compressor>:<0 to 9>:<shuffle>"

    def parse(self, options: str) -> Blosc:
        given = options.split(":") if options else []
        if not given:
            return Blosc()

        compressor, level, shuffle = given
        return Blosc(compressor, int(level), shuffle)

    def from_zarr(self, options: Mapping[str, Any]) -> Blosc:
        shuffle = options["shuffle"]
        name = shuffle if isinstance(shuffle, str) else _SHUFFLES[shuffle]
        return Blosc(options["cname"], options["clevel"], name)


BLOSC: Final = _BloscType()
"""What the entry point names."""

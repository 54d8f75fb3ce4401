"""The codec `zstd`: Zstandard, encoded and decoded by TensorStore."""

from __future__ import annotations

__all__ = ("ZSTD", "Zstd")

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, final

from penstock.handlers.formats.codecs.tensorstore_codecs import encode_with_tensorstore

_LEVEL: Final = re.compile(r"[1-9]|1[0-9]|2[0-2]")
_USUAL_LEVEL: Final = 1  # of noise, more levels save nothing; see docs/howto/choose-a-format.md


@final
@dataclass(frozen=True, slots=True)
class Zstd:
    """Zstandard at one level, from 1 to 22."""

    level: int = _USUAL_LEVEL
    in_tensorstore: ClassVar[bool] = True

    @property
    def text(self) -> str:
        return f"zstd:{self.level}"

    def zarr2(self, itemsize: int) -> Mapping[str, Any]:
        return {"level": self.level}

    def zarr3(self, itemsize: int) -> Mapping[str, Any]:
        return {"checksum": False, "level": self.level}

    def encode(self, chunks: Sequence[memoryview], itemsize: int) -> Sequence[bytes]:
        return encode_with_tensorstore({"id": "zstd", **self.zarr2(itemsize)}, chunks)

    def decode(self, stored: memoryview, memory: memoryview) -> None:
        raise NotImplementedError("TensorStore decodes it")


@final
class _ZstdType:
    __slots__ = ()

    usage: ClassVar[str] = "zstd:<1 to 22>"

    def parse(self, options: str) -> Zstd:
        if not options:
            return Zstd()
        if not _LEVEL.fullmatch(options):
            raise ValueError(f"{options!r} is no level from 1 to 22")

        return Zstd(int(options))

    def from_zarr(self, options: Mapping[str, Any]) -> Zstd:
        return Zstd(int(options["level"]))


ZSTD: Final = _ZstdType()
"""The entry point."""

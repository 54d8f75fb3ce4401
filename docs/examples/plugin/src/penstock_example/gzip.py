"""The codec `gzip`, in one file: `[format] codec = "gzip"`, or `"gzip:9"`.

Slower than penstock's own, and known to everything that reads zarr.
"""

from __future__ import annotations

__all__ = ("GZIP", "Gzip")

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final

from penstock.handlers import encode_with_tensorstore


@dataclass(frozen=True, slots=True)
class Gzip:
    """gzip at one level, from 1 to 9."""

    level: int = 5
    in_tensorstore: ClassVar[bool] = True  # so Orbax reads it, too

    def __post_init__(self) -> None:
        if self.level not in range(1, 10):
            raise ValueError(f"gzip has no level {self.level}")

    @property
    def text(self) -> str:
        return f"gzip:{self.level}"

    def zarr2(self, itemsize: int) -> Mapping[str, Any]:
        return {"level": self.level}

    def zarr3(self, itemsize: int) -> Mapping[str, Any]:
        return {"level": self.level}

    def encode(self, chunks: Sequence[memoryview], itemsize: int) -> Sequence[bytes]:
        return encode_with_tensorstore({"id": "gzip", "level": self.level}, chunks)

    def decode(self, stored: memoryview, memory: memoryview) -> None:
        raise NotImplementedError("TensorStore decodes it")


class _GzipType:
    usage = "gzip:<1 to 9>"

    def parse(self, options: str) -> Gzip:
        return Gzip(int(options)) if options else Gzip()

    def from_zarr(self, options: Mapping[str, Any]) -> Gzip:
        return Gzip(options["level"])


GZIP: Final = _GzipType()
"""What the entry point names."""

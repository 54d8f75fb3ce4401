"""How a checkpoint is to be stored: the options of a whole one, and those of a single leaf."""

from __future__ import annotations

__all__ = ("SaveArgs", "SaveFormat")

import re
from dataclasses import dataclass, field
from typing import Any, Final, Literal, final

from penstock.kernel.errors import ConfigError

_CODEC: Final = re.compile(r"none|auto|zstd(?::(\d{1,2}))?")
_LEVELS: Final = range(1, 23)
_DEFAULT_LEVEL: Final = 1  # of noise, more levels save nothing; see docs/howto/choose-the-format.md


@final
@dataclass(frozen=True, slots=True)
class SaveFormat:
    """`[format]`: how arrays are stored. Every combination is read by Orbax 0.12, v0 and v1, and by penstock.

    Attributes:
        ocdbt: Whether all arrays lie in one OCDBT database, or each in a directory of its own.
        zarr: The version of the zarr format.
        codec: `"none"`, `"zstd"`, `"zstd:<level>"` with a level from 1 to 22, or `"auto"`: zstd for each
            leaf whose bytes are found to compress well. Leaves below 16 KiB are stored as they are.
        chunk_byte_size: Cut shards into equal chunks of at most so many bytes, as Orbax would. By default
            a shard is one chunk, or some of about 16 MiB with a codec.
        ocdbt_target_data_file_size: A data file that has grown to so many bytes is followed by another
            one; 0: never. By default the option `file_bytes` of the stage `write` says it.
    """

    ocdbt: bool = True
    zarr: Literal[2, 3] = 2
    codec: str = "none"
    chunk_byte_size: int | None = field(default=None, metadata={"positive": True})
    ocdbt_target_data_file_size: int | None = None

    def __post_init__(self) -> None:
        found = _CODEC.fullmatch(self.codec)
        if found is None or (found[1] is not None and int(found[1]) not in _LEVELS):
            problem = f"must be 'none', 'auto', 'zstd' or 'zstd:<1 to 22>', not {self.codec!r}"
            raise ConfigError("format.codec", problem)
        if self.zarr not in (2, 3):
            raise ConfigError("format.zarr", f"must be 2 or 3, not {self.zarr!r}")
        if self.chunk_byte_size is not None and self.chunk_byte_size <= 0:
            raise ConfigError("format.chunk_byte_size", f"must be positive, not {self.chunk_byte_size}")
        if (self.ocdbt_target_data_file_size or 0) < 0:
            problem = f"must not be negative: {self.ocdbt_target_data_file_size}"
            raise ConfigError("format.ocdbt_target_data_file_size", problem)

    @property
    def leaf_codec(self) -> str | None:
        """What goes into `LeafSpec.codec`: None, `"auto"`, or `"zstd:<level>"`."""
        match self.codec:
            case "none":
                return None
            case "zstd":
                return f"zstd:{_DEFAULT_LEVEL}"
            case codec:
                return codec


@final
@dataclass(frozen=True, slots=True)
class SaveArgs:
    """How one leaf is to be stored; None for what the format of the checkpoint says.

    Attributes:
        dtype: Of the stored elements, as anything that numpy takes for a dtype. Values are cast to it as
            C would, and nothing records what they were.
        chunk_byte_size: See `SaveFormat`.
        shard_axes: Axes that are cut into single indices first, as Orbax does.
    """

    dtype: Any = None
    chunk_byte_size: int | None = None
    shard_axes: tuple[int, ...] = ()

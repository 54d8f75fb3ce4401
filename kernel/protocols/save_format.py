"""Options of storing: those of a whole checkpoint, and those of a single leaf."""

from __future__ import annotations

__all__ = (
    "SaveArgs",
    "SaveFormat",
)

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeGuard, cast, final

from penstock.kernel.codecs import AUTO, check_codec
from penstock.kernel.errors import ConfigError, SpecError

_WORDS: Final = ("none", AUTO)  # next to the codecs that there are
_LEAST: Final[Mapping[str, int]] = {
    "chunk_byte_size": 1,
    "ocdbt_target_data_file_size": 0,
    "replica_parallel_max_replicas": 1,
    "replica_parallel_min_bytes": 0,
}
"""Options that are a whole number or None, mostly of bytes, with the least value of each."""


@final
@dataclass(frozen=True, slots=True)
class SaveFormat:
    """`[format]`: how arrays are stored. Every combination is read by Orbax 0.12, v0 and v1, and by penstock.

    Attributes:
        ocdbt: Whether all arrays are in one OCDBT database, instead of a directory for each array.
        zarr: The version of the zarr format.
        codec: `"none"`, `"floats"` (for weights, at the speed of memory), `"floats:archive"` (smaller,
            at half of it), `"zstd"`, `"zstd:<1 to 22>"`, `"blosc:<options>"`, the codec of a
            plug-in, or `"auto"`: `floats`, `blosc` or `zstd` for each leaf whose bytes are found to compress
            well. Shards below 16 KiB are stored as they are.
        chunk_byte_size: Cut shards into equal chunks of at most this many bytes, as Orbax does. By default
            a shard is one chunk, or with a codec several of about 16 MiB.
        ocdbt_target_data_file_size: Begin a new data file after this many bytes; 0: never. By default
            the option `file_bytes` of the stage `write` decides.
        replica_parallel: Whether each replica of a shard writes a part of it, cut along the first axis
            that their number divides. Otherwise one replica writes all of it. By default, if several
            processes save together.
        replica_parallel_min_bytes: Cut shards only into parts of at least this many bytes.
        rich_types: Whether tuples, and the classes of named tuples, are recorded. penstock then restores
            tuples without a target; Orbax does so on request.
        replica_parallel_max_replicas: Cut shards into at most this many parts; by default into as many as
            there are replicas.
    """

    ocdbt: bool = True
    zarr: Literal[2, 3] = 2
    codec: str = "none"
    chunk_byte_size: int | None = field(default=None, metadata={"positive": True})
    ocdbt_target_data_file_size: int | None = None
    replica_parallel: bool | None = None
    replica_parallel_min_bytes: int = 1 << 20
    rich_types: bool = False
    replica_parallel_max_replicas: int | None = None

    def __post_init__(self) -> None:
        for name in ("ocdbt", "replica_parallel", "rich_types"):
            value = getattr(self, name)
            if type(value) is not bool and not (value is None and name == "replica_parallel"):
                raise ConfigError(f"format.{name}", f"must be true or false, not {value!r}")

        if not _is_int(self.zarr) or self.zarr not in (2, 3):
            raise ConfigError("format.zarr", f"must be 2 or 3, not {self.zarr!r}")

        check_codec("format.codec", self.codec, others=_WORDS)
        for name, least in _LEAST.items():
            number = getattr(self, name)
            if number is not None and (not _is_int(number) or number < least):
                what = "positive" if least else "0 or more"
                unit = "" if name.endswith("replicas") else ", in whole bytes"
                raise ConfigError(f"format.{name}", f"must be {what}{unit}, not {number!r}")

    @property
    def leaf_codec(self) -> str | None:
        """The value for `LeafSpec.codec`: None, `"auto"`, or a codec with all of its options."""
        if self.codec == "none":
            return None

        return check_codec("format.codec", self.codec, others=_WORDS)


@final
@dataclass(frozen=True, slots=True)
class SaveArgs:
    """Options of storing one leaf; None means as the checkpoint's format says.

    Attributes:
        dtype: The dtype of the stored elements, in any form numpy accepts. Values are cast as
            in C; the original dtype is not recorded.
        chunk_byte_size: See `SaveFormat`.
        shard_axes: Axes that are cut into single indices first, as in Orbax.

    Raises:
        SpecError: If a value does not fit.
    """

    dtype: Any = None
    chunk_byte_size: int | None = None
    shard_axes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        size, axes = self.chunk_byte_size, cast("object", self.shard_axes)
        if size is not None and (not _is_int(size) or size <= 0):
            raise SpecError(f"chunk_byte_size must be positive, in whole bytes, not {size!r}")

        listed = tuple(cast("Sequence[object]", axes)) if isinstance(axes, tuple | list) else None
        if listed is None or not all(_is_int(axis) and axis >= 0 for axis in listed):
            raise SpecError(f"shard_axes must be axes counted from 0, as in (0, 2), not {axes!r}")

        object.__setattr__(self, "shard_axes", listed)


def _is_int(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)

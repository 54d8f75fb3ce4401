"""Codecs: how the bytes of a chunk are encoded, and how zarr names that.

A codec is found by its name alone, in the options of a save and in the metadata of an array. Other
distributions add codecs through the entry-point group `penstock.codecs`; the name of the entry point is the
name of the codec, for penstock and for zarr. None replaces a codec of penstock's own.
"""

from __future__ import annotations

__all__ = ("AUTO", "CODECS", "Codec", "CodecType", "check_codec", "codec_of")

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final, Protocol, cast

from penstock.kernel.errors import ConfigError
from penstock.kernel.registry import PluginKind


class Codec(Protocol):
    """A codec with its options. Immutable, hashable, thread-safe: a frozen dataclass.

    zarr knows it by the name that it is registered under, in both of its versions.
    """

    @property
    def text(self) -> str:
        """The codec with all of its options, as `SaveFormat.codec` has it: `zstd:3`.

        It begins with the name, and a colon if anything follows.
        """
        ...

    @property
    def in_tensorstore(self) -> bool:
        """True if its chunks are left to TensorStore, which has the codec, to decode."""
        ...

    def zarr2(self, itemsize: int) -> Mapping[str, Any]:
        """Return the member `compressor` of a `.zarray`, but for its `id`."""
        ...

    def zarr3(self, itemsize: int) -> Mapping[str, Any]:
        """Return the `configuration` of the codec in a `zarr.json`."""
        ...

    def encode(self, chunks: Sequence[memoryview], itemsize: int) -> Sequence[bytes]:
        """Encode whole chunks, each by itself. Blocking, in a worker thread.

        Memory is leased for what a chunk may become: a 128th and 1 KiB longer at most.

        Args:
            chunks: Bytes; none of them empty.
            itemsize: Bytes of one element.
        """
        ...

    def decode(self, stored: memoryview, memory: memoryview) -> None:
        """Decode one chunk into all of `memory`. Blocking. Only called if not `in_tensorstore`.

        What `stored` says of lengths may be wrong: nothing is read beyond it, or written beyond `memory`.

        Raises:
            ValueError: If it cannot be decoded, or has another length.
        """
        ...


class CodecType(Protocol):
    """Makes codecs of one kind: what an entry point of the group `penstock.codecs` refers to."""

    @property
    def usage(self) -> str:
        """The form of `SaveFormat.codec`, for messages: `zstd:<1 to 22>`."""
        ...

    def parse(self, options: str) -> Codec:
        """Return the codec with options as they stand after its name and a colon; empty: the usual ones.

        Raises:
            ValueError: If they are none.
        """
        ...

    def from_zarr(self, options: Mapping[str, Any]) -> Codec:
        """Return the codec that `zarr2` or `zarr3` described so. Only called if not `in_tensorstore`.

        Raises:
            ValueError: If they are none of these.
        """
        ...


AUTO: Final = "auto"
"""Stands for a codec that is chosen for each leaf by a sample of its bytes."""


def _as_codec_type(value: object) -> CodecType:
    return cast("CodecType", value)


# Declared as other distributions declare theirs, so that the kernel imports none of them.
CODECS: Final = PluginKind(
    "codec",
    "penstock.codecs",
    partial(ConfigError, "format.codec"),
    _as_codec_type,
    own={
        "blosc": "penstock.handlers.formats.codecs.blosc:BLOSC",
        "floats": "penstock.handlers.formats.codecs.blosc:FLOATS",
        "zstd": "penstock.handlers.formats.codecs.zstd:ZSTD",
    },
)
"""The codecs that there are, by name."""


def codec_of(text: str) -> Codec | None:
    """Return the codec that a `LeafSpec` names; None if that is the name of a stage's own transformation.

    Raises:
        ConfigError: If two distributions claim the name, or the one that does is broken.
        ValueError: If the codec has no such options.
    """
    name, colon, options = text.partition(":")
    found = CODECS.find(name)
    if found is not None and colon and not options:
        raise ValueError(f"{text!r} ends where its options begin")

    return None if found is None else found.parse(options)


def check_codec(key: str, text: object, *, others: tuple[str, ...] = ()) -> str:
    """Return the text of a codec with all of its options, or one of `others` as it is.

    Args:
        key: The option that has it, for the error.
        text: What it says.
        others: What else it may say.

    Raises:
        ConfigError: If it is neither.
    """
    if isinstance(text, str):
        if text in others:
            return text

        try:
            codec = codec_of(text)
        except ConfigError:
            raise
        except ValueError:
            codec = None
        if codec is not None:
            return codec.text

    words = [*map(repr, others), *[f"'{_usage(name)}'" for name in CODECS.names()]]
    raise ConfigError(key, f"must be {' or '.join(words)}, not {text!r}")


def _usage(name: str) -> str:
    try:
        found = CODECS.find(name)
    except ConfigError:  # a broken codec is no reason against another one
        return name

    return name if found is None else found.usage

"""Codecs: how the bytes of a chunk are encoded, and how zarr names that.

A codec is found by its name alone, in the options of a save and in the metadata of an array. Other
distributions add codecs through the entry-point group `penstock.codecs`; the name of the entry point is the
name of the codec, for penstock and for zarr. None replaces a codec of penstock's own.
"""

from __future__ import annotations

__all__ = ("AUTO", "Codec", "CodecType", "check_codec", "codec_of", "codec_type")

from collections.abc import Mapping, Sequence
from importlib.metadata import EntryPoint
from typing import Any, Final, Protocol, cast

from penstock.kernel.entry_points import find_plugins
from penstock.kernel.errors import ConfigError


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
        """True if TensorStore decodes it. Then it does, straight into the destination, and so can Orbax."""
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

    def decode(self, stored: memoryview, nbytes: int) -> bytes | bytearray | memoryview:
        """Decode one chunk to `nbytes` bytes. Blocking. Only called if not `in_tensorstore`.

        Raises:
            ValueError: If it cannot be decoded.
        """
        ...


class CodecType(Protocol):
    """Makes codecs of one kind: what an entry point of the group `penstock.codecs` refers to."""

    @property
    def usage(self) -> str:
        """The form of `SaveFormat.codec`, for messages: `zstd:<1 to 22>`."""
        ...

    def parse(self, options: str) -> Codec:
        """Return the codec with options as they stand behind its name and a colon; empty: the usual ones.

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


GROUP: Final = "penstock.codecs"

AUTO: Final = "auto"
"""Stands for a codec that is chosen for each leaf by a sample of its bytes."""

# Declared as other distributions declare theirs, so that the kernel imports none of them.
_OWN: Final = {"zstd": EntryPoint("zstd", "penstock.handlers.formats.codecs.zstd:ZSTD", GROUP)}


def codec_type(name: str) -> CodecType | None:
    """Return the codecs called `name`; None if there are none. Blocking: imports them.

    Raises:
        ConfigError: If two distributions claim the name, or the one that does is broken.
    """
    if name in _OWN:
        return cast("CodecType", _OWN[name].load())

    fitting = [plugin for plugin in find_plugins(GROUP) if plugin.name == name]
    if len(fitting) > 1:
        both = f"{fitting[0].distribution} and {fitting[1].distribution}"
        raise ConfigError("format.codec", f"the codec {name!r} is claimed by {both}; uninstall one of them")
    if not fitting:
        return None

    try:
        return cast("CodecType", fitting[0].load())
    except Exception as error:
        problem = f"{fitting[0]} is broken: {type(error).__name__}: {error}"
        raise ConfigError("format.codec", problem) from error


def codec_of(text: str) -> Codec | None:
    """Return the codec that a `LeafSpec` names; None if that is the name of a stage's own transformation.

    Raises:
        ConfigError: As `codec_type`.
        ValueError: If the codec has no such options.
    """
    name, colon, options = text.partition(":")
    found = codec_type(name)
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

    words = [*map(repr, others), *[f"'{_usage(name)}'" for name in _names()]]
    raise ConfigError(key, f"must be {' or '.join(words)}, not {text!r}")


def _names() -> list[str]:
    return [*_OWN, *sorted({plugin.name for plugin in find_plugins(GROUP)} - _OWN.keys())]


def _usage(name: str) -> str:
    try:
        found = codec_type(name)
    except ConfigError:  # a broken codec is no reason against another one
        return name

    return name if found is None else found.usage

"""What a NumPy archive says about its arrays: a zip directory, and the header of each member. Blocking."""

from __future__ import annotations

__all__ = ("Archive", "Member", "check_crc32", "compare_plain_members", "read_archive")

import io
import json
import math
import struct
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from tokenize import TokenError
from typing import IO, Any, Final, cast, final

import numpy as np

from penstock.handlers.dtypes import dtype_name, storable
from penstock.handlers.formats.common.key_paths import show_key_path
from penstock.kernel.errors import (
    ChecksumError,
    CorruptCheckpointError,
    PenstockError,
    UnsupportedFormatError,
)
from penstock.kernel.protocols.leaf import KeyKind
from penstock.kernel.protocols.stores import ReadableFile, Store

_ARRAY: Final = ".npy"
_LOCAL_HEADER: Final = struct.Struct("<26xHH")  # the lengths of the name and of the extra field, at its end
_MOST_TEXT: Final = 2**20
_BLOCK_BYTES: Final = 2**20
_ENCRYPTED: Final = 0x1
_NOT_AN_ARCHIVE: Final = (
    zipfile.BadZipFile,
    zlib.error,
    struct.error,
    EOFError,
    MemoryError,  # of a header that nests too deep
    RecursionError,
    SyntaxError,
    TokenError,
    TypeError,
    UnicodeError,
    ValueError,
)


@final
@dataclass(frozen=True, slots=True)
class Member:
    """One array, and where it lies in the archive."""

    name: str  #: without `.npy`
    shape: tuple[int, ...]
    dtype: np.dtype[Any]  #: in the byte order of the archive
    in_fortran_order: bool
    offset: int  #: of the member's bytes in the archive
    stored_nbytes: int  #: as they lie there
    nbytes: int  #: of the member, its header included, once it is inflated
    head_nbytes: int  #: of its header
    crc32: int  #: of the inflated bytes
    is_deflated: bool
    text: str | None = None  #: the value, if it is one text

    @property
    def is_plain(self) -> bool:
        """Whether the array lies in the archive as it lies in memory."""
        ordered = not self.in_fortran_order or len(self.shape) < 2
        return ordered and not self.is_deflated and self.dtype.isnative

    @property
    def key_path(self) -> str:
        """The name, for errors."""
        return show_key_path((self.name,), (KeyKind.MAPPING,))


@final
@dataclass(frozen=True, slots=True)
class Archive:
    """All members of an archive, in its order, and the JSON object in its comment, if that is one."""

    members: tuple[Member, ...]
    metadata: dict[str, Any] | None


def read_archive(store: Store, path: str) -> Archive:
    """Read the directory of the archive at `path`, and the header of each member.

    Raises:
        CorruptCheckpointError: If it is no such archive, or damaged.
        UnsupportedFormatError: If a member is no array of numbers; it is named. Nothing is unpickled.
    """
    size = store.size(path)
    file = store.open_data_file(path)
    try:
        with zipfile.ZipFile(io.BufferedReader(_Window(file, size))) as archive:
            return Archive(_members(archive, path), _metadata(archive.comment))
    except PenstockError:
        raise  # which may be a ValueError, too
    except _NOT_AN_ARCHIVE as error:
        raise CorruptCheckpointError(path, f"is no intact npz file: {error}") from error
    except (NotImplementedError, RuntimeError) as error:  # zipfile's, for what it does not read
        raise UnsupportedFormatError(path, f"cannot be read: {error}") from error
    finally:
        file.close()


def compare_plain_members(
    store: Store, path: str, archive: Archive, each_block: Callable[[], object] = lambda: None
) -> None:
    """Compare the members that are read in ranges with their checksums, which cover each as a whole.

    All other members are compared when they are read.

    Args:
        store: Where the archive lies.
        path: Of the archive.
        archive: What `read_archive` found.
        each_block: Called before each MiB; may raise.

    Raises:
        ChecksumError: If one differs.
    """
    block = memoryview(bytearray(_BLOCK_BYTES))
    file = store.open_data_file(path)
    try:
        for member in archive.members:
            if not member.is_plain:
                continue

            crc32, end = 0, member.offset + member.nbytes
            for at in range(member.offset, end, _BLOCK_BYTES):
                each_block()
                part = block[: min(_BLOCK_BYTES, end - at)]
                file.read_at(at, [part])
                crc32 = zlib.crc32(part, crc32)

            check_crc32(path, member, crc32)
    finally:
        file.close()


def check_crc32(path: str, member: Member, crc32: int) -> None:
    """Compare the checksum of all bytes of a member with the recorded one.

    Raises:
        ChecksumError: If they differ.
    """
    if crc32 != member.crc32:
        problem = f"its member {member.name + _ARRAY!r} differs from what was written"
        raise ChecksumError(path, problem, key_path=member.key_path)


def _members(archive: zipfile.ZipFile, path: str) -> tuple[Member, ...]:
    members: dict[str, Member] = {}
    for info in archive.infolist():
        name = info.filename
        if not name.endswith(_ARRAY):
            raise UnsupportedFormatError(path, f"has a member {name!r}, which is no array (.npy)")

        member = _member(archive, info, path)
        if members.setdefault(member.name, member) is not member:
            raise CorruptCheckpointError(path, f"has two members {name!r}")

    return tuple(members.values())


def _member(archive: zipfile.ZipFile, info: zipfile.ZipInfo, path: str) -> Member:
    name = info.filename.removesuffix(_ARRAY)
    if info.flag_bits & _ENCRYPTED:
        raise UnsupportedFormatError(path, f"its member {info.filename!r} is encrypted")
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        problem = f"its member {info.filename!r} is compressed by method {info.compress_type}"
        raise UnsupportedFormatError(path, f"{problem}, and numpy uses deflate")

    key_path = show_key_path((name,), (KeyKind.MAPPING,))
    with archive.open(info) as opened:
        shape, in_fortran_order, dtype = _header(opened)
        head_nbytes = opened.tell()
        is_text = dtype.kind == "U" and not shape and info.file_size <= _MOST_TEXT
        if not is_text and (problem := _refused(dtype)):
            raise UnsupportedFormatError(path, problem, key_path=key_path)

        nbytes = math.prod(shape) * dtype.itemsize
        if head_nbytes + nbytes != info.file_size or min(shape, default=0) < 0:
            raise ValueError(f"{info.filename!r} has {info.file_size} bytes, of {head_nbytes + nbytes}")

        # Read to its end, which compares it with its checksum.
        rest = opened.read() if is_text or not nbytes else b""
        text = str(np.frombuffer(rest, dtype)[0]) if is_text else None

    is_deflated = info.compress_type == zipfile.ZIP_DEFLATED
    if not is_deflated and info.compress_size != info.file_size:
        raise ValueError(f"{info.filename!r} is not compressed, and has two lengths")

    return Member(
        name, shape, dtype, in_fortran_order, _offset(archive, info), info.compress_size, info.file_size,
        head_nbytes, info.CRC, is_deflated, text and _written(text),
    )  # fmt: skip


def _header(opened: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    version = np.lib.format.read_magic(opened)
    if version == (1, 0):
        return np.lib.format.read_array_header_1_0(opened)
    if version == (2, 0):
        return np.lib.format.read_array_header_2_0(opened)

    raise ValueError(f"version {version[0]}.{version[1]} of the format is for records")


def _refused(dtype: np.dtype[Any]) -> str:
    """Say why an array of this type is not read; empty if it is."""
    if dtype.hasobject:
        return "holds Python objects, as a pickle, and no pickle is loaded"
    if dtype.kind == "V" and dtype.names is None and dtype.subdtype is None:
        return f"holds raw bytes ({dtype}), as numpy writes bfloat16 and its like, without a name for them"
    if not storable(dtype_name(dtype)):
        return f"holds {dtype}, and only numbers are read, and texts that are one value"

    return ""


def _written(text: str) -> str:
    """Return a text that documents can hold; the error is a `UnicodeError`."""
    text.encode()
    return text


def _offset(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> int:
    """Return where a member's bytes begin, which only the header before them says."""
    file = cast("IO[bytes]", archive.fp)
    file.seek(info.header_offset)
    n_name, n_extra = _LOCAL_HEADER.unpack(file.read(_LOCAL_HEADER.size))
    offset = info.header_offset + _LOCAL_HEADER.size + n_name + n_extra
    if offset + info.compress_size > archive.start_dir:
        raise ValueError(f"{info.filename!r} reaches into the directory")

    return int(offset)


def _metadata(comment: bytes) -> dict[str, Any] | None:
    try:
        found: object = json.loads(comment)
    except (ValueError, RecursionError):
        return None  # a comment in words, or none

    return cast("dict[str, Any]", found) or None if isinstance(found, dict) else None


@final
class _Window(io.RawIOBase):
    """A stored file as `zipfile` wants it.

    Args:
        file: To read.
        size: Its length.
    """

    def __init__(self, file: ReadableFile, size: int) -> None:
        self._file = file
        self._size = size
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        if start + offset < 0:
            raise ValueError("an offset lies before the file")

        self._at = start + offset
        return self._at

    def readinto(self, buffer: Any, /) -> int:
        view = memoryview(buffer).cast("B")[: max(self._size - self._at, 0)]
        if view:
            self._file.read_at(self._at, [view])

        self._at += len(view)
        return len(view)

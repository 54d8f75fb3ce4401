"""NumPy's npz archives as checkpoints: the zip directory, the header of each member, and reads from them.

Only conversions read them. All of it blocks.
"""

from __future__ import annotations

__all__ = (
    "SUFFIX",
    "Archive",
    "ArchiveMember",
    "check_crc32",
    "compare_plain_members",
    "fill_region",
    "is_npz",
    "open_npz",
    "read_archive",
)

import io
import json
import math
import os
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from tokenize import TokenError
from typing import IO, Any, Final, cast, final

import numpy as np

from penstock.handlers.dtypes import dtype_name, storable
from penstock.handlers.formats.integrity import bytes_on_medium
from penstock.handlers.formats.leaf_table import check_tree, show_key_path
from penstock.handlers.formats.region_reads import StoredChunk, chunk_reads, with_checksums
from penstock.kernel.errors import (
    ChecksumError,
    CorruptCheckpointError,
    NotACheckpointError,
    PenstockError,
    UnsupportedFormatError,
)
from penstock.kernel.protocols.leaf import KeyKind, LeafSpec, ParamInfo, StoredLeaf
from penstock.kernel.protocols.reads import Destination, Read, ScatterRead
from penstock.kernel.protocols.stores import ReadableFile, Store
from penstock.kernel.protocols.written import Written

_ARRAY: Final = ".npy"
_LOCAL_HEADER: Final = struct.Struct("<26xHH")  # the lengths of the name and of the extra field, at its end
# So that opening an archive reads no long text.
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
class ArchiveMember:
    """One array, and where it is in the archive."""

    name: str  #: without `.npy`
    shape: tuple[int, ...]
    dtype: np.dtype[Any]  #: in the byte order of the archive
    in_fortran_order: bool
    offset: int  #: of the member's bytes in the archive
    stored_nbytes: int  #: as stored
    nbytes: int  #: of the member, its header included, once it is inflated
    head_nbytes: int  #: of its header
    crc32: int  #: of the inflated bytes
    is_deflated: bool
    text: str | None = None  #: the value, if it is one text

    @property
    def is_plain(self) -> bool:
        """True if the archive holds the bytes of the array as memory does."""
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

    members: tuple[ArchiveMember, ...]
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
        store: Where the archive is.
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


def check_crc32(path: str, member: ArchiveMember, crc32: int) -> None:
    """Compare the checksum of all bytes of a member with the recorded one.

    Raises:
        ChecksumError: If they differ.
    """
    if crc32 != member.crc32:
        problem = f"its member {member.name + _ARRAY!r} differs from what was written"
        raise ChecksumError(path, problem, key_path=member.key_path)


def _members(archive: zipfile.ZipFile, path: str) -> tuple[ArchiveMember, ...]:
    members: dict[str, ArchiveMember] = {}
    for info in archive.infolist():
        name = info.filename
        if not name.endswith(_ARRAY):
            raise UnsupportedFormatError(path, f"has a member {name!r}, which is no array (.npy)")

        member = _member(archive, info, path)
        if members.setdefault(member.name, member) is not member:
            raise CorruptCheckpointError(path, f"has two members {name!r}")

    return tuple(members.values())


def _member(archive: zipfile.ZipFile, info: zipfile.ZipInfo, path: str) -> ArchiveMember:
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

    return ArchiveMember(
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


def fill_region(path: str, member: ArchiveMember, region: Destination, stored: memoryview) -> None:
    """Fill a region from all stored bytes of a member, which are compared with their checksum.

    Args:
        path: Of the archive, for errors.
        member: What it is.
        region: Where a part of it goes, or all.
        stored: The member's bytes, as they are in the archive.

    Raises:
        ChecksumError: If they differ from what was written.
        CorruptCheckpointError: If they cannot be inflated.
    """
    data = _inflated(path, member, stored) if member.is_deflated else stored
    check_crc32(path, member, zlib.crc32(data))
    flat = np.frombuffer(data, member.dtype, offset=member.head_nbytes)
    array = flat.reshape(member.shape, order="F" if member.in_fortran_order else "C")
    part = array[tuple([slice(start, stop) for start, stop in region.bounds])]
    filled = np.frombuffer(region.view(), member.dtype.newbyteorder("=")).reshape(part.shape)
    filled[...] = part


def _inflated(path: str, member: ArchiveMember, stored: memoryview) -> bytes:
    inflating = zlib.decompressobj(-zlib.MAX_WBITS)
    try:
        data = inflating.decompress(stored, member.nbytes + 1)
    except zlib.error as error:
        raise CorruptCheckpointError(
            path, f"cannot be inflated: {error}", key_path=member.key_path
        ) from error

    if len(data) != member.nbytes:
        problem = f"is inflated to another length than {member.nbytes} bytes"
        raise CorruptCheckpointError(path, problem, key_path=member.key_path)

    return data


_MAPPING: Final = KeyKind.MAPPING


@final
@dataclass(frozen=True, eq=False)
class NpzCheckpoint:
    """A flat dict of arrays, unless it is split. Immutable; may be used from several threads."""

    path: str
    leaves: Sequence[StoredLeaf]
    archive: Archive

    committed_at_ns: int | None = None
    tree_custom_metadata: object = None
    root_custom_metadata: Mapping[str, Any] | None = None

    @property
    def directory(self) -> str:
        """The directory of the archive."""
        return os.path.dirname(self.path)

    @property
    def custom_metadata(self) -> Mapping[str, Any] | None:
        """The JSON object in the archive's comment."""
        return self.archive.metadata

    @property
    def digests(self) -> Mapping[str, bytes]:
        """None: such a file cannot be the base of another checkpoint."""
        return {}

    def stored_bytes(self, store: Store) -> int:
        """Count the bytes of the file; see `StoredSize`."""
        return bytes_on_medium(store, [self.path])

    def parts(self, numbers: Sequence[int], leaves: Sequence[int]) -> Sequence[Sequence[Written]]:
        """Nothing: such a file cannot be the base of another checkpoint."""
        return [()] * len(numbers)

    def reads(self, index: int, stored: StoredLeaf, region: Destination, piece_bytes: int) -> Iterator[Read]:
        """Plan the reads that fill `region`; see `StoredCheckpoint.reads`.

        A plain member is read in pieces; `compare_plain_members` compares it. Any other is read whole.
        """
        member = stored.detail
        if not isinstance(member, ArchiveMember) or not all(start < stop for start, stop in region.bounds):
            return iter(())
        if not member.is_plain:
            fill = partial(fill_region, self.path, member, region)
            held, at = member.nbytes if member.is_deflated else 0, member.offset
            read = ScatterRead(index, self.path, at, member.stored_nbytes, fill, decoded_nbytes=held)
            return iter([read])

        shape, itemsize = member.shape, member.dtype.itemsize
        start = (0,) * len(shape)
        chunk = StoredChunk(self.path, member.offset + member.head_nbytes, start, shape, itemsize)
        return with_checksums(chunk_reads(index, chunk, region, piece_bytes), {}, piece_bytes)

    def split(self, separator: str) -> NpzCheckpoint:
        """Return the same leaves as a tree of nested dicts, their names split at `separator`.

        Numbers are keys of dicts: names do not tell lists.

        Raises:
            SpecError: If one name is a prefix of another, so that both cannot be in one tree.
        """
        leaves: list[StoredLeaf] = []
        for leaf in self.leaves:
            keys = tuple(leaf.info.name.split(separator))
            kinds = (_MAPPING,) * len(keys)
            info = ParamInfo(keys, kinds, show_key_path(keys, kinds), self.directory)
            leaves.append(replace(leaf, info=info))

        check_tree(self.path, [leaf.info for leaf in self.leaves], [leaf.info for leaf in leaves], separator)
        return replace(self, leaves=tuple(leaves))

    def following(self, wanted: Sequence[tuple[ParamInfo, Any]]) -> NpzCheckpoint:
        """Return the same leaves at the places where the target has their names."""
        places = {info.name: info for info, _ in wanted}
        leaves = [
            replace(leaf, info=replace(places.get(leaf.info.name, leaf.info), directory=self.directory))
            for leaf in self.leaves
        ]
        return replace(self, leaves=tuple(leaves))


def open_npz(store: Store, path: str, item: str | None = None) -> NpzCheckpoint:
    """Read the directory and the headers of the archive at `path`; no array. Blocking.

    Raises:
        NotACheckpointError: If an item is asked for: there are none in this format.
        CorruptCheckpointError: If it is damaged; see `read_archive`.
    """
    if item is not None:
        raise NotACheckpointError(path, f"is an npz file, which has no items, and so no item {item!r}")

    archive = read_archive(store, path)
    return NpzCheckpoint(path, tuple([_leaf(path, member) for member in archive.members]), archive)


def _leaf(path: str, member: ArchiveMember) -> StoredLeaf:
    info = ParamInfo((member.name,), (_MAPPING,), member.key_path, os.path.dirname(path))
    if member.text is not None:
        return StoredLeaf(info, LeafSpec("string", text=member.text))

    spec = LeafSpec(
        typestr="np.ndarray",
        shape=member.shape,
        dtype=dtype_name(member.dtype),
        itemsize=member.dtype.itemsize,
        chunk_shape=tuple([n or 1 for n in member.shape]),
    )
    return StoredLeaf(info, spec, member)


SUFFIX: Final = ".npz"


def is_npz(store: Store, path: str) -> bool:
    """Return whether there is a file at `path` that is named like a NumPy archive. Blocking."""
    return path.endswith(SUFFIX) and store.kind(path) == "file"

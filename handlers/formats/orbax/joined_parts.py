"""One checkpoint made of the parts that several processes saved to disks of their own.

Each part is an ordinary checkpoint with the chunks of one process (`DISK_MARK`). To join them, nothing but
their documents is read: a chunk that several have is taken from the lowest process, and the index, the
records of checksums and the lists of leaves are made anew. Bytes of arrays are then copied by `FileShare`s.
All of it but `PartRecord.read` is pure.
"""

from __future__ import annotations

__all__ = ("FileShare", "JoinedParts", "PartRecord", "join_parts")

import json
import os
import uuid
import zlib
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, TypeAlias, cast, final

import msgpack
import numpy as np

from penstock.handlers.formats import integrity
from penstock.handlers.formats.integrity import Checksums, Digest, Integrity, digest_of
from penstock.handlers.formats.orbax.checkpoint_documents import digest_in_mark, encode_mark
from penstock.handlers.formats.orbax.file_names import (
    ARRAY_METADATAS,
    COMMIT_MARK,
    DATA_FOLDER,
    INTEGRITY,
    MANIFEST,
    METADATA,
    SHARDING,
    STRINGS,
)
from penstock.handlers.formats.untrusted import check_inside
from penstock.handlers.ocdbt.database_reader import read_index
from penstock.handlers.ocdbt.database_writer import encode_index
from penstock.handlers.ocdbt.wire_format import Indirect, Inline, Value
from penstock.kernel.errors import ChecksumError, CorruptCheckpointError, MissingFileError
from penstock.kernel.protocols.stores import Store
from penstock.kernel.protocols.written import DISK_MARK, STAGE_RECORD, DiskMark, Document

_Places: TypeAlias = Sequence[tuple[bytes, Value]]
_Range: TypeAlias = tuple[int, int]

_OF_LEAVES: Final = frozenset({METADATA, SHARDING, STRINGS, STAGE_RECORD})
"""Documents that list leaves: each part lists those that its process has for itself, and none of others."""

_ALIGNED: Final = 4096  # what is mapped begins on a page, and stays there when it is moved
_MOST_WASTE: Final = 1 / 8  # of a file; with more, only what is needed of it is copied
_MOST_LOOSE: Final = 2**18  # bytes of a file without a record that counts as a document


@final
class Move(NamedTuple):
    """A range of a file, and the offset that it gets."""

    start: int
    end: int
    to: int


@final
@dataclass(frozen=True, slots=True)
class FileShare:
    """A file that a process brings, or what is needed of it."""

    nbytes: int  #: of the file that is written
    moves: Sequence[Move]  #: apart from each other, by ascending `start`

    def moved(self, offset: int) -> int:
        """Return where a byte is in the file that is written; it must be in one of the ranges."""
        found = self.moves[bisect_right(self.moves, offset, key=lambda move: move.start) - 1]
        return offset - found.start + found.to


@final
@dataclass(frozen=True, slots=True)
class JoinedParts:
    """The whole that parts make."""

    documents: Sequence[Document]  #: in the order in which they become durable, the mark last
    shares: Mapping[int, Mapping[str, FileShare]]  #: by part: what is copied of its files, by name


@final
@dataclass(frozen=True, slots=True)
class PartRecord:
    """All that a part says of itself, but for the bytes of arrays."""

    files: Mapping[str, int]  #: name to length of every file that is copied, and not made anew
    documents: Mapping[str, bytes]
    records: Mapping[str, bytes]  #: the content of `_PENSTOCK_INTEGRITY`, by its directory
    places: Mapping[str, _Places] = field(default_factory=dict[str, _Places])
    """The index of each directory that has one; its files are relative to the directory."""
    save: str = ""  #: that it is a part of, in all processes; empty if it does not say

    @classmethod
    def read(cls, store: Store, path: str, files: Mapping[str, int]) -> PartRecord:
        """Read the documents of the part at `path`, and compare them with their digests. Blocking.

        Args:
            store: Where.
            path: Of the part.
            files: Name to length of everything in it.

        Raises:
            CorruptCheckpointError: If one is damaged or lost.
            StorageError: If the medium refuses.
        """
        directories = [os.path.dirname(name) for name in files if os.path.basename(name) == INTEGRITY]
        if "" not in directories:
            raise MissingFileError(os.path.join(path, INTEGRITY), "is missing, and the checksums with it")

        records: dict[str, bytes] = {}
        places: dict[str, _Places] = {}
        known: dict[str, Digest] = {}
        data, of_index = set[str](), set[str]()
        for directory in sorted(directories):
            at = os.path.join(path, directory)
            raw = store.read_file(os.path.join(at, INTEGRITY))
            mark = _named(directory, COMMIT_MARK)
            expected = digest_in_mark(store.read_file(os.path.join(path, mark))) if mark in files else None
            if expected is not None and expected != digest_of(raw):
                raise ChecksumError(os.path.join(at, INTEGRITY), "differs from what was written")

            record = integrity.decode(os.path.join(at, INTEGRITY), raw)
            records[directory] = raw
            known |= {_named(directory, name): digest for name, digest in record.documents.items()}
            data |= {_named(directory, name) for name in record.files}
            if _named(directory, MANIFEST) in files:
                places[directory] = list(read_index(store, at).items())
                data |= {_named(directory, file) for file in _files_of(places[directory])}
                nodes = _named(directory, f"{DATA_FOLDER}/")
                of_index |= {_named(directory, MANIFEST), *[name for name in files if name.startswith(nodes)]}

        made_anew = {DISK_MARK, *[_named(directory, INTEGRITY) for directory in directories]}
        made_anew |= of_index - data
        documents: dict[str, bytes] = {}
        for name, nbytes in files.items():
            is_document = name in known or nbytes <= _MOST_LOOSE
            if name in data or name in made_anew or not is_document:
                continue

            documents[name] = content = store.read_file(os.path.join(path, name))
            if name in known and digest_of(content) != known[name]:
                raise ChecksumError(os.path.join(path, name), "differs from what was written")

        for name in known.keys() - files.keys():
            raise MissingFileError(os.path.join(path, name), "is missing, and was written")

        copied = {
            name: size for name, size in files.items() if name not in documents and name not in made_anew
        }
        mark = os.path.join(path, DISK_MARK)
        save = DiskMark.decoded(mark, store.read_file(mark)).save if DISK_MARK in files else ""
        return cls(copied, documents, records, places, save)

    def encoded(self) -> bytes:
        """Return the message of one process to another."""
        told = {
            "files": dict(self.files),
            "documents": dict(self.documents),
            "records": dict(self.records),
            "places": {directory: _encoded(found) for directory, found in self.places.items()},
            "save": self.save,
        }
        return zlib.compress(msgpack.packb(told, unicode_errors="surrogatepass"), 1)

    @classmethod
    def decoded(cls, path: str, data: bytes) -> PartRecord:
        """Read what `encoded` made.

        Raises:
            CorruptCheckpointError: If it is something else; `path` is where it was found.
        """
        try:
            told: Any = msgpack.unpackb(zlib.decompress(data), unicode_errors="surrogatepass")
            places = {name: _decoded(found) for name, found in told["places"].items()}
            found = cls(told["files"], told["documents"], told["records"], places, told["save"])
        except (zlib.error, ValueError, KeyError, TypeError, msgpack.UnpackException) as error:
            raise CorruptCheckpointError(path, f"is no part of a checkpoint: {error}") from error

        for name in (*found.files, *found.documents, *found.records):
            check_inside(path, name)

        return found


def join_parts(parts: Mapping[int, PartRecord], now_ns: int) -> JoinedParts:
    """Make one checkpoint of the parts of all processes that saved it together.

    Args:
        parts: By process.
        now_ns: When it is joined, since the epoch.

    Raises:
        CorruptCheckpointError: If a record of checksums is malformed.
    """
    ordered = [(index, parts[index]) for index in sorted(parts)]
    shares: dict[int, dict[str, FileShare]] = {index: {} for index, _ in ordered}
    contents = _joined_documents([part.documents for _, part in ordered])
    directories = sorted(
        {directory for _, part in ordered for directory in part.records},
        key=lambda directory: (-len(directory.split("/")) if directory else 1, directory),
    )
    recorded: dict[str, bytes] = {}  # by name: the records that are made anew
    listed: set[str] = set()
    written: list[Document] = []
    for directory in directories:
        tables = {
            index: integrity.decode(_named(directory, INTEGRITY), part.records[directory])
            for index, part in ordered
            if directory in part.records
        }
        made, columns = _joined_index(directory, ordered, tables, shares, now_ns)
        found = {document.path: digest_of(document.data) for document in made}
        names = dict.fromkeys([name for table in tables.values() for name in table.documents])
        for name in names:
            full = _named(directory, name)
            if full in contents:
                found[name] = digest_of(contents[full])
                listed.add(full)
                made.append(Document(name, contents[full]))
            elif full in recorded:
                found[name] = digest_of(recorded[full])
            elif any(full in part.files for _, part in ordered):  # too long to be sent
                known = [table.documents for table in tables.values() if name in table.documents]
                found[name] = known[0][name]

        digests: dict[str, bytes] = {}
        for table in reversed(tables.values()):
            digests |= table.digests

        about = next(iter(tables.values())).about
        record = integrity.encode_files(columns, digests, found, about or None)
        recorded[_named(directory, INTEGRITY)] = record
        made.append(Document(INTEGRITY, record))
        mark = _named(directory, COMMIT_MARK)
        if mark in contents:
            listed.add(mark)
            made.append(Document(COMMIT_MARK, encode_mark(record, contents[mark])))

        written += [Document(_named(directory, document.path), document.data) for document in made]

    brought = {name for share in shares.values() for name in share}
    for index, part in ordered:  # what has no index: chunks in files of their own, and files of handlers
        indexed = {
            _named(directory, file) for directory, places in part.places.items() for file in _files_of(places)
        }
        for name, nbytes in part.files.items():
            if name not in indexed and name not in brought:
                brought.add(name)
                shares[index][name] = FileShare(nbytes, (Move(0, nbytes, 0),))

    loose = sorted(contents.keys() - listed, key=lambda name: (os.path.basename(name) == COMMIT_MARK, name))
    return JoinedParts([*[Document(name, contents[name]) for name in loose], *written], shares)


def _joined_index(
    directory: str,
    parts: Sequence[tuple[int, PartRecord]],
    tables: Mapping[int, Integrity],
    shares: Mapping[int, dict[str, FileShare]],
    now_ns: int,
) -> tuple[list[Document], dict[str, dict[str, bytes]]]:
    """Choose who brings each chunk, and make the index of all. Adds to `shares`.

    Returns:
        The documents of the index, and the columns of checksums of every file that is brought.
    """
    chosen: dict[bytes, tuple[int, Value]] = {}
    for index, part in parts:
        for key, value in part.places.get(directory, ()):
            chosen.setdefault(key, (index, value))

    needed: dict[tuple[int, str], list[_Range]] = {}
    for index, value in chosen.values():
        if isinstance(value, Indirect):
            ranges = needed.setdefault((index, value.file), [])
            ranges.append((value.offset, value.offset + value.length))

    columns: dict[str, dict[str, bytes]] = {}
    files = {index: part.files for index, part in parts}
    for (index, file), ranges in needed.items():
        name, sums = _named(directory, file), tables[index].files.get(file, Checksums.of(()))
        share = _share(files[index].get(name, 0), ranges, sums)
        shares[index][name] = share
        if len(kept := _moved(sums, share)):
            columns[file] = integrity.columns(list(kept), kept)

    for index, part in parts:
        if index in tables and not part.places.get(directory):  # a file for each chunk
            for file, sums in tables[index].files.items():
                if file not in columns:
                    columns[file] = integrity.columns(list(sums), sums)

    if not chosen:
        return [], columns

    node_file = f"{DATA_FOLDER}/{uuid.uuid4().hex}"
    encoded = encode_index(
        [
            (key, _relocated(value, shares[index].get(_named(directory, getattr(value, "file", "")))))
            for key, (index, value) in chosen.items()
        ],
        node_file=node_file,
        node_offset=0,
        uuid=uuid.uuid4().bytes,
        commit_time_ns=now_ns,
    )
    return [Document(node_file, encoded.nodes), Document(MANIFEST, encoded.manifest)], columns


def _relocated(value: Value, share: FileShare | None) -> Value:
    if share is None or not isinstance(value, Indirect):
        return value

    return Indirect(value.file, share.moved(value.offset), value.length)


def _share(nbytes: int, chunks: Sequence[_Range], sums: Checksums) -> FileShare:
    """Return the file as a whole, or what is needed of it, if that is much less."""
    ranges = _together(chunks)
    starts, ends = np.array(ranges, np.int64).T
    firsts = sums.offsets.astype(np.int64)
    lasts = firsts + sums.nbytes.astype(np.int64)
    # A checksum may be that of several chunks; it is of use only as long as all its bytes are there.
    at = np.minimum(np.searchsorted(ends, firsts, "right"), len(ends) - 1)
    touched = (starts[at] < lasts) & (ends[at] > firsts)
    ranges = _together([*ranges, *zip(firsts[touched].tolist(), lasts[touched].tolist(), strict=True)])
    if sum(end - start for start, end in ranges) >= (1 - _MOST_WASTE) * nbytes:
        return FileShare(nbytes, (Move(0, nbytes, 0),))

    moves: list[Move] = []
    behind = 0
    for start, end in ranges:
        to = -(-(behind - start % _ALIGNED) // _ALIGNED) * _ALIGNED + start % _ALIGNED
        moves.append(Move(start, end, to))
        behind = to + end - start

    return FileShare(behind, tuple(moves))


def _together(ranges: Iterable[_Range]) -> list[_Range]:
    """Join ranges that overlap or touch."""
    found: list[_Range] = []
    for start, end in sorted(ranges):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((start, end))

    return found


def _moved(sums: Checksums, share: FileShare) -> Checksums:
    """Return the checksums of the ranges of a share, where they come to be."""
    starts, ends, to = np.array(share.moves, np.int64).T
    offsets, nbytes = sums.offsets.astype(np.int64), sums.nbytes.astype(np.int64)
    at = np.maximum(np.searchsorted(starts, offsets, "right") - 1, 0)
    rows = np.flatnonzero((starts[at] <= offsets) & (offsets + nbytes <= ends[at]))
    blocks, running = sums.block_bytes, sums.running
    if blocks is not None and running is not None:
        running, blocks = integrity.running_of(running, sums.nbytes, blocks, rows), blocks[rows]

    moved = (offsets - starts[at] + to[at])[rows].astype(np.uint64)
    return Checksums(moved, sums.nbytes[rows], sums.crc32c[rows], blocks, running)


def _files_of(places: _Places) -> set[str]:
    return {value.file for _, value in places if isinstance(value, Indirect)}


def _joined_documents(parts: Sequence[Mapping[str, bytes]]) -> dict[str, bytes]:
    """Return every document once: of those that list leaves, the leaves of all; of others, the first."""
    found: dict[str, bytes] = {}
    for name in dict.fromkeys([name for part in parts for name in part]):
        contents = [part[name] for part in parts if name in part]
        found[name] = contents[0]
        lists_leaves = os.path.basename(name) in _OF_LEAVES or f"{ARRAY_METADATAS}/" in name
        if lists_leaves and any(content != contents[0] for content in contents):
            joined = json.loads(contents[0])
            for content in contents[1:]:
                joined = _joined_values(joined, json.loads(content))

            found[name] = json.dumps(joined).encode()

    return found


def _joined_values(one: object, other: object) -> object:
    """Join two values of JSON: members of objects, and elements of lists, that only one of them has."""
    first = one  # as it is to the type checker before it looks closer
    if isinstance(one, dict) and isinstance(other, dict):
        return _joined_objects(cast("dict[str, object]", one), cast("dict[str, object]", other))
    if isinstance(one, list) and isinstance(other, list):
        elements, others = cast("list[object]", one), cast("list[object]", other)
        joined: object = [*elements, *[each for each in others if each not in elements]]
        return joined
    if isinstance(one, str) and isinstance(other, str) and one != other and one[:1] == other[:1] == "{":
        return json.dumps(_joined_values(json.loads(one), json.loads(other)))  # the types of nodes

    return first


def _joined_objects(one: dict[str, object], other: dict[str, object]) -> dict[str, object]:
    """Join two objects. What only the other one has comes behind what its name has most in common with.

    So leaves stay in the order of the tree, in which a restore without a target returns them.
    """
    joined = {
        name: _joined_values(value, other[name]) if name in other else value for name, value in one.items()
    }
    for name in [name for name in other if name not in one]:
        rows = list(joined.items())
        alike = [_n_alike(name, known) for known in joined]
        behind = max(range(len(rows)), key=lambda at: (alike[at], at), default=-1) + 1
        joined = dict([*rows[:behind], (name, other[name]), *rows[behind:]])

    return joined


def _n_alike(one: str, other: str) -> int:
    pairs = zip(one, other, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def _named(directory: str, name: str) -> str:
    return f"{directory}/{name}" if directory else name


def _encoded(places: _Places) -> list[Any]:
    files = {file: number for number, file in enumerate(sorted(_files_of(places)))}
    rows: list[Any] = []
    for key, value in places:
        if isinstance(value, Inline):
            rows.append((key, value.value))
        else:
            rows.append((key, files[value.file], value.offset, value.length))

    return [list(files), rows]


def _decoded(told: Any) -> _Places:
    def read() -> Iterator[tuple[bytes, Value]]:
        files, rows = told
        for row in rows:
            yield row[0], Inline(row[1]) if len(row) == 2 else Indirect(files[row[1]], row[2], row[3])

    return list(read())

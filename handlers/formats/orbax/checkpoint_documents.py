"""The documents of a whole checkpoint, and the digests that all documents in it are compared with.

`_CHECKPOINT_METADATA` says when and how it was written, and has the caller's metadata. Digests are in
`_PENSTOCK_INTEGRITY`, and the digest of that file is in the commit mark, so that a lost or damaged record is
noticed. The mark's text is free, and Orbax looks only at whether the file is there. What Orbax wrote has no
digests, nor what penstock 0.1 wrote: there every document is read as it is.

Source:
    ORBAX_FORMAT.md §3.2. An unknown top-level member breaks Orbax, so penstock adds none.
"""

from __future__ import annotations

__all__ = (
    "PYTREE_HANDLER",
    "CheckpointDocument",
    "Origin",
    "SealedDocuments",
    "check_record",
    "content_of",
    "decode_checkpoint_metadata",
    "digest_in_mark",
    "documents_below",
    "documents_of",
    "encode_checkpoint_metadata",
    "encode_mark",
    "identity_in_mark",
    "is_left_of",
    "mark_without_digest",
    "read_checkpoint_metadata",
)

import errno
import json
import os
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, cast, final

from crc32c import crc32c

from penstock.handlers.formats import integrity
from penstock.handlers.formats.integrity import Digest, Integrity, digest_of, digest_of_file
from penstock.handlers.formats.orbax.file_names import (
    CHECKPOINT_METADATA,
    COMMIT_MARK,
    COMMIT_MARK_TEXT,
    DELETION,
    INTEGRITY,
)
from penstock.handlers.formats.untrusted import EnteredDirectories, as_object, as_string, parse_object
from penstock.kernel.concurrency.brief_steps import cuts
from penstock.kernel.errors import (
    ChecksumError,
    CorruptCheckpointError,
    MissingFileError,
    SpecError,
    StorageError,
)
from penstock.kernel.protocols.stores import Store
from penstock.kernel.protocols.written import Document

PYTREE_HANDLER: Final = "orbax.checkpoint._src.handlers.pytree_checkpoint_handler.PyTreeCheckpointHandler"
"""The handler recorded for a flat checkpoint; Orbax v0 and v1 know it."""


@final
@dataclass(frozen=True, slots=True)
class CheckpointDocument:
    """The members of the document that a reader needs."""

    item_handlers: Mapping[str, str] | str | None = None  #: by item; one string for a flat checkpoint
    started_at_ns: int | None = None
    committed_at_ns: int | None = None
    custom_metadata: Mapping[str, Any] | None = None

    @property
    def items(self) -> Collection[str]:
        """Names of the recorded items; empty for a flat checkpoint."""
        return self.item_handlers.keys() if isinstance(self.item_handlers, Mapping) else ()


def encode_checkpoint_metadata(
    *,
    started_ns: int,
    committed_ns: int,
    custom_metadata: Mapping[str, Any] | None,
    item_handlers: Mapping[str, str] | str = PYTREE_HANDLER,
) -> bytes:
    """Encode the document, by default that of a flat checkpoint.

    Raises:
        SpecError: If `custom_metadata` cannot be written as JSON.
    """
    document = {
        "item_handlers": item_handlers if isinstance(item_handlers, str) else dict(item_handlers),
        "metrics": {},
        "performance_metrics": {},
        "init_timestamp_nsecs": started_ns,
        "commit_timestamp_nsecs": committed_ns,
        "custom_metadata": dict(custom_metadata or {}),
    }
    try:
        return json.dumps(document).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise SpecError(f"custom_metadata cannot be written as JSON: {error}") from error


def read_checkpoint_metadata(store: Store, path: str, names: Collection[str]) -> CheckpointDocument:
    """Read the document of the checkpoint at `path`, if it is among the `names` there.

    Raises:
        CorruptCheckpointError: As `decode_checkpoint_metadata`.
    """
    if CHECKPOINT_METADATA not in names:
        return CheckpointDocument()

    file = os.path.join(path, CHECKPOINT_METADATA)
    return decode_checkpoint_metadata(file, store.read_file(file))


def decode_checkpoint_metadata(path: str, data: bytes) -> CheckpointDocument:
    """Read the document, of any Orbax version. An empty file says nothing, and that is allowed.

    Raises:
        CorruptCheckpointError: If it is malformed.
    """
    if not data:
        return CheckpointDocument()

    document = parse_object(path, data)
    handlers = document.get("item_handlers")
    if isinstance(handlers, dict):
        items = as_object(path, "item_handlers", document["item_handlers"])
        handlers = {item: as_string(path, f"the handler of {item!r}", name) for item, name in items.items()}
    elif handlers is not None:
        handlers = as_string(path, "item_handlers", handlers)

    times: list[int | None] = []
    for name in ("init_timestamp_nsecs", "commit_timestamp_nsecs"):
        value = document.get(name)
        if value is not None and type(value) is not int:
            raise CorruptCheckpointError(path, f"{name} is {value!r}, not an integer")

        times.append(value)

    custom = document.get("custom_metadata", document.get("custom"))
    return CheckpointDocument(
        item_handlers=handlers,
        started_at_ns=times[0],
        committed_at_ns=times[1],
        custom_metadata=None if custom is None else as_object(path, "custom_metadata", custom),
    )


def content_of(path: str, data: bytes) -> Mapping[str, object]:
    """Return what the document says, in a form that tells a rewritten one from a damaged one.

    Deleting an item of a checkpoint rewrites it without the item's handler, and changes nothing else.
    """
    document = parse_object(path, data)
    handlers = document.pop("item_handlers", None)
    return {"handlers": handlers, "rest": crc32c(json.dumps(document, sort_keys=True).encode())}


def is_left_of(recorded: Mapping[str, object], path: str, data: bytes) -> bool:
    """Return whether the document equals the recorded one, except for items deleted since."""
    found, before = content_of(path, data), recorded.get("handlers")
    if found["rest"] != recorded.get("rest"):
        return False

    now = found["handlers"]
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        left, whole = cast("Mapping[str, object]", now), cast("Mapping[str, object]", before)
        return bool(left) and left.items() <= whole.items()

    return now == before


_ABSENT = {errno.ENOENT, errno.ENOTDIR}


_READ_BYTES: Final = 4 * 2**20
_READ_TOGETHER: Final = 256
"""So many documents of so many bytes are read together: where each is a request, several at a time."""


def documents_of(
    store: Store, directory: str, lengths: Mapping[str, int]
) -> Iterator[tuple[str, bytes | None]]:
    """Yield documents with their content, in order; None for what is no file. Blocking.

    Args:
        store: Where they are.
        directory: What their names are relative to.
        lengths: Their bytes, by name. Of longer ones fewer are held at a time.
    """
    names = list(lengths)
    for start, stop in cuts(list(lengths.values()), _READ_BYTES, _READ_TOGETHER):
        some = names[start:stop]
        yield from zip(some, store.read_files([os.path.join(directory, name) for name in some]), strict=True)


@final
@dataclass(frozen=True, eq=False)
class SealedDocuments:
    """The documents in one directory of a checkpoint. Make it with `open`. Immutable; blocking."""

    store: Store
    directory: str
    recorded: Integrity = field(default_factory=Integrity)
    prefix: str = ""  #: of the names that were recorded in the directory above
    is_sealed: bool = False  #: whether digests of documents were recorded

    @classmethod
    def open(
        cls, store: Store, directory: str, names: Collection[str], expected: Digest | None = None
    ) -> SealedDocuments:
        """Read the record of a directory, if it has one.

        Args:
            store: Where.
            directory: Of a checkpoint, or of an item of it.
            names: What is in it.
            expected: The digest of the record, where the directory above has it; by default what the commit
                mark says.

        Raises:
            MissingFileError: If the record is lost.
            ChecksumError: If it is not as it was written.
            CorruptCheckpointError: If it is malformed.
        """
        path = os.path.join(directory, INTEGRITY)
        if (
            expected is None
            and COMMIT_MARK in names
            and store.kind(os.path.join(directory, COMMIT_MARK)) == "file"
        ):
            expected = digest_in_mark(store.read_file(os.path.join(directory, COMMIT_MARK)))

        data = store.read_file(path) if INTEGRITY in names else None
        check_record(path, data, expected)
        if data is None:
            return cls(store, directory)

        found = integrity.decode(path, data)
        return cls(store, directory, found, is_sealed=bool(found.documents))

    def item(self, name: str, names: Collection[str]) -> SealedDocuments:
        """Return the documents of the directory `name` in this one, in which `names` are."""
        directory = os.path.join(self.directory, name)
        expected = self.recorded.documents.get(f"{self.prefix}{name}/{INTEGRITY}")
        if expected is not None or INTEGRITY in names:
            return SealedDocuments.open(self.store, directory, names, expected)

        return replace(self, directory=directory, prefix=f"{self.prefix}{name}/")

    def read(self, name: str) -> bytes:
        """Return the content of a document.

        Raises:
            ChecksumError: If it is not as it was written.
            MissingFileError: If it was written and is not there.
            StorageError: If it cannot be read.
        """
        try:
            data = self.store.read_file(os.path.join(self.directory, name))
        except StorageError as error:
            if error.errno in _ABSENT:
                self.check_absent(name)
            raise

        self.check(name, data)
        return data

    def check(self, name: str, data: bytes) -> None:
        """Compare the content of a document with its digest.

        The deletion of an item rewrites `_CHECKPOINT_METADATA` without it, and that is no damage.

        Raises:
            ChecksumError: If it is not as it was written.
            CorruptCheckpointError: If it is `_CHECKPOINT_METADATA`, was changed, and is malformed.
        """
        expected = self.recorded.documents.get(self.prefix + name)
        if expected is None or (len(data) == expected.nbytes and digest_of(data) == expected):
            return

        path = os.path.join(self.directory, name)
        if name == CHECKPOINT_METADATA and is_left_of(self.recorded.about, path, data):
            return

        raise ChecksumError(path, "differs from what was written")

    def check_file(self, name: str) -> None:
        """Compare a file with its digest that is too long to be read at once, if it has one.

        Raises:
            ChecksumError: If it is not as it was written.
            StorageError: If it cannot be read.
        """
        expected = self.recorded.documents.get(self.prefix + name)
        if expected is None:
            return

        path = os.path.join(self.directory, name)
        if digest_of_file(self.store, path) != expected:
            raise ChecksumError(path, "differs from what was written")

    def check_absent(self, name: str) -> None:
        """Raise `MissingFileError` if a document, or any in a directory of this name, was written."""
        full = self.prefix + name
        for one in self.recorded.documents:
            if one.startswith(full) and (one == full or one[len(full)] == "/"):
                raise MissingFileError(os.path.join(self.directory, name), "is missing, and was written")

    def about(self, names: Collection[str]) -> CheckpointDocument:
        """Read `_CHECKPOINT_METADATA`, if it is among the `names` here.

        Raises:
            MissingFileError: If it was written and is not there.
            ChecksumError: If it is not as it was written, and not as a deletion of an item leaves it.
            CorruptCheckpointError: If it is malformed.
        """
        if CHECKPOINT_METADATA not in names:
            self.check_absent(CHECKPOINT_METADATA)
            return CheckpointDocument()

        path = os.path.join(self.directory, CHECKPOINT_METADATA)
        return decode_checkpoint_metadata(path, self.read(CHECKPOINT_METADATA))

    def problems(self) -> Iterator[CorruptCheckpointError]:
        """Read every document that was recorded here, and yield an error for each that is not as it was.

        Raises:
            StorageError: If one cannot be read although it is there.
        """
        deleted = self.deleted_items()
        recorded = {
            full.removeprefix(self.prefix): digest.nbytes
            for full, digest in self.recorded.documents.items()
            if full.startswith(self.prefix) and full.partition("/")[0] not in deleted
        }
        for name, data in documents_of(self.store, self.directory, recorded):
            if data is None:
                yield MissingFileError(os.path.join(self.directory, name), "is missing, and was written")
                continue
            try:
                self.check(name, data)
            except CorruptCheckpointError as error:
                yield error

    def deleted_items(self) -> Collection[str]:
        """Name the items that were recorded and were deleted since, as `_CHECKPOINT_METADATA` says."""
        before = self.recorded.about.get("handlers")
        try:
            data = self.store.read_file(os.path.join(self.directory, CHECKPOINT_METADATA))
            now = decode_checkpoint_metadata(self.directory, data).items
        except (StorageError, CorruptCheckpointError):
            return ()

        return cast("Mapping[str, Any]", before).keys() - now if isinstance(before, Mapping) and now else ()


def check_record(path: str, data: bytes | None, expected: Digest | None) -> None:
    """Compare the record of digests with its own digest.

    Args:
        path: Of the record, for the error.
        data: Its content; None if it is not there.
        expected: Its digest as the commit mark has it; None if none was recorded, and nothing is compared.

    Raises:
        MissingFileError: If it is lost.
        ChecksumError: If it is not as it was written.
    """
    if expected is None:
        return
    if data is None:
        raise MissingFileError(path, "is missing, and the checksums of the checkpoint with it")
    if digest_of(data) != expected:
        raise ChecksumError(path, "differs from what was written, or its digest in the commit mark does")


# In the commit mark.
_LINE: Final = re.compile(
    rf"^{INTEGRITY}: (\d{{1,18}}) bytes, crc32c ([0-9a-f]{{8}})$".encode(), re.MULTILINE
)
_MADE_OF: Final = re.compile(rb"^made of: (\d{1,18}) bytes, crc32c ([0-9a-f]{8})$", re.MULTILINE)


def encode_mark(integrity: bytes | None = None, text: bytes = COMMIT_MARK_TEXT) -> bytes:
    """Encode the mark of a directory.

    Args:
        integrity: The content of its `_PENSTOCK_INTEGRITY`, if it has one.
        text: What the mark says next to the digest; an earlier digest in it is replaced.
    """
    if integrity is None:
        return text

    digest = digest_of(integrity)
    line = f"{INTEGRITY}: {digest.nbytes} bytes, crc32c {digest.crc32c:08x}".encode()
    return mark_without_digest(text) + line + b"\n"


def mark_without_digest(text: bytes) -> bytes:
    """Return a mark without its digest; the record of that directory is then not compared."""
    return _LINE.sub(b"", text).rstrip() + b"\n"


def digest_in_mark(data: bytes) -> Digest | None:
    """Return the digest in a mark; None if there is none, as in those of Orbax and of penstock 0.1."""
    return _digest(_LINE.search(data))


def identity_in_mark(data: bytes) -> Digest | None:
    """Return the digest that two checkpoints have in common if one is a copy of the other, or made of it.

    It is that of the checkpoint itself, or of what its values were first stored as; None as in
    `digest_in_mark`.
    """
    own, first = digest_in_mark(data), _digest(_MADE_OF.search(data))
    return own if own is None or first is None else first


def _digest(found: re.Match[bytes] | None) -> Digest | None:
    return None if found is None else Digest(int(found[1]), int(found[2], 16))


@final
@dataclass(frozen=True, slots=True)
class Origin:
    """A checkpoint of which another one is made that has the same values, stored with another codec.

    An empty one is that of checkpoints which are made of no other: it changes nothing in them.
    """

    identity: Digest | None = None  #: see `identity_in_mark`
    documents: Mapping[str, bytes] = field(default_factory=dict[str, bytes])
    """Those that the other one has, too, byte for byte; by name in it."""
    digests: Mapping[str, Mapping[str, bytes]] = field(default_factory=dict[str, Mapping[str, bytes]])
    """Of leaves, by directory and stored name."""

    def below(self, directory: str) -> Origin:
        """Return what is about an item, named from its directory."""
        prefix = f"{directory}/"
        documents = {
            name.removeprefix(prefix): data
            for name, data in self.documents.items()
            if name.startswith(prefix)
        }
        return Origin(documents=documents, digests={"": self.digests.get(directory, {})})

    def kept(self, document: Document) -> Document:
        """Return a document of the other one as it is here, if it is to be the same."""
        data = self.documents.get(document.path)
        return document if data is None else Document(document.path, data)

    @property
    def mark(self) -> bytes:
        """The text of the commit mark of the other one, without the digest of its record."""
        if self.identity is None:
            return COMMIT_MARK_TEXT

        line = f"made of: {self.identity.nbytes} bytes, crc32c {self.identity.crc32c:08x}"
        return COMMIT_MARK_TEXT + b"\n" + line.encode()


_NOT_RECORDED: Final = frozenset({INTEGRITY, COMMIT_MARK, DELETION})


def documents_below(store: Store, directory: str, files: Collection[str]) -> Iterator[str]:
    """Name every file that is no data file and not in a directory with its own record; that is named.

    Args:
        store: Where.
        directory: Which the names are relative to.
        files: The data files.

    Raises:
        CorruptCheckpointError: If links make too many paths.
    """
    entered = EnteredDirectories(store)
    pending = [""]
    while pending:
        below = pending.pop()
        inside = os.path.join(directory, below)
        entered.enter(inside)
        names = sorted(store.list_directory(inside))
        if below and INTEGRITY in names:
            yield f"{below}/{INTEGRITY}"
            continue

        for name in names:
            full = f"{below}/{name}" if below else name
            if name in _NOT_RECORDED or name.startswith(f"{INTEGRITY}.") or full in files:
                continue
            if store.kind(os.path.join(directory, full)) == "directory":
                pending.append(full)
            else:
                yield full

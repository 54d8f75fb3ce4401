"""Adds digests to checkpoints that Orbax, or a penstock before 0.2, wrote."""

from __future__ import annotations

__all__ = ("SealReport", "seal")

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, final

from penstock.checkpointer.parts import config_and_regulator
from penstock.config.config import Config
from penstock.handlers.formats import integrity
from penstock.handlers.formats.integrity import Checksum, digest_of_file, problem_of_holes, range_crc32c
from penstock.handlers.formats.orbax.checkpoint_documents import (
    SealedDocuments,
    content_of,
    documents_below,
    encode_mark,
)
from penstock.handlers.formats.orbax.discovery import (
    ROOT_FOLDER,
    ItemKind,
    contents_of,
)
from penstock.handlers.formats.orbax.file_names import CHECKPOINT_METADATA, COMMIT_MARK, INTEGRITY
from penstock.handlers.formats.orbax.open_checkpoint import open_checkpoint
from penstock.handlers.formats.orbax.stored_checkpoint import OrbaxCheckpoint
from penstock.handlers.formats.region_reads import NONE, recorded_crc32c
from penstock.handlers.formats.safetensors.tensor_survey import survey_tensors
from penstock.handlers.layouts.discovery import find_place, finished_steps
from penstock.handlers.stores.publishing.paths import path_or_url
from penstock.handlers.stores.publishing.reading import Reading, read_unchanged
from penstock.kernel.concurrency.threads import Threads
from penstock.kernel.errors import ChecksumError, StorageError, UnsupportedFormatError
from penstock.kernel.pipeline.failures import short_traceback
from penstock.kernel.protocols.stores import Store
from penstock.steps.step_directory import seal_root_metadata
from penstock.stores.store_finder import StoreFinder

Path = str | os.PathLike[str]

_NEW: Final = f"{INTEGRITY}.new"
_OLD: Final = f"{INTEGRITY}.old"
_WITHOUT_TREE: Final = frozenset({ItemKind.JSON, ItemKind.PROTO})


@final
@dataclass(frozen=True, slots=True)
class SealReport:
    """The report of sealing."""

    path: str
    sealed: tuple[str, ...]  #: directories that have a record of digests now
    unchanged: tuple[str, ...]  #: directories that had one before
    n_documents: int  #: whose digest was added
    n_ranges: int  #: of data files, whose checksum was added
    nbytes: int  #: bytes read


@short_traceback
async def seal(path: Path, *, store: Store | None = None, config: Config | Path | None = None) -> SealReport:
    """Record the digests of everything in the checkpoint at `path`, as it is now, for later comparison.

    For checkpoints that Orbax wrote, or penstock before it recorded digests of documents. Checksums that
    are there already are compared first. Nothing but the record and the commit mark is written, and Orbax
    ignores both. Of a directory of steps, each finished step is sealed, and the metadata of all.

    Args:
        path: A checkpoint, a step, or a directory of steps. It is held, so that no other program replaces or
            deletes it; where nothing can be locked, none may write into it.
        store: Where it is; by default where its path says, on a disk or in a bucket.
        config: As for `Checkpointer`; of it, where buckets are and how they are used.

    Raises:
        ChecksumError: If bytes differ from a checksum that was recorded before. Nothing is sealed then.
        NotACheckpointError: If there is none.
        InUseError: If somebody reads or deletes it now.
        ReplacedError: If it was replaced again and again while it was read.
        UnsupportedFormatError: If it is safetensors without digests: they are in the header, so that only
            `convert` adds them, to a copy.
        PenstockError: As `restore`, if it cannot be opened.

    Cancellation:
        Returns when the current directory is sealed.
    """
    final = path_or_url(path)
    options, _ = config_and_regulator(config, {})
    store = StoreFinder(store, options.store).at(final)
    threads = Threads()
    sealed: list[str] = []
    unchanged: list[str] = []
    count = _Count()
    checkpoints = await threads.run(_checkpoints, store, final)
    if not checkpoints:
        return SealReport(final, (), (final,), 0, 0, 0)

    for checkpoint in checkpoints:
        seal_one = partial(_seal_checkpoint, store, threads, checkpoint, count)
        # Held alone: the record must not come to be in another one that has taken its place.
        done = await read_unchanged(store, threads, checkpoint, seal_one, store.hold)
        sealed += [directory for directory, is_new in done if is_new]
        unchanged += [directory for directory, is_new in done if not is_new]

    if checkpoints != [final] and await threads.run(seal_root_metadata, store, final):
        sealed.append(os.path.join(final, ROOT_FOLDER))

    return SealReport(final, tuple(sealed), tuple(unchanged), count.documents, count.ranges, count.nbytes)


async def _seal_checkpoint(
    store: Store, threads: Threads, checkpoint: str, count: _Count, source: Reading
) -> list[tuple[str, bool]]:
    """Seal one checkpoint. Return its directories, and whether each has a record that is new."""
    done: list[tuple[str, bool]] = []
    count_here = _Count()
    directories = await threads.run(_directories, store, checkpoint)
    for directory, tree in directories:
        record = await threads.run(_record, store, directory, tree, count_here)
        # The record of the checkpoint itself is the last, and its own write changes the identity.
        await (source.end() if directory == directories[-1][0] else source.check())
        if record is not None:
            await threads.run(_write, store, directory, record)

        done.append((directory, record is not None))

    count.add(count_here)
    return done


@dataclass(slots=True)
class _Count:
    documents: int = 0
    ranges: int = 0
    nbytes: int = 0

    def add(self, other: _Count) -> None:
        self.documents += other.documents
        self.ranges += other.ranges
        self.nbytes += other.nbytes


def _checkpoints(store: Store, path: str) -> list[str]:
    """Return `path`, or the finished steps in it; nothing if it is safetensors with digests of everything.

    Raises:
        UnsupportedFormatError: If it is safetensors without.
    """
    place = find_place(store, path)
    if place.kind == "tensors":
        if survey_tensors(store, path).findings:
            problem = "is safetensors, whose digests lie in the header, before the data; `penstock convert`"
            raise UnsupportedFormatError(path, f"{problem} writes a copy that has them")
        return []

    steps = finished_steps(store, path) if place.kind == "root" else None
    return [path] if steps is None else [os.path.join(path, name) for name in steps]


def _directories(store: Store, path: str) -> Sequence[tuple[str, OrbaxCheckpoint | None]]:
    """Return the directories of a checkpoint that get a record: of trees, then the checkpoint itself."""
    contents = contents_of(store, path)
    if contents.whole in (ItemKind.TREE, ItemKind.PACKED, ItemKind.NAMED):
        return [(path, open_checkpoint(store, path))]

    names, items = contents.names, contents.items
    trees = [open_checkpoint(store, path, name) for name, kind in items.items() if kind not in _WITHOUT_TREE]
    if not items and CHECKPOINT_METADATA not in names:
        only = open_checkpoint(store, path)  # raises unless it is arrays alone, or one document
        return [(only.directory, only)]

    return [*[(tree.directory, tree) for tree in trees], (path, None)]


def _record(store: Store, directory: str, tree: OrbaxCheckpoint | None, count: _Count) -> bytes | None:
    """Return the record of one directory; None if it has one that is complete."""
    names = store.list_directory(directory)
    known = SealedDocuments.open(store, directory, names)
    if known.is_sealed:
        return None

    files: Mapping[str, Mapping[str, bytes]] = {}
    if tree is not None:
        files = _files(store, tree, count)

    documents = {
        name: digest_of_file(store, os.path.join(directory, name))
        for name in documents_below(store, directory, files)
    }
    count.documents += len(documents)
    count.nbytes += sum([digest.nbytes for digest in documents.values()])
    about = None
    if CHECKPOINT_METADATA in names:
        path = os.path.join(directory, CHECKPOINT_METADATA)
        data = store.read_file(path)
        about = content_of(path, data) if data else None

    return integrity.encode_files(files, known.recorded.digests, documents, about)


def _files(store: Store, tree: OrbaxCheckpoint, count: _Count) -> Mapping[str, Mapping[str, bytes]]:
    """Take the checksum of every chunk; where pieces have one, compare it and keep it."""
    index = tree.index
    rows: Any = zip(index.ids.tolist(), index.offsets.tolist(), index.lengths.tolist(), strict=True)
    columns: Iterable[tuple[int, int, int]] = rows
    ranges: dict[str, set[tuple[int, int]]] = {}
    for file, offset, nbytes in columns:
        if file >= 0 and nbytes > 0:
            ranges.setdefault(index.files[file], set()).add((offset, nbytes))

    found: dict[str, Mapping[str, bytes]] = {}
    for name in sorted({*ranges, *tree.checksums}):
        path, before = os.path.join(tree.directory, name), tree.checksums.get(name, NONE)
        added = [found for found in sorted(ranges.get(name, ())) if recorded_crc32c(before, *found) is None]
        _check_ranges(store, path, [*[(one.offset, one.nbytes) for one in before], *added])
        pieces = [_compared(store, path, piece, count) for piece in before]
        for offset, nbytes in added:
            pieces.append(Checksum(offset, nbytes, range_crc32c(store, path, offset, nbytes)))
            count.ranges += 1
            count.nbytes += nbytes

        if pieces:
            found[name] = integrity.columns(pieces, before)

    return found


def _check_ranges(store: Store, path: str, ranges: Iterable[tuple[int, int]]) -> None:
    """Refuse ranges that a record cannot hold, before any is read."""
    end = nbytes = 0
    for offset, length in sorted(set(ranges)):
        if offset < end:
            raise UnsupportedFormatError(path, "has chunks that lie in one another")
        end, nbytes = offset + length, nbytes + length

    problem = problem_of_holes(store, path, nbytes)
    if problem:
        raise UnsupportedFormatError(path, problem)


def _compared(store: Store, path: str, piece: Checksum, count: _Count) -> Checksum:
    count.nbytes += piece.nbytes
    if range_crc32c(store, path, piece.offset, piece.nbytes) != piece.crc32c:
        problem = f"bytes {piece.offset} to {piece.offset + piece.nbytes} differ from those written"
        raise ChecksumError(path, f"{problem}; what is damaged is not sealed")

    return piece


def _write(store: Store, directory: str, record: bytes) -> None:
    """Write the record, then the mark that says so. At each moment the checkpoint can be restored."""
    path, new = os.path.join(directory, INTEGRITY), os.path.join(directory, _NEW)
    if store.kind(path) is None:
        store.write_file(path, record, create=True)  # half a record would be damage, no record is none
    elif (directories := store.directories) is None:
        store.write_file(path, record)
    else:
        # An earlier record has no digest in the mark, so it may be missing for a moment.
        old = os.path.join(directory, _OLD)
        store.make_directory(old)
        store.write_file(new, record)
        directories.rename(path, os.path.join(old, INTEGRITY))
        directories.rename(new, path)
        store.remove_tree(old)

    store.sync_directory(directory)
    mark = os.path.join(directory, COMMIT_MARK)
    if store.kind(mark) == "file":
        try:
            text = store.read_file(mark)
        except StorageError:
            return

        store.write_file(mark, encode_mark(record, text))
        store.sync_directory(directory)

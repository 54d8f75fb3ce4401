"""Compares chosen arrays of a tree with the checksums that were recorded of them."""

from __future__ import annotations

__all__ = ("check_arrays",)

import os
from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from itertools import groupby

from penstock.handlers.formats.checksummed_reads import NONE
from penstock.handlers.formats.integrity import Checksum
from penstock.handlers.formats.orbax.file_names import MANIFEST
from penstock.handlers.formats.orbax.sealed_documents import SealedDocuments
from penstock.handlers.formats.verification import RecordedRange, check_ranges
from penstock.handlers.ocdbt.database_reader import read_index
from penstock.handlers.ocdbt.wire_format import Indirect
from penstock.kernel.errors import ChecksumError
from penstock.kernel.protocols.stores import Store


def check_arrays(store: Store, directory: str, names: AbstractSet[str]) -> None:
    """Compare arrays of a tree, and the documents that describe them, with what is recorded. Blocking.

    Args:
        store: Where.
        directory: Of the tree; one that is not there is left to who reads it.
        names: The stored names of the arrays.

    Raises:
        ChecksumError: If something is not as it was written.
    """
    if store.kind(directory) != "directory":
        return

    inside = store.list_directory(directory)
    sealed = SealedDocuments.open(store, directory, inside)
    for document in sealed.recorded.documents:
        if document.rpartition("/")[0] in names:
            sealed.read(document)

    found = set(_in_directories(sealed, names))
    if MANIFEST in inside and sealed.recorded.files:
        found |= set(_in_database(store, sealed, names))  # which compares the nodes of the index

    for file, ranges in groupby(sorted(found), key=lambda one: one[0]):
        path = os.path.join(directory, file)
        wanted = [RecordedRange(path, checksum, (name,)) for _, checksum, name in ranges]
        for finding in check_ranges(store, wanted):
            raise ChecksumError(path, finding.problem, key_path=finding.key_paths[0])


def _in_directories(sealed: SealedDocuments, names: AbstractSet[str]) -> Iterator[tuple[str, Checksum, str]]:
    for file, checksums in sealed.recorded.files.items():
        steps = file.split("/")
        for name in names & {"/".join(steps[:depth]) for depth in range(1, len(steps))}:
            for checksum in checksums:
                yield file, checksum, name


def _in_database(
    store: Store, sealed: SealedDocuments, names: AbstractSet[str]
) -> Iterator[tuple[str, Checksum, str]]:
    index = read_index(store, sealed.directory)
    for name in names:
        for row in index.rows_below(f"{name}/".encode()):
            value = index.value(row)
            if not isinstance(value, Indirect):
                continue

            recorded = sealed.recorded.files.get(value.file, NONE)
            for at in range(max(recorded.from_offset(value.offset + 1) - 1, 0), len(recorded)):
                checksum = recorded[at]
                if checksum.offset >= value.offset + value.length:
                    break
                if checksum.offset + checksum.nbytes > value.offset:
                    yield value.file, checksum, name

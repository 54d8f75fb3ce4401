"""Reads the intact part of damaged safetensors: a lost file takes only its own tensors."""

from __future__ import annotations

__all__ = ("DamagedTensors", "open_damaged")

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, final

from penstock.handlers.formats.leaf_table import show_key_path
from penstock.handlers.formats.safetensors import penstock_metadata as notes
from penstock.handlers.formats.safetensors.file_set import (
    FileSet,
    file_of_each,
    find_index,
    missing_siblings,
    read_index,
    tensor_files,
)
from penstock.handlers.formats.safetensors.header import FileHeader, read_header
from penstock.handlers.formats.safetensors.safetensors_checkpoint import (
    SafetensorsCheckpoint,
    checkpoint_of,
)
from penstock.handlers.formats.safetensors.tensor_survey import ranges_of
from penstock.handlers.formats.verification import Finding, RecordedRange, finding_of
from penstock.kernel.errors import (
    ChecksumError,
    CorruptCheckpointError,
    PenstockError,
    UnsupportedFormatError,
)
from penstock.kernel.protocols.leaf import KeyKind
from penstock.kernel.protocols.stores import Store

_DOUBTFUL: Final = "; its names, types and metadata are as it has them now"
_NOTE_LOST: Final = "; strings, None, containers and types of leaves that penstock noted are left out"


@final
@dataclass(frozen=True, slots=True)
class DamagedTensors:
    """The rest of a damaged checkpoint, and what is known to be lost before tensors are read."""

    opened: SafetensorsCheckpoint  #: of all tensors that a readable header lists
    ranges: tuple[RecordedRange, ...]  #: of their bytes, by file and offset
    unsealed: frozenset[
        str
    ]  #: files that were compared with nothing, so that there are none of their tensors
    note_is_sealed: bool  #: whether strings, None and containers are known to be those that were written
    findings: tuple[Finding, ...]
    """Files as a whole, and tensors that only the index knows. An `unchecked` file is read all the same."""


def open_damaged(store: Store, path: str) -> DamagedTensors:
    """Read the headers at `path` that can be read, a file or a folder. Blocking; reads no tensor.

    A header that differs from what was written is read, if it still is a header. So is one of a file that
    was cut short. An index that is damaged is done without.

    Raises:
        NotACheckpointError: If there are no such files.
        LinkOutsideError: If a link in a folder leads out of it, and the store does not allow that.
        CorruptCheckpointError: If a tensor is in two files.
        UnsupportedFormatError: If undamaged headers say what this penstock does not read.
    """
    if store.kind(path) == "directory":
        store.check_links(path, path)

    reading = _Reading(store, path)
    headers = tuple(reading.headers())
    tensors = file_of_each(headers)
    for name, file in reading.weights.items():
        if name not in tensors:
            lost = f"lay in {file!r}, which does not hold it"
            reading.findings.append(Finding("damaged", os.path.join(path, file), lost, (_key_path(name),)))

    opened = _opened(store, path, FileSet(headers), reading.findings)
    ranges = tuple([found for header in headers for found in ranges_of(header)])
    unsealed = frozenset([header.path for header in headers if header.checksums is None])
    noted = [header for header in headers if notes.MEMBER in header.metadata]
    note_is_sealed = all(header.checksums is not None for header in noted)
    return DamagedTensors(opened, ranges, unsealed, note_is_sealed, tuple(reading.findings))


@final
@dataclass(frozen=True, slots=True)
class _Reading:
    """One look at the files, and what is wrong with them."""

    store: Store
    path: str
    weights: dict[str, str] = field(default_factory=dict[str, str])
    """The file of each tensor, as the index has it; empty if there is none that can be read."""
    findings: list[Finding] = field(default_factory=list[Finding])

    def headers(self) -> Iterator[FileHeader]:
        """Yield every header that can be read."""
        for file in self._files():
            header = self._header(file)
            if header is not None:
                yield header

    def _files(self) -> Sequence[str]:
        path, store = self.path, self.store
        if store.kind(path) == "file":
            return (path,)

        names = store.list_directory(path)
        index = find_index(path, names)
        self.weights.update(self._indexed(index))
        files = sorted(set(self.weights.values())) or tensor_files(path, names)
        siblings = () if self.weights else missing_siblings(files)
        missing = {sibling: f"is missing; {name!r} is there" for sibling, name in siblings}
        missing.update(
            {file: f"is missing, and {index!r} refers to it" for file in files if file not in names}
        )
        self.findings.extend(
            [Finding("damaged", os.path.join(path, name), why) for name, why in missing.items()]
        )
        return [os.path.join(path, name) for name in files if name not in missing]

    def _indexed(self, index: str | None) -> Mapping[str, str]:
        if index is None:
            return {}
        try:
            return read_index(self.store, os.path.join(self.path, index))[0]
        except PenstockError as error:
            found = finding_of(error, self.path)
            why = f"{found.problem}; every file that is there was taken to belong to the checkpoint"
            self.findings.append(replace(found, problem=why))
            return {}

    def _header(self, file: str) -> FileHeader | None:
        try:
            return read_header(self.store, file, whole=False)
        except UnsupportedFormatError:
            raise
        except ChecksumError as error:
            return self._doubtful(file, error)
        except PenstockError as error:
            self.findings.append(replace(finding_of(error, file), key_paths=()))
            return None

    def _doubtful(self, file: str, error: ChecksumError) -> FileHeader | None:
        """Read a header that is not as it was written, if it still describes all bytes of its file."""
        try:
            header = read_header(self.store, file, compared=False)
        except PenstockError:
            self.findings.append(finding_of(error, file))
            return None

        self.findings.append(Finding("unchecked", file, error.problem + _DOUBTFUL))
        return header


def _opened(store: Store, path: str, files: FileSet, findings: list[Finding]) -> SafetensorsCheckpoint:
    try:
        return checkpoint_of(store, path, files)
    except CorruptCheckpointError as error:
        findings.append(Finding("damaged", error.path, error.problem + _NOTE_LOST))
        return checkpoint_of(store, path, FileSet(tuple(map(_without_note, files.headers))))


def _without_note(header: FileHeader) -> FileHeader:
    kept = {name: text for name, text in header.metadata.items() if name != notes.MEMBER}
    return replace(header, metadata=kept)


def _key_path(name: str) -> str:
    return show_key_path((name,), (KeyKind.MAPPING,))

"""Lists what of one checkpoint can be compared: its items, its documents, and every other file in it."""

from __future__ import annotations

__all__ = ("CheckpointSurvey", "compare_documents", "recorded_directories", "survey_checkpoint")

import os
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final, final

from penstock.handlers.formats.orbax.checkpoint_documents import SealedDocuments
from penstock.handlers.formats.orbax.discovery import (
    KINDS_OF_TREES,
    RANDOM_KEYS,
    Contents,
    ItemKind,
    arrays_in,
    contents_of,
    json_file,
    proto_file,
)
from penstock.handlers.formats.orbax.file_names import (
    CHECKPOINT_METADATA,
    COMMIT_MARK,
    DELETION,
    INTEGRITY,
    V1_MARK,
)
from penstock.handlers.formats.orbax.item_survey import ItemSurvey, survey_item
from penstock.handlers.formats.orbax.open_checkpoint import open_checkpoint
from penstock.handlers.formats.safetensors.tensor_paths import is_safetensors
from penstock.handlers.formats.safetensors.tensor_survey import survey_tensors
from penstock.handlers.formats.untrusted import EnteredDirectories
from penstock.handlers.formats.verification import Finding, RecordedRange, finding_of
from penstock.kernel.errors import PenstockError
from penstock.kernel.protocols.stores import Store
from penstock.kernel.protocols.written import DISK_MARK, STAGE_RECORD

_MARKS: Final = frozenset(
    {CHECKPOINT_METADATA, COMMIT_MARK, DELETION, DISK_MARK, INTEGRITY, STAGE_RECORD, V1_MARK}
)
"""Documents that a checkpoint may have whatever its items are."""


@final
@dataclass(slots=True)
class CheckpointSurvey:
    """The checksummed ranges of a checkpoint, and what is wrong without a byte of an array being read."""

    n_leaves: int = 0
    n_documents: int = 0  #: whose digest was compared
    ranges: list[RecordedRange] = field(default_factory=list[RecordedRange])
    findings: list[Finding] = field(default_factory=list[Finding])


def survey_checkpoint(store: Store, path: str, item: str | None = None) -> CheckpointSurvey:
    """Find the checksummed ranges of the checkpoint at `path`, or of one item of it. Blocking.

    Nothing is raised for what is damaged: it is among the findings.
    """
    found = CheckpointSurvey()
    try:
        if is_safetensors(store, path):
            tensors = survey_tensors(store, path, item)
            found.n_leaves, found.n_documents = tensors.n_leaves, tensors.n_documents
            found.ranges += tensors.ranges
            found.findings += tensors.findings
        else:
            _survey_items(store, path, item, found)
    except PenstockError as error:
        found.findings.append(finding_of(error, path))

    return found


def _survey_items(store: Store, path: str, item: str | None, found: CheckpointSurvey) -> None:
    names = frozenset(store.list_directory(path))
    contents = contents_of(store, path, names)
    items = _items(store, path, contents, item, found)
    surveys: dict[str, ItemSurvey] = {}
    for name, kind in items.items():
        surveys[name] = survey = _survey_item(store, path, name, kind)
        found.n_leaves += survey.n_leaves
        found.ranges += survey.ranges
        found.findings += survey.findings

    if not items:
        found.findings.append(Finding("unchecked", path, "holds no item that penstock knows"))

    files = list(_files_below(store, path))
    recorded = _compare_documents(store, path, files, found)
    skipped = {contents.gone or ""} if item is None else names - {item}
    for file in files:
        if file in recorded or os.path.basename(file) in _MARKS or file.partition("/")[0] in skipped:
            continue
        if not _belongs_to(file, surveys, lambda survey: survey.accounts_for):
            problem = "belongs to no leaf that penstock knows, and no checksum was recorded of it"
        elif recorded and not _belongs_to(file, surveys, lambda survey: survey.holds_data):
            problem = "no digest was recorded of it, and of the other documents there was one"
        else:
            continue

        found.findings.append(Finding("unchecked", os.path.join(path, file), problem))


def _compare_documents(store: Store, path: str, files: Iterable[str], found: CheckpointSurvey) -> set[str]:
    """Compare every document with its digest; those of an item may be recorded in the item itself.

    Args:
        store: Where.
        path: Of the checkpoint.
        files: All its files, named from it.
        found: What is known of it; findings are added.

    Returns:
        All that have a digest, named from the checkpoint.
    """
    known = {finding.file for finding in found.findings}
    recorded: set[str] = set()
    for directory in _recorded(path, files):
        documents, findings = compare_documents(store, directory)
        found.n_documents += len(documents)
        found.findings += [finding for finding in findings if finding.file not in known]
        recorded.update([os.path.relpath(os.path.join(directory, name), path) for name in documents])

    return recorded


def compare_documents(store: Store, directory: str) -> tuple[Collection[str], list[Finding]]:
    """Compare the documents that a directory has a record of. Blocking.

    Returns:
        Their names, relative to the directory, and what is not as it was written.
    """
    problems: list[PenstockError] = []
    try:
        documents = SealedDocuments.open(store, directory, store.list_directory(directory))
        names = documents.recorded.documents.keys()
        if not documents.is_sealed:
            problem = "records no digests of its documents; `penstock seal` adds them"
            return names, [Finding("unchecked", directory, problem)]

        problems += documents.problems()
    except PenstockError as error:
        return (), [finding_of(error, directory)]

    return names, [finding_of(problem, directory) for problem in problems]


def recorded_directories(store: Store, path: str) -> list[str]:
    """Return the checkpoint itself, and every directory in it that has its own record of digests."""
    return _recorded(path, _files_below(store, path))


def _recorded(path: str, files: Iterable[str]) -> list[str]:
    inside = [os.path.dirname(file) for file in files if _is_record(file)]
    return [path, *[os.path.join(path, name) for name in inside if name]]


def _is_record(file: str) -> bool:
    return os.path.basename(file) == INTEGRITY


def _items(
    store: Store,
    path: str,
    contents: Contents,
    item: str | None,
    found: CheckpointSurvey,
) -> dict[str, ItemKind]:
    """Return the kind of each item by name; the name is empty if the checkpoint is one item as a whole."""
    if item is None and contents.whole is not None:
        return {"": contents.whole}

    names, items = contents.names, dict(contents.items)
    for name in names - items.keys():
        if arrays_in(store, path, name):
            items[name] = ItemKind.NAMED

    for name in _listed(store, path, names, found):
        if name not in names and name != contents.gone:
            problem = f"is missing, and {CHECKPOINT_METADATA} lists it"
            found.findings.append(Finding("damaged", os.path.join(path, name), problem))

    if item is None:
        return items
    if item not in items:
        directory = os.path.join(path, item)
        if item in names:
            found.findings.append(Finding("unchecked", directory, "is not an item that penstock knows"))
        else:
            found.findings.append(Finding("absent", directory, "there is no such item"))
        return {}

    return {item: items[item]}


def _listed(store: Store, path: str, names: frozenset[str], found: CheckpointSurvey) -> list[str]:
    """Name the items that the checkpoint is recorded to have."""
    try:
        return sorted(SealedDocuments.open(store, path, names).about(names).items)
    except PenstockError as error:
        found.findings.append(finding_of(error, path))
        return []


def _survey_item(store: Store, path: str, name: str, kind: ItemKind) -> ItemSurvey:
    if kind in KINDS_OF_TREES or kind is ItemKind.NAMED:
        return survey_item(store, path, name)

    directory = os.path.join(path, name) if name else path
    documents = _documents(store, directory, kind)
    n_leaves, findings = _read_document(store, path, name)
    if kind not in RANDOM_KEYS:
        return ItemSurvey(n_leaves, (), findings, documents.__contains__)

    # The array of a random key is an item inside of the item.
    array = survey_item(store, directory, RANDOM_KEYS[kind])
    prefix = f"{RANDOM_KEYS[kind]}/"

    def accounts_for(file: str) -> bool:
        inside = file.removeprefix(prefix)
        return file in documents or (inside != file and array.accounts_for(inside))

    def holds_data(file: str) -> bool:
        inside = file.removeprefix(prefix)
        return inside != file and array.holds_data(inside)

    found = tuple(dict.fromkeys([*array.findings, *findings]))
    return ItemSurvey(array.n_leaves, array.ranges, found, accounts_for, holds_data)


def _read_document(store: Store, path: str, name: str) -> tuple[int, tuple[Finding, ...]]:
    """Read an item that is a document. Return how many leaves it has, and what is wrong with it."""
    try:
        return len(open_checkpoint(store, path, name or None).leaves), ()
    except PenstockError as error:
        return 0, (finding_of(error, path),)


def _documents(store: Store, directory: str, kind: ItemKind) -> set[str]:
    """Name the documents that are all of an item, or say what its array is."""
    names = store.list_directory(directory)
    match kind:
        case ItemKind.JSON:
            return {json_file(store, directory, names) or ""}
        case ItemKind.PROTO:
            return {proto_file(names) or ""}
        case ItemKind.JAX_KEY | ItemKind.NUMPY_KEY:
            return {f"{RANDOM_KEYS[kind]}_metadata/metadata"}
        case _:
            return set()


def _belongs_to(
    file: str, surveys: dict[str, ItemSurvey], question: Callable[[ItemSurvey], Callable[[str], bool]]
) -> bool:
    """True if a survey answers the question about a file, which is named from the item, with yes."""
    if "" in surveys:
        return question(surveys[""])(file)

    item, _, rest = file.partition("/")
    return item in surveys and question(surveys[item])(rest)


def _files_below(store: Store, path: str) -> Iterator[str]:
    """Yield every file of a checkpoint, named from it.

    Raises:
        CorruptCheckpointError: If links make too many paths.
    """
    entered = EnteredDirectories(store)
    pending: list[tuple[str, frozenset[object]]] = [("", frozenset())]
    while pending:
        name, above = pending.pop()
        directory = os.path.join(path, name) if name else path
        identity = store.identity(directory)
        if identity in above:
            continue  # a link to a directory around it

        entered.enter(directory)
        entries = [f"{name}/{entry}" if name else entry for entry in store.list_directory(directory)]
        sizes = store.file_sizes([os.path.join(path, entry) for entry in entries])
        for entry, size in zip(entries, sizes, strict=True):
            if size == -1 and store.kind(os.path.join(path, entry)) == "directory":  # and no pipe
                pending.append((entry, above | {identity}))
            else:
                yield entry

"""Damaged documents of a checkpoint: replaced where another checkpoint has the same, else hidden."""

from __future__ import annotations

__all__ = ("patch_documents",)

import os
from collections.abc import Sequence
from typing import Final

from penstock.handlers.formats.integrity import Digest, digest_of
from penstock.handlers.formats.orbax.file_names import (
    ARRAY_METADATAS,
    CHECKPOINT_METADATA,
    INTEGRITY,
    SHARDING,
    STRINGS,
)
from penstock.handlers.formats.orbax.sealed_documents import SealedDocuments
from penstock.kernel.errors import CorruptCheckpointError, PenstockError, StorageError
from penstock.kernel.protocols.stores import Store
from penstock.tools.patched_store import PatchedStore
from penstock.tools.repair_report import RepairedLeaf

_NOTED: Final = frozenset({CHECKPOINT_METADATA, INTEGRITY, SHARDING, STRINGS})
"""Documents whose loss is noted by itself. That of others shows in the leaves or the item that it takes."""


def patch_documents(
    patched: PatchedStore, path: str, directory: str, others: Sequence[str], lost: list[RepairedLeaf]
) -> None:
    """Compare the documents of a directory with their record, and patch those that differ. Blocking.

    Args:
        patched: Shows the checkpoint.
        path: Of the checkpoint.
        directory: That has a record: the checkpoint, or an item of it.
        others: Paths of other checkpoints.
        lost: What is lost is added.
    """
    store, item = patched.inner, os.path.relpath(directory, path)
    place = "" if item == "." else item
    try:
        documents = SealedDocuments.open(store, directory, store.list_directory(directory))
        problems = list(documents.problems())
    except CorruptCheckpointError as error:
        patched.hide(os.path.join(directory, INTEGRITY), error.problem)
        lost.append(RepairedLeaf("gone", "", place, f"checksums: {error.problem}"))
        return
    except StorageError:
        return  # found again where it is read

    for problem in problems:
        name = os.path.relpath(problem.path, directory)
        expected = documents.recorded.documents.get(name)
        found = None if expected is None else _elsewhere(store, path, problem.path, others, expected)
        if found is not None:
            patched.replace(problem.path, found[1])
            text = f"{name}: {problem.problem}"
            lost.append(RepairedLeaf("taken", "", place, text, found[0]))
            continue

        patched.hide(problem.path, problem.problem)
        if os.path.basename(name) in _NOTED or name.startswith(f"{ARRAY_METADATAS}/"):
            lost.append(RepairedLeaf("gone", "", place, f"{name}: {problem.problem}"))


def _elsewhere(
    store: Store, path: str, file: str, others: Sequence[str], expected: Digest
) -> tuple[str, bytes] | None:
    """Return the same document of another checkpoint, and that one's path."""
    for other in others:
        try:
            data = store.read_file(os.path.join(other, os.path.relpath(file, path)))
        except PenstockError:
            continue
        if digest_of(data) == expected:
            return other, data

    return None

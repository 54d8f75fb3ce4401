"""Writes the documents that make data files a checkpoint."""

from __future__ import annotations

__all__ = ("write_documents",)

import json
import os
from collections.abc import Sequence
from dataclasses import replace

from penstock.kernel.messages.leaves import Leaves
from penstock.kernel.messages.save import SavePlan, WrittenBatch
from penstock.kernel.pipeline.run_context import SaveRun
from penstock.kernel.protocols.leaf import LeafSpec
from penstock.kernel.protocols.written import STAGE_RECORD, Document


def write_documents(
    run: SaveRun,
    leaves: Leaves,
    plan: SavePlan,
    batches: Sequence[WrittenBatch],
    marks: Sequence[Document] = (),
) -> int:
    """Make the index, the metadata and, last, the commit mark durable, then the directories. Blocking.

    The names of files that other processes wrote are durable since these told of them.

    Args:
        run: Of the save.
        leaves: All of them, as they were written.
        plan: Of the save.
        batches: What was written.
        marks: Further documents at the root of the checkpoint.

    Returns:
        How many data files there are.
    """
    files = {file for batch in batches if not batch.are_names_durable for file in batch.written.files}
    others = {file for batch in batches if batch.are_names_durable for file in batch.written.files}
    directories = {"": None} | {os.path.dirname(file): None for file in sorted(files)}
    record = stage_record(plan) if run.layout.places is None else None
    beside = list(marks)
    if record is not None:
        beside.append(replace(record, path=os.path.join(run.folder, record.path)))
    for document in beside:
        _write_document(run, document, directories)

    documents = run.layout.documents(
        leaves,
        batches,
        started_ns=run.started_ns,
        custom_metadata=run.custom_metadata,
        digests=plan.digests,
        beside=beside,
    )
    for document in documents:
        _write_document(run, document, directories)
        del document  # while the next one is made

    for directory in directories:
        run.store.sync_directory(run.workspace.path(directory))

    return len(files | others)


def _write_document(run: SaveRun, document: Document, directories: dict[str, None]) -> None:
    directory = os.path.dirname(document.path)
    if directory not in directories:
        run.workspace.make_directory(directory)
        directories[directory] = None

    run.store.write_file(run.workspace.path(document.path), document.data)


def stage_record(plan: SavePlan) -> Document | None:
    """Return the document of the changes that stages declared; None if there are none. Pure.

    A JSON object: for each changed leaf, by stored name, the stages in order, and the leaf before and after.
    Options of a stage are not recorded, because one may be a key.
    """
    if not plan.changes:
        return None

    leaves = {
        plan.infos[index].name: {
            "stages": list(change.stages),
            "before": _described(change.before),
            "after": _described(plan.specs[index]),
        }
        for index, change in plan.changes.items()
    }
    return Document(
        STAGE_RECORD, json.dumps({"version": 1, "leaves": leaves}, separators=(",", ":")).encode()
    )


def _described(spec: LeafSpec) -> dict[str, object]:
    found: dict[str, object] = {"dtype": spec.dtype, "shape": spec.shape}
    return found if spec.codec is None else {**found, "codec": spec.codec}

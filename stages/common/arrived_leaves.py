"""Compares what was written with the plan, so that nothing is truncated or changed silently. Pure."""

from __future__ import annotations

__all__ = ("arrived_leaves", "check_all_there")

from collections.abc import Sequence
from operator import is_

import numpy as np
import numpy.typing as npt

from penstock.kernel.errors import IncompletePipelineError
from penstock.kernel.messages.leaves import Leaves, in_columns
from penstock.kernel.messages.save import SavePlan, WrittenBatch
from penstock.kernel.protocols.leaf import LeafSpec
from penstock.stages.common.planned_leaves import check_planned_together


def arrived_leaves(plan: SavePlan, batches: Sequence[WrittenBatch]) -> Leaves:
    """Compare the plan with what arrived, specs included, and return all leaves in order.

    If several processes save together, that is what this one writes of them.

    Raises:
        ChangedLeafError: If a leaf differs from its plan.
        IncompletePipelineError: If a leaf or part of one is missing or came twice.
    """
    n_leaves = len(plan.infos)
    arrived = [in_columns(batch.leaves) for batch in batches]
    packs = [in_columns(pack.leaves) for batch in batches for pack in batch.packs]
    for part in {id(part): part for part in (*arrived, *packs)}.values():
        check_planned_together(part, plan)

    counts = np.zeros(n_leaves, np.int64)
    specs = list(plan.specs)
    for part in arrived:
        np.add.at(counts, np.array(part.indices, np.int64), 1)
        for index, spec in zip(part.indices, part.specs, strict=True):
            specs[index] = spec

    here = np.ones(n_leaves, np.int64)
    wanted = np.array([spec.nbytes for spec in specs], np.int64)
    if plan.joint is not None:
        wanted = np.array(plan.joint.shares, np.int64)
        here = (wanted > 0).astype(np.int64)
        here[list(plan.joint.handled)] = 1

    _check_complete(plan, (counts == here) & (_arrived_bytes(specs, batches) == wanted))

    # The very list of the plan, if it can be, because documents are recognised by it.
    same = all(map(is_, specs, plan.specs))
    return Leaves(range(n_leaves), plan.specs if same else specs, None, plan.infos, plan.handlers)


def check_all_there(plan: SavePlan, specs: Sequence[LeafSpec], batches: Sequence[WrittenBatch]) -> None:
    """Check that all processes together wrote every leaf whole.

    Raises:
        IncompletePipelineError: If a leaf or part of one is missing or came twice.
    """
    wanted = np.array([spec.nbytes for spec in specs], np.int64)
    _check_complete(plan, _arrived_bytes(specs, batches) == wanted)


def _check_complete(plan: SavePlan, complete: npt.NDArray[np.bool_]) -> None:
    if not complete.all():
        absent = plan.infos[int(np.argmin(complete))]
        raise IncompletePipelineError(len(complete), int(complete.sum()), absent.key_path)


def _arrived_bytes(specs: Sequence[LeafSpec], batches: Sequence[WrittenBatch]) -> npt.NDArray[np.int64]:
    """Sum up the bytes of each leaf that were written."""
    arrived = np.zeros(len(specs), np.int64)
    coded: dict[tuple[int, tuple[int, ...]], int] = {}
    for batch in batches:
        for part in batch.written:
            if part.coded is None:
                arrived[part.leaf] += part.nbytes
            else:
                chunk = (part.leaf, part.chunk)
                coded[chunk] = coded.get(chunk, part.coded) - part.nbytes

        for pack in batch.packs:
            np.add.at(arrived, np.array(pack.indices, np.int64), pack.sizes)

        for columns in batch.columns:
            plain = columns.coded < 0
            np.add.at(arrived, columns.leaf[plain], columns.nbytes[plain])
            for part in columns.parts(np.flatnonzero(~plain)):
                chunk = (part.leaf, part.chunk)
                coded[chunk] = coded.get(chunk, part.coded or 0) - part.nbytes

    # An encoded chunk counts with its original length, once all of its encoded bytes have arrived.
    for (index, _), absent_bytes in coded.items():
        if absent_bytes == 0:
            arrived[index] += specs[index].chunk_nbytes

    return arrived

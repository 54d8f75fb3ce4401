"""`_PENSTOCK_STAGES`: what stages did to leaves of a checkpoint. Orbax ignores this file."""

from __future__ import annotations

__all__ = ("stage_record",)

import json

from penstock.kernel.messages.save import SavePlan
from penstock.kernel.protocols.leaf import LeafSpec
from penstock.kernel.protocols.written import STAGE_RECORD, Document


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

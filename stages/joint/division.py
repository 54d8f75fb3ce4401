"""Which leaves this process writes, and what all processes must have been asked alike."""

from __future__ import annotations

__all__ = ("divided",)

from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from functools import partial

from penstock.kernel.errors import InvalidLeafError
from penstock.kernel.messages.joint_plan import JointPlan
from penstock.kernel.messages.leaves import Leaves
from penstock.kernel.messages.save import SavePlan
from penstock.kernel.pipeline.run_context import SaveRun
from penstock.kernel.protocols.coordinator import Operation
from penstock.kernel.protocols.files_handler import FilesHandler
from penstock.kernel.protocols.layouts import process_folder_of
from penstock.kernel.protocols.leaf_handlers import GlobalHandler
from penstock.stages.common.codec_rules import AUTO
from penstock.stages.joint.base_links import find_links
from penstock.stages.joint.own_leaves import places_of_own
from penstock.stages.joint.plan_digest import described_plan, digest_of_plan
from penstock.stages.reuse.leaf_digests import take_digests


async def divided(
    run: SaveRun, operation: Operation, leaves: Leaves, plan: SavePlan
) -> tuple[Leaves, SavePlan]:
    """Return the leaves of which this process writes anything, and the plan with a `JointPlan`.

    Of a global array each process writes its part. A leaf that every process holds whole is written by the
    primary; its bytes must be the same everywhere, so all of them are read for a digest. What each process
    has for itself, it writes, and nothing of it need be the same.

    Raises:
        SpecError: If the layout cannot be written by several processes, or a leaf cannot.
    """
    process_folder_of(run.layout, operation.process_index)  # whether it has any
    undecided = next((at for at, spec in enumerate(plan.specs) if spec.codec == AUTO), None)
    if undecided is not None:
        raise InvalidLeafError(
            plan.infos[undecided].key_path,
            "with the codec 'auto' each process would decide by its own bytes; choose 'zstd' or 'none'",
        )

    own = places_of_own(plan.infos)
    shares = await run.threads.run(_shares, leaves, own, operation.is_primary)
    held_whole = leaves.part(
        [at for at, spec in enumerate(leaves.specs) if not spec.is_global and at not in own]
    )
    found = await take_digests(run, held_whole)
    digest = await run.threads.run(digest_of_plan, plan, found, options_of(run))
    describe = partial(described_plan, plan, found, options_of(run))
    joint = JointPlan(shares=_scaled(shares, leaves, plan), digest=digest, describe=describe)
    kept, plan = leaves.part([at for at, share in enumerate(shares) if share]), replace(plan, joint=joint)
    if run.by_digest:
        plan = replace(plan, digests=await take_digests(run, kept))
    if run.base is not None:
        kept, plan = await find_links(run, kept, plan)

    return kept, plan


def options_of(run: SaveRun) -> Mapping[str, object]:
    """Return what else must be the same in all processes."""
    return {
        "path": run.path,
        "custom_metadata": run.custom_metadata,
        "base": run.base,
        "compare": "digest" if run.by_digest else "identity",
    }


def _shares(leaves: Leaves, own: Container[int], is_primary: bool) -> list[int]:
    """Return how many bytes of each leaf this process writes."""
    shares: list[int] = []
    assert leaves.values is not None
    for number, (spec, handler) in enumerate(zip(leaves.specs, leaves.handlers, strict=True)):
        if isinstance(handler, FilesHandler):
            raise InvalidLeafError(
                leaves.infos[leaves.indices[number]].key_path,
                f"{handler.name} writes files of its own, which several processes cannot do together yet",
            )
        if number in own and spec.is_global:
            raise InvalidLeafError(
                leaves.infos[leaves.indices[number]].key_path,
                "the array has shards on other processes, and a PerProcess is what one process holds whole",
            )
        if spec.is_global and isinstance(handler, GlobalHandler):
            shares.append(handler.nbytes_here(leaves.values[number], spec))
        else:
            shares.append(spec.nbytes if is_primary or number in own else 0)

    return shares


def _scaled(shares: Sequence[int], leaves: Leaves, plan: SavePlan) -> list[int]:
    """Return the same in bytes as they leave the last stage that changes a leaf."""
    if not plan.changes:
        return list(shares)

    rows = zip(shares, leaves.specs, plan.specs, strict=True)
    return [share * after.nbytes // spec.nbytes if share else 0 for share, spec, after in rows]

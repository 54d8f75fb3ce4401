"""Divides leaves among processes, and checks what all must have been asked alike."""

from __future__ import annotations

__all__ = ("divided",)

from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from functools import partial

from penstock.kernel.errors import InvalidLeafError, PathError
from penstock.kernel.messages.changed_specs import CodecChoice
from penstock.kernel.messages.joint_plan import Ballot, JointPlan
from penstock.kernel.messages.leaves import Leaves
from penstock.kernel.messages.save import SavePlan
from penstock.kernel.pipeline.run_context import SaveRun
from penstock.kernel.protocols.coordinator import Operation
from penstock.kernel.protocols.files_handler import FilesHandler
from penstock.kernel.protocols.layouts import ArrangedLayout, FormattedLayout, process_folder_of
from penstock.kernel.protocols.leaf_handlers import EveryProcess, GlobalHandler
from penstock.stages.joint.agreement import Agreement
from penstock.stages.joint.arranged_files import check_arranged, make_files
from penstock.stages.joint.base_links import find_links
from penstock.stages.joint.codec_votes import take_votes, undecided
from penstock.stages.joint.own_leaves import places_of_own
from penstock.stages.joint.plan_digest import described_plan, digest_of_plan
from penstock.stages.reuse.leaf_digests import take_digests


async def divided(
    run: SaveRun, operation: Operation, leaves: Leaves, plan: SavePlan, choice: CodecChoice | None
) -> tuple[Leaves, SavePlan]:
    """Return the leaves of which this process writes anything, and the plan with a `JointPlan`.

    Of a global array each process writes its part; on a disk of its own, all that it holds. A leaf that every
    process holds whole is written by the primary, or by each on its own disk; its bytes must be the same
    everywhere, so all of them are read for a digest, but for those that only a handler of its own knows. What
    each process has for itself, it writes, and nothing of it need be the same.

    Raises:
        SpecError: If the layout cannot be written by several processes, or a leaf cannot.
    """
    own, prepare = places_of_own(plan.infos), None
    if isinstance(run.layout, ArrangedLayout):
        if operation.is_local:
            problem = "is on a disk of this process alone, and this format has no parts; choose another"
            raise PathError(run.path, problem)

        check_arranged(run, plan, own)
        prepare = partial(make_files, run, plan)
    else:
        process_folder_of(run.layout, operation.process_index)  # whether it has any

    places = undecided(plan)
    if places and choice is None:
        problem = "has the codec 'auto', and no stage of this pipeline decides about it"
        raise InvalidLeafError(plan.infos[places[0]].key_path, problem)

    writes_whole = operation.is_primary or operation.is_local
    shares = await run.threads.run(_shares, leaves, own, writes_whole)
    handled = _handled(leaves, own, writes_whole)
    held_whole = leaves.part(
        [at for at, spec in enumerate(leaves.specs) if not spec.is_global and at not in own]
    )
    found = await take_digests(run, held_whole)
    options = {**options_of(run, operation), "auto_codec": choice.auto_codec if places and choice else None}
    digest = await run.threads.run(digest_of_plan, plan, found, options)
    describe = partial(described_plan, plan, found, options)
    joint = JointPlan(
        shares=_scaled(shares, leaves, plan),
        digest=digest,
        describe=describe,
        agree=Agreement(run, operation, prepare).reach,
        handled=handled,
    )
    kept = leaves.part([at for at, share in enumerate(shares) if share or at in handled])
    plan = replace(plan, joint=joint)
    if run.by_digest:
        plan = replace(plan, digests=await take_digests(run, kept))
    if run.base is not None:
        kept, plan = await find_links(run, kept, plan)
    if places and choice is not None:
        votes = await take_votes(run, choice, places, kept, plan)
        ballot = Ballot(places=places, votes=votes, codec=choice.auto_codec)
        plan = replace(plan, joint=replace(plan.joint or joint, ballot=ballot))

    return kept, plan


def options_of(run: SaveRun, operation: Operation) -> Mapping[str, object]:
    """Return what else must be the same in all processes. Paths on local disks need not be."""
    layout = run.layout
    base: object = run.base is not None if operation.is_local else run.base
    return {
        "path": operation.path,
        "format": layout.save_format if isinstance(layout, FormattedLayout) else type(layout).__name__,
        "custom_metadata": run.custom_metadata,
        "base": None if run.base_if_whole else base,
        "compare": "digest" if run.by_digest else "identity",
    }


def _handled(leaves: Leaves, own: Container[int], writes_whole: bool) -> frozenset[int]:
    """Return the leaves that handlers of this process write into files of their own.

    Of what all processes hold, the primary's handler writes it, on local disks that of each process, unless
    the handler says that each process writes a part of it.
    """
    return frozenset(
        [
            number
            for number, handler in enumerate(leaves.handlers)
            if isinstance(handler, FilesHandler)
            and (writes_whole or number in own or _writes_everywhere(handler))
        ]
    )


def _writes_everywhere(handler: object) -> bool:
    return isinstance(handler, EveryProcess) and handler.every_process


def _shares(leaves: Leaves, own: Container[int], writes_whole: bool) -> list[int]:
    """Return how many bytes of each leaf this process writes.

    Args:
        leaves: With their values.
        own: The places of those that this process has for itself.
        writes_whole: Whether it writes those that every process holds whole.
    """
    shares: list[int] = []
    assert leaves.values is not None
    for number, (spec, handler) in enumerate(zip(leaves.specs, leaves.handlers, strict=True)):
        if number in own and spec.is_global:
            raise InvalidLeafError(
                leaves.infos[leaves.indices[number]].key_path,
                "the array has shards on other processes, and a PerProcess is what one process holds whole",
            )
        if spec.is_global and isinstance(handler, GlobalHandler):
            shares.append(handler.nbytes_here(leaves.values[number], spec))
        else:
            shares.append(spec.nbytes if writes_whole or number in own else 0)

    return shares


def _scaled(shares: Sequence[int], leaves: Leaves, plan: SavePlan) -> list[int]:
    """Return the same in bytes as they leave the last stage that changes a leaf."""
    if not plan.changes:
        return list(shares)

    rows = zip(shares, leaves.specs, plan.specs, strict=True)
    return [share * after.nbytes // spec.nbytes if share else 0 for share, spec, after in rows]

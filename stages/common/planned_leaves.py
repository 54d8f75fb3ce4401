"""Compares what arrives with the plan, so that nothing else is ever published."""

from __future__ import annotations

__all__ = ("check_planned", "check_planned_together", "described", "plan_of", "refuse_global")

from collections.abc import Iterable
from dataclasses import replace
from typing import Protocol

from penstock.kernel.errors import ChangedLeafError, InvalidLeafError, PipelineError
from penstock.kernel.messages.leaves import Leaf, Leaves
from penstock.kernel.messages.save import SavePlan
from penstock.kernel.protocols.leaf import LeafSpec
from penstock.stages.common.codec_rules import AUTO


class _Planned(Protocol):
    @property
    def plan(self) -> SavePlan | None: ...


def plan_of(batches: Iterable[_Planned]) -> SavePlan:
    """Return the plan of a save, which every batch carries.

    Raises:
        PipelineError: If no batch has it: a stage made new batches without it.
    """
    for batch in batches:
        if batch.plan is not None:
            return batch.plan

    raise PipelineError("no batch has the plan of the save; make new batches from old ones with `replace`")


def check_planned(leaf: Leaf, plan: SavePlan) -> None:
    """Refuse a leaf that differs from its plan, which decides its metadata and its place.

    Raises:
        ChangedLeafError: If a stage changed it without declaring that.
    """
    planned = plan.specs[leaf.index]
    if leaf.spec is not planned and not same_spec(leaf.spec, planned):
        raise ChangedLeafError(leaf.info.key_path, described(planned), described(leaf.spec))


def check_planned_together(leaves: Leaves, plan: SavePlan) -> None:
    """Do what `check_planned` does for many leaves."""
    for number, (index, spec) in enumerate(zip(leaves.indices, leaves.specs, strict=True)):
        if spec is not plan.specs[index]:
            check_planned(leaves[number], plan)


def same_spec(spec: LeafSpec, planned: LeafSpec) -> bool:
    """Whether a leaf is stored as planned; a codec that was `auto` is decided on the way."""
    if planned.codec == AUTO and spec.codec != AUTO:
        spec = replace(spec, codec=AUTO)

    return spec == planned


def described(spec: LeafSpec) -> str:
    """Describe briefly how a leaf is stored."""
    shape = "" if spec.shape is None else f"{spec.dtype}{list(spec.shape)}, {spec.nbytes} bytes"
    chunks = "" if spec.chunk_shape == spec.shape else f" in chunks of {list(spec.chunk_shape)}"
    return f"{shape or spec.typestr}{chunks}" + (f", {spec.codec}" if spec.codec else "")


def refuse_global(leaves: Leaves) -> None:
    """Refuse arrays of which other processes hold parts, in a save that is this process's alone.

    Raises:
        InvalidLeafError: For the first of them.
    """
    spread = {number for number, spec in {id(spec): spec for spec in leaves.specs}.items() if spec.is_global}
    if not spread:
        return

    first = next(at for at, spec in enumerate(leaves.specs) if id(spec) in spread)
    raise InvalidLeafError(
        leaves.infos[leaves.indices[first]].key_path,
        "the array has shards on other processes, and this save is of one process: save it with a "
        "penstock.Checkpointer in all of them, once jax.distributed is initialised",
    )

"""How a process tells of leaves that it alone has, and how the primary joins them to its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from penstock import PerProcess
from penstock.errors import CoordinationError
from penstock.handlers import default_handlers
from penstock.kernel import LeafSpec, ParamInfo, SavePlan, Written, WrittenBatch
from penstock.kernel.memory import BoundedCache
from penstock.kernel.messages import LeafChange
from penstock.kernel.protocols import WrittenTable
from penstock.stages.joint.own_leaves import JoinedTrees, announced_numbers, encoded_own, joined
from penstock.stages.joint.part_columns import decoded_part, encoded_part, reading_part, written_by
from penstock.stages.pytree import StructureCache

SHARED = LeafSpec("np.ndarray", (4,), "float32", 4, (4,))


def plan_of(process: int, own: Sequence[LeafSpec]) -> SavePlan:
    """Return the plan of one of two processes: a leaf, those of its own, and another leaf."""
    tree = {"a": 0, "it": PerProcess({f"x{at}": 0 for at in range(len(own))}), "z": 0}
    infos = StructureCache(BoundedCache(8)).flatten(tree, (process, 2))[0]
    registry = default_handlers(entry_points=False)
    handlers = [registry.for_typestr(spec.typestr, "") for spec in (SHARED, *own, SHARED)]
    return SavePlan(infos=infos, specs=[SHARED, *own, SHARED], handlers=handlers)


def names(infos: Sequence[ParamInfo]) -> list[str]:
    return [info.name for info in infos]


SPECS = (
    LeafSpec("np.ndarray", (2, 3), "int16", 2, (2, 3)),
    LeafSpec("string", text="a\udc80 text"),
    LeafSpec("jax.Array", (3,), "uint32", 4, (3,), (3,), sharding="{}", extended_dtype="threefry2x32"),
)


def test_leaves_of_one_process_stand_behind_those_of_all() -> None:
    primary, other = plan_of(0, SPECS[:1]), plan_of(1, SPECS)
    assert announced_numbers(other).tolist() == [0, 2, 3, 4, 1]

    row = Written(4, (0,), 0, "ocdbt.process_1/d/a", 0, 16, 1)
    own = Written(1, (0, 0), 0, "ocdbt.process_1/d/a", 16, 12, 2)
    batch = WrittenBatch((), WrittenTable.of((row, own), other.specs))
    told = encoded_part([batch], announced_numbers(other), encoded_own(other, other.specs))
    part = decoded_part(told)
    found = joined(primary, primary.specs, {1: part.own}, default_handlers(entry_points=False))

    assert names(found.plan.infos) == [
        *names(primary.infos),
        *[f"it.process_1-of-2.x{at}" for at in range(3)],
    ]
    assert found.specs[3:] == list(SPECS)
    written = [(one.leaf, one.nbytes) for one in written_by(found.specs, {1: part}, found.places).parts()]
    assert written == [(2, 16), (3, 12)]


def test_changes_of_leaves_of_one_process_are_sent_to_all() -> None:
    other = plan_of(1, SPECS[:1])
    change = LeafChange(("quantise",), SHARED)
    other = replace(other, changes={1: change})
    part = decoded_part(encoded_part([], None, encoded_own(other, other.specs)))
    primary = plan_of(0, SPECS[:1])
    found = joined(primary, primary.specs, {1: part.own}, default_handlers(entry_points=False))

    assert found.plan.changes == {3: change}


def test_a_plan_without_leaves_of_one_process_stays_the_same() -> None:
    plan = plan_of(0, SPECS[:1])
    found = joined(plan, plan.specs, {1: []}, default_handlers(entry_points=False))

    assert found.plan is plan
    assert found.specs is plan.specs
    assert found.places[1].tolist() == [0, 2]


def test_the_lists_of_an_earlier_save_are_used_again_if_nothing_differs() -> None:
    plan, registry = plan_of(0, SPECS[:1]), default_handlers(entry_points=False)
    rows = encoded_own(plan_of(1, SPECS), plan_of(1, SPECS).specs)
    trees = JoinedTrees(BoundedCache(4))
    first = trees.of(plan, plan.specs, {1: rows}, registry)
    again = trees.of(replace(plan, digests={"a": b""}), plan.specs, {1: rows}, registry)
    other = trees.of(plan, plan.specs, {1: rows[:2]}, registry)

    assert again.specs is first.specs
    assert again.plan.infos is first.plan.infos
    assert again.plan.digests == {"a": b""}
    assert len(other.specs) == len(first.specs) - 1


@pytest.mark.parametrize("row", [{}, {"keys": ["x"], "kinds": [9], "stages": ()}, 7])
def test_what_is_no_leaf_is_refused(row: object) -> None:
    plan = plan_of(0, SPECS[:1])
    with pytest.raises(CoordinationError, match="cannot be read"), reading_part():
        joined(plan, plan.specs, {1: [row]}, default_handlers(entry_points=False))


def test_a_number_beyond_the_leaves_is_refused() -> None:
    plan = plan_of(0, SPECS[:1])
    written = WrittenTable.of([Written(2, (0,), 0, "a", 0, 16, 1)], plan.specs)
    part = decoded_part(encoded_part([WrittenBatch((), written)]))
    with pytest.raises(CoordinationError, match="not there"):
        written_by(plan.specs, {1: part}, {1: np.arange(2)})

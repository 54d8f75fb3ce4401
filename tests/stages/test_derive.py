from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from tests.stages.stage_rig import Rig, cancel_in, run_one, run_stages

from penstock.errors import IncompletePipelineError, PipelineError, StructureMismatchError, TreeDifference
from penstock.kernel import KeyKind, ParamInfo, RestoredBatch, RestorePlan
from penstock.kernel.messages import ComputedLeaf
from penstock.kernel.pipeline import FunctionStage
from penstock.stages import Derive
from penstock.testing import Hang, Operation

pytestmark = pytest.mark.anyio


def plan_of(*computed: ComputedLeaf, kept: Sequence[tuple[int, object]] = ()) -> RestorePlan:
    infos = [ParamInfo((str(at),), (KeyKind.MAPPING,), f"['{at}']") for at in range(10)]
    return RestorePlan(infos, list, kept=kept, computed=computed)


def making(index: int, *inputs: int, make: Callable[[Sequence[Any]], object] = sum) -> ComputedLeaf:
    return ComputedLeaf(index, inputs, make)


def batches(plan: RestorePlan | None, *groups: dict[int, Any]) -> list[RestoredBatch]:
    return [RestoredBatch(list(group.items()), plan) for group in groups]


async def derived(rig: Rig, *messages: RestoredBatch) -> list[RestoredBatch]:
    return await run_one(rig.restore_run(), Derive(), *messages)


def values_of(found: list[RestoredBatch]) -> dict[int, object]:
    pairs = [pair for batch in found for pair in batch.values]
    assert len(pairs) == len(dict(pairs))
    return dict(pairs)


async def test_values_are_made_as_soon_as_their_last_input_is_there(rig: Rig) -> None:
    plan = plan_of(making(1, 10, 11), making(2, 11), kept=[(3, "kept")])

    found = await derived(rig, *batches(plan, {0: "a", 10: 5}, {11: 7}))

    assert [dict(batch.values) for batch in found] == [{0: "a"}, {1: 12, 2: 7}, {3: "kept"}]


async def test_inputs_may_repeat_and_may_be_none(rig: Rig) -> None:
    plan = plan_of(making(0, 10, 10), making(1, 10), making(2))

    assert values_of(await derived(rig, *batches(plan, {10: 4}))) == {
        0: 8,
        1: 4,
        2: 0,
    }


async def test_derive_without_functions_passes_values_on(rig: Rig) -> None:
    assert values_of(await derived(rig, *batches(plan_of(), {0: 1}, {1: 2}))) == {
        0: 1,
        1: 2,
    }


async def test_what_is_kept_comes_though_nothing_is_read(rig: Rig) -> None:
    assert values_of(await derived(rig, *batches(plan_of(kept=[(0, None)]), {}))) == {0: None}


async def test_derive_without_a_plan_is_an_error_that_says_so(rig: Rig) -> None:
    with pytest.raises(PipelineError, match="pass on the `plan`"):
        await derived(rig, *batches(None, {0: 1}))


async def test_every_batch_it_yields_refers_to_the_plan(rig: Rig) -> None:
    plan = plan_of(making(1, 10), kept=[(3, "kept")])

    found = await derived(rig, *batches(plan, {0: "a"}, {10: 5}))

    assert [batch.plan for batch in found] == [plan] * 3


async def test_functions_run_in_a_thread_and_inputs_are_let_go_of(rig: Rig) -> None:
    class Value:
        alive = 0

        def __init__(self) -> None:
            Value.alive += 1

        def __del__(self) -> None:
            Value.alive -= 1

    threads: list[int] = []
    alive: list[int] = []

    def make(values: Sequence[Any]) -> object:
        threads.append(threading.get_ident())
        alive.append(Value.alive)
        return len(values)

    plan = plan_of(making(0, 10, 11, make=make), making(1, 10, make=make), making(2, 12, make=make))

    async def one_by_one(_: object) -> Any:
        for at in (10, 11, 12):
            yield RestoredBatch([(at, Value())], plan)

    await run_stages(rig.restore_run(), FunctionStage(one_by_one), Derive())

    assert threading.get_ident() not in threads
    assert alive[-1] == 1  # the others were no longer needed


async def test_what_does_not_fit_is_told_all_at_once(rig: Rig) -> None:
    def refuse(values: Sequence[Any]) -> object:
        return TreeDifference("rule", f"[{values[0]}]", "no")

    plan = plan_of(making(0, 10, make=refuse), making(1, 11, make=refuse))

    with pytest.raises(StructureMismatchError) as raised:
        await derived(rig, *batches(plan, {10: 1}, {11: 2}))

    assert [each.key_path for each in raised.value.differences] == ["[1]", "[2]"]


async def test_an_input_that_never_comes_is_an_error(rig: Rig) -> None:
    plan = plan_of(making(0, 10), making(1, 10, 11))

    with pytest.raises(IncompletePipelineError) as raised:
        await derived(rig, *batches(plan, {10: 1}))

    assert (raised.value.planned, raised.value.arrived, raised.value.key_path) == (2, 1, "['1']")


async def test_a_function_that_fails_fails_the_stage(rig: Rig) -> None:
    def fail(values: Sequence[Any]) -> object:
        raise ArithmeticError(values)

    plan = plan_of(making(0, 10, make=fail))

    with pytest.raises(ArithmeticError):
        await derived(rig, *batches(plan, {10: 1}))


@pytest.mark.parametrize("native", [False, True], ids=["scope", "task"])
async def test_cancelled_while_a_function_runs_it_waits_for_it(rig: Rig, native: bool) -> None:
    hang = Hang()

    def make(values: Sequence[Any]) -> object:
        hang.hold(Operation("make", ""))
        return 0

    plan = plan_of(making(0, 10, make=make))

    await cancel_in(hang, lambda: derived(rig, *batches(plan, {10: 1})), native=native)

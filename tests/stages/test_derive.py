from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from tests.stages.stage_rig import Rig, cancel_in, run_one, run_stages

from penstock.kernel.errors import IncompletePipelineError, StructureMismatchError, TreeDifference
from penstock.kernel.messages.restore import RestoredBatch
from penstock.kernel.messages.restore_options import Making, Recipe
from penstock.kernel.pipeline.run_context import Outline, RestoreRun
from penstock.kernel.pipeline.stage import FunctionStage
from penstock.kernel.protocols.leaf import KeyKind, ParamInfo
from penstock.stages.derive import Derive
from penstock.testing.hang_points import Hang, Operation

pytestmark = pytest.mark.anyio


def run_with(rig: Rig, *makings: Making, kept: Sequence[tuple[int, object]] = ()) -> RestoreRun:
    run = rig.restore_run()
    run.recipe = Recipe(kept, makings)
    infos = [ParamInfo((str(at),), (KeyKind.MAPPING,), f"['{at}']") for at in range(10)]
    run.outline = Outline(infos, list)
    return run


def making(index: int, *inputs: int, make: Callable[[Sequence[Any]], object] = sum) -> Making:
    return Making(index, inputs, make)


def batches(*groups: dict[int, Any]) -> list[RestoredBatch]:
    return [RestoredBatch(list(group.items())) for group in groups]


def values_of(found: list[RestoredBatch]) -> dict[int, object]:
    pairs = [pair for batch in found for pair in batch.values]
    assert len(pairs) == len(dict(pairs))
    return dict(pairs)


async def test_values_are_made_as_soon_as_their_last_input_is_there(rig: Rig) -> None:
    run = run_with(rig, making(1, 10, 11), making(2, 11), kept=[(3, "kept")])

    found = await run_one(run, Derive(), *batches({0: "a", 10: 5}, {11: 7}))

    assert [dict(batch.values) for batch in found] == [{0: "a"}, {1: 12, 2: 7}, {3: "kept"}]


async def test_inputs_may_repeat_and_may_be_none(rig: Rig) -> None:
    run = run_with(rig, making(0, 10, 10), making(1, 10), making(2))

    assert values_of(await run_one(run, Derive(), *batches({10: 4}))) == {0: 8, 1: 4, 2: 0}


async def test_without_a_recipe_values_pass(rig: Rig) -> None:
    assert values_of(await run_one(rig.restore_run(), Derive(), *batches({0: 1}, {1: 2}))) == {0: 1, 1: 2}


async def test_what_is_kept_comes_though_nothing_is_read(rig: Rig) -> None:
    assert values_of(await run_one(run_with(rig, kept=[(0, None)]), Derive())) == {0: None}


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

    run = run_with(rig, making(0, 10, 11, make=make), making(1, 10, make=make), making(2, 12, make=make))

    async def one_by_one(_: object) -> Any:
        for at in (10, 11, 12):
            yield RestoredBatch([(at, Value())])

    await run_stages(run, FunctionStage(one_by_one), Derive())

    assert threading.get_ident() not in threads
    assert alive[-1] == 1  # the others were needed no more


async def test_what_does_not_fit_is_told_all_at_once(rig: Rig) -> None:
    def refuse(values: Sequence[Any]) -> object:
        return TreeDifference("rule", f"[{values[0]}]", "no")

    run = run_with(rig, making(0, 10, make=refuse), making(1, 11, make=refuse))

    with pytest.raises(StructureMismatchError) as raised:
        await run_one(run, Derive(), *batches({10: 1}, {11: 2}))

    assert [each.key_path for each in raised.value.differences] == ["[1]", "[2]"]


async def test_an_input_that_never_comes_is_an_error(rig: Rig) -> None:
    with pytest.raises(IncompletePipelineError) as raised:
        await run_one(run_with(rig, making(0, 10), making(1, 10, 11)), Derive(), *batches({10: 1}))

    assert (raised.value.planned, raised.value.arrived, raised.value.key_path) == (2, 1, "['1']")


async def test_a_function_that_fails_fails_the_stage(rig: Rig) -> None:
    def fail(values: Sequence[Any]) -> object:
        raise ArithmeticError(values)

    with pytest.raises(ArithmeticError):
        await run_one(run_with(rig, making(0, 10, make=fail)), Derive(), *batches({10: 1}))


@pytest.mark.parametrize("native", [False, True], ids=["scope", "task"])
async def test_cancelled_while_a_function_runs_it_waits_for_it(rig: Rig, native: bool) -> None:
    hang = Hang()

    def make(values: Sequence[Any]) -> object:
        hang.hold(Operation("make", ""))
        return 0

    run = run_with(rig, making(0, 10, make=make))

    await cancel_in(hang, lambda: run_one(run, Derive(), *batches({10: 1})), native=native)

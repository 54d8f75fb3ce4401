from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests.stages.stage_rig import Rig, cancel_in, save_stages

from penstock.kernel import KeyPath, LeafBatch, TreeToSave, run_pipeline
from penstock.pipelines import save_pipeline
from penstock.stages import Flatten, Prioritise
from penstock.testing import Hang, Operation

pytestmark = pytest.mark.anyio

TREE = {
    "opt": [{"mu": np.ones(4, np.float32), "nu": np.ones(4, np.float32)}],
    "params": {"w": np.ones(4, np.float32), "b": np.ones(2, np.float32)},
    "step": 3,
}
NAMES = ["opt.0.mu", "opt.0.nu", "params.b", "params.w", "step"]


async def prioritised(rig: Rig, stage: Prioritise, tree: object = TREE) -> list[LeafBatch]:
    return await save_stages(rig.save_run(), tree, Flatten(), stage)


def names(batches: list[LeafBatch]) -> list[str]:
    return [leaf.info.name for batch in batches for leaf in batch.leaves]


async def test_the_prioritised_go_first_and_each_part_keeps_its_order(rig: Rig) -> None:
    batches = await prioritised(rig, Prioritise(lambda keys: keys[0] == "params" or keys[-1] == "nu"))

    assert names(batches) == ["opt.0.nu", "params.b", "params.w", "opt.0.mu", "step"]
    assert [batch.prioritised for batch in batches] == [True, False]


@pytest.mark.parametrize(
    ("patterns", "first"),
    [
        (("params.*",), ["params.b", "params.w"]),
        (("step", "*.mu"), ["opt.0.mu", "step"]),
        (("PARAMS.*",), []),
        (("params.[ab]",), ["params.b"]),
        (("*",), NAMES),
    ],
)
async def test_patterns_are_those_of_a_shell_over_the_dotted_name(
    rig: Rig, patterns: tuple[str, ...], first: list[str]
) -> None:
    batches = await prioritised(rig, Prioritise(patterns))

    assert names(batches) == [*first, *(name for name in NAMES if name not in first)]
    assert names([batch for batch in batches if batch.prioritised]) == first


async def test_the_function_sees_tuples_of_strings_and_not_in_the_event_loop(rig: Rig) -> None:
    seen: list[KeyPath] = []
    threads: set[int] = set()

    def first(keys: KeyPath) -> bool:
        seen.append(keys)
        threads.add(threading.get_ident())
        return False

    batches = await prioritised(rig, Prioritise(first))

    assert seen == [("opt", "0", "mu"), ("opt", "0", "nu"), ("params", "b"), ("params", "w"), ("step",)]
    assert threading.get_ident() not in threads
    assert names(batches) == NAMES


async def test_batches_are_bounded_again_and_never_mix_the_two_parts(rig: Rig) -> None:
    rig.limits = replace(rig.limits, batch_leaves=2)

    batches = await prioritised(rig, Prioritise(("opt.*", "step")))

    assert [[leaf.info.name for leaf in batch.leaves] for batch in batches] == [
        ["opt.0.mu", "opt.0.nu"],
        ["step"],
        ["params.b", "params.w"],
    ]
    assert [batch.prioritised for batch in batches] == [True, True, False]


async def test_with_nothing_to_prioritise_batches_pass_as_they_come(rig: Rig) -> None:
    rig.limits = replace(rig.limits, batch_leaves=1)
    stage = Prioritise()
    batch: LeafBatch = LeafBatch(())

    async with stage.open(rig.save_run()) as actor:
        result: Any = actor(batch)
        assert await result is batch

    assert names(await prioritised(rig, stage)) == NAMES


async def test_a_function_that_raises_fails_the_stage_with_its_own_error(rig: Rig) -> None:
    def first(keys: KeyPath) -> bool:
        raise LookupError(keys[0])

    with pytest.raises(LookupError) as raised:
        await prioritised(rig, Prioritise(first))

    assert raised.value.args == ("opt",)
    assert raised.value.__notes__ == ["in stage 's1'"]


async def test_cancelled_midway_it_ends_when_the_function_does(rig: Rig) -> None:
    hang = Hang()

    def first(keys: KeyPath) -> bool:
        if keys[-1] == "nu":
            hang.hold(Operation("first", "nu"))
        return False

    await cancel_in(hang, lambda: prioritised(rig, Prioritise(first)))


async def test_the_prioritised_are_staged_first_and_completely(rig: Rig) -> None:
    # The budget holds two pieces, and each leaf has many: other leaves must wait for the prioritised ones.
    rig.limit(512, piece=256)
    rig.limits = replace(rig.limits, batch_leaves=2, batch_bytes=700)
    tree = {name: np.full(300, at, np.uint8) for at, name in enumerate("abcdefgh")} | {
        "large": np.zeros(3000, np.uint8)
    }
    handler = rig.scripted(np.ndarray)
    pipeline = save_pipeline().configure("prioritise", first=lambda keys: keys[0] in {"g", "large", "c"})

    await run_pipeline(pipeline, rig.save_run(), TreeToSave(tree))

    taken = handler.names("take")
    assert list(dict.fromkeys(taken)) == ["c", "g", "large", "a", "b", "d", "e", "f", "h"]
    assert sorted(taken, key=list(dict.fromkeys(taken)).index) == taken
    assert rig.memory.statistics().peak <= 512

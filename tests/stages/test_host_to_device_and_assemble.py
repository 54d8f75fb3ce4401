from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from anyio import create_task_group
from anyio.lowlevel import checkpoint
from tests.stages.stage_rig import Rig, cancel_in, feed, run_one, run_stages

from penstock.errors import IncompletePipelineError, PipelineError
from penstock.kernel import (
    HostBatch,
    KeyKind,
    LeafSpec,
    ParamInfo,
    ReadLeaf,
    RestoredBatch,
    RestoredTree,
    RestorePlan,
    StoredLeaf,
)
from penstock.kernel.pipeline import FunctionStage
from penstock.kernel.protocols import PartOf
from penstock.stages import Assemble, HostToDevice
from penstock.stages.pytree.flattening import nest
from penstock.testing import Hang, Operation

pytestmark = pytest.mark.anyio

S, M = KeyKind.SEQUENCE, KeyKind.MAPPING


class Builder:
    """A handler whose values are strings. It can fail or hang at a leaf, and is not hashable."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, name: str, *, failing: int = -1, hang: Hang | None = None) -> None:
        self.name = name
        self.calls: list[list[int]] = []
        self.threads: set[int] = set()
        self._failing = failing
        self._hang = hang

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Builder)

    def build(self, leaves: Sequence[ReadLeaf]) -> Sequence[Any]:
        self.calls.append([leaf.index for leaf in leaves])
        self.threads.add(threading.get_ident())
        if self._hang is not None:
            self._hang.hold(Operation("build", self.name))
        if self._failing in self.calls[-1]:
            raise ArithmeticError(self.name)

        return [f"{self.name}{leaf.index}" for leaf in leaves]


class Joiner(Builder):
    """A handler that takes leaves in parts."""

    def __init__(self) -> None:
        super().__init__("j")
        self.placed: list[int] = []

    def parts(self, *_: Any, **__: Any) -> Sequence[Any]:
        raise NotImplementedError

    def place(self, part: ReadLeaf) -> None:
        self.placed.append(part.index)

    def join(self, part: ReadLeaf) -> Any:
        assert part.part is not None
        return f"{part.part.index}: {sorted(self.placed)}"


def leaf_of(index: int, handler: Any) -> ReadLeaf:
    info = ParamInfo((str(index),), (S,), f"[{index}]")
    return ReadLeaf(index, StoredLeaf(info, LeafSpec("t")), handler)


async def test_a_leaf_is_made_once_when_the_last_of_its_parts_is_in_its_place(rig: Rig) -> None:
    handler = Joiner()
    leases = [await rig.memory.acquire(10) for _ in range(3)]
    parts = [replace(leaf_of(-1 - at, handler), part=PartOf(7, at, 3)) for at in range(3)]
    batches = [HostBatch((parts[at],), staged=leases[at]) for at in (2, 0, 1)]

    (made,) = await run_one(rig.restore_run(), HostToDevice(), *batches)

    assert made.values == [(7, "7: [-3, -2, -1]")]
    assert rig.memory.statistics().leased == 0


async def test_each_handler_builds_its_leaves_in_one_call_in_a_thread(rig: Rig) -> None:
    a, b = Builder("a"), Builder("b")
    leaves = tuple(leaf_of(at, (a, b)[at % 2]) for at in range(5))

    (batch,) = await run_one(rig.restore_run(), HostToDevice(), HostBatch(leaves, ((7, "ready"),)))

    assert dict(batch.values) == {0: "a0", 1: "b1", 2: "a2", 3: "b3", 4: "a4", 7: "ready"}
    assert (a.calls, b.calls) == ([[0, 2, 4]], [[1, 3]])
    assert threading.get_ident() not in a.threads


async def test_leases_are_given_back_once_the_values_are_built(rig: Rig) -> None:
    leases = [await rig.memory.acquire(10) for _ in range(3)]
    leased: list[int] = []

    async def look(batch: RestoredBatch) -> RestoredBatch:
        leased.append(rig.memory.statistics().leased)
        return batch

    batches = [HostBatch((leaf_of(at, Builder("a")),), staged=lease) for at, lease in enumerate(leases)]
    await run_stages(rig.restore_run(), feed(batches[:1]), HostToDevice(), FunctionStage(look))

    assert leased == [20]
    for lease in leases:
        lease.release()


async def test_a_build_that_fails_fails_the_stage_and_gives_back_every_lease(rig: Rig) -> None:
    handler = Builder("a", failing=1)
    batches = [HostBatch((leaf_of(at, handler),), staged=await rig.memory.acquire(10)) for at in range(3)]

    with pytest.raises(ArithmeticError):
        await run_one(rig.restore_run(), HostToDevice(), *batches[:2])

    batches[2].release()


@pytest.mark.parametrize("native", [False, True], ids=["scope", "task"])
async def test_cancelled_while_it_builds_it_gives_back_its_leases(rig: Rig, native: bool) -> None:
    hang = Hang()
    lease = await rig.memory.acquire(10)
    batch = HostBatch((leaf_of(0, Builder("a", hang=hang)),), staged=lease)

    await cancel_in(hang, lambda: run_one(rig.restore_run(), HostToDevice(), batch), native=native)


async def test_the_bytes_are_held_while_the_values_are_built(rig: Rig) -> None:
    hang = Hang()
    lease = await rig.memory.acquire(10)
    batch = HostBatch((leaf_of(0, Builder("a", hang=hang)),), staged=lease)
    leased: list[int] = []

    async def work() -> None:
        await run_one(rig.restore_run(), HostToDevice(), batch)

    async def look() -> None:
        await hang.wait_reached()
        leased.append(rig.memory.statistics().leased)
        hang.release()

    async with create_task_group() as tasks:
        tasks.start_soon(work)
        tasks.start_soon(look)

    assert leased == [10]


# Assemble


def plan_of(*names: str, unflatten: Any = list) -> RestorePlan:
    infos = [ParamInfo((name,), (M,), f"['{name}']") for name in names]
    return RestorePlan(infos, unflatten)


async def assembled(rig: Rig, plan: RestorePlan, *groups: list[tuple[int, object]]) -> object:
    batches = [RestoredBatch(group, plan) for group in groups]
    (restored,) = await run_one(rig.restore_run(), Assemble(), *batches)
    assert isinstance(restored, RestoredTree)
    assert restored.plan is plan
    return restored.tree


async def test_values_are_put_together_whatever_order_they_come_in(rig: Rig) -> None:
    plan = plan_of("a", "b", "c", "d")

    tree = await assembled(rig, plan, [(3, "d"), (1, "b")], [], [(0, "a"), (2, "c")])

    assert tree == ["a", "b", "c", "d"]


async def test_a_tree_without_leaves_is_a_tree(rig: Rig) -> None:
    assert await assembled(rig, plan_of(), []) == []


async def test_without_a_plan_it_says_what_is_missing(rig: Rig) -> None:
    with pytest.raises(PipelineError, match="pass on the `plan`"):
        await run_one(rig.restore_run(), Assemble(), RestoredBatch([(0, 1)]))


async def test_a_plan_that_one_batch_brings_is_enough(rig: Rig) -> None:
    batches = [RestoredBatch([(0, 1)]), RestoredBatch([(1, 2)], plan_of("a", "b")), RestoredBatch([])]

    (restored,) = await run_one(rig.restore_run(), Assemble(), *batches)

    assert restored.tree == [1, 2]


async def test_a_value_that_did_not_arrive_is_named(rig: Rig) -> None:
    with pytest.raises(IncompletePipelineError) as raised:
        await assembled(rig, plan_of("a", "b", "c"), [(0, 1), (2, 3)])

    assert (raised.value.planned, raised.value.arrived, raised.value.key_path) == (3, 2, "['b']")
    assert raised.value.stage == "x"


async def test_none_is_a_value_that_arrived(rig: Rig) -> None:
    assert await assembled(rig, plan_of("a"), [(0, None)]) == [None]


async def test_a_class_that_refuses_its_children_fails_the_stage_with_its_own_error(rig: Rig) -> None:
    def refuse(values: Sequence[object]) -> object:
        raise ArithmeticError(values)

    with pytest.raises(ArithmeticError):
        await assembled(rig, plan_of("a", unflatten=refuse), [(0, 1)])


@pytest.mark.parametrize("native", [False, True], ids=["scope", "task"])
async def test_cancelled_while_it_assembles_it_ends_when_the_thread_does(rig: Rig, native: bool) -> None:
    hang = Hang()

    def slow(values: Sequence[object]) -> object:
        hang.hold(Operation("unflatten", ""))
        return values

    plan = plan_of("a", unflatten=slow)
    await cancel_in(hang, lambda: assembled(rig, plan, [(0, 1)]), native=native)


async def test_cancelled_between_messages_it_forgets_them(rig: Rig) -> None:
    async def fail(_: object) -> Any:
        yield RestoredBatch([(0, 1)], plan_of("a"))
        await checkpoint()
        raise ArithmeticError

    with pytest.raises(ArithmeticError):
        await run_stages(rig.restore_run(), FunctionStage(fail), Assemble())


# Nesting without a target


def info(*keys: str | int) -> ParamInfo:
    kinds = tuple(S if isinstance(key, int) else M for key in keys)
    return ParamInfo(tuple(map(str, keys)), kinds, "")


@pytest.mark.parametrize(
    ("paths", "tree"),
    [
        ([()], 0),
        ([("a",), ("b",)], {"a": 0, "b": 1}),
        ([(0,), (1,)], [0, 1]),
        ([(1,), (0,)], [1, 0]),
        ([(0,), (2,)], {"0": 0, "2": 1}),
        ([("0",), ("1",)], {"0": 0, "1": 1}),
        ([("a", 0, "x"), ("a", 1), ("b",)], {"a": [{"x": 0}, 1], "b": 2}),
        ([(at,) for at in range(11)], list(range(11))),
        ([("a", 0), ("a", "k")], {"a": {"0": 0, "k": 1}}),
        ([], {}),
    ],
)
def test_values_are_nested_by_their_key_paths(paths: list[tuple[str | int, ...]], tree: object) -> None:
    assert nest([info(*keys) for keys in paths], range(len(paths))) == tree

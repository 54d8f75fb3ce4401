from __future__ import annotations

import gc
import weakref
from collections import OrderedDict
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import anyio
import equinox as eqx
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from anyio.lowlevel import checkpoint
from flax import core
from tests.stages.stage_rig import Gather, Rig, cancel_in, save_stages

from penstock.errors import DeletedLeafError, DuplicateNameError, InvalidLeafError, NoHandlerError
from penstock.kernel import KeyKind, Leaf, LeafBatch, Pipeline, Slot, TreeToSave, run_pipeline
from penstock.kernel.pipeline import FunctionStage
from penstock.stages import Flatten, Prioritise

pytestmark = pytest.mark.anyio

S, M = KeyKind.SEQUENCE, KeyKind.MAPPING
frozen: Any = core.FrozenDict


class Point(NamedTuple):
    x: Any
    y: Any


@jax.tree_util.register_dataclass
@dataclass
class Registered:
    weight: Any


@flax.struct.dataclass
class Structure:
    params: Any
    step: Any = 0
    name: str = cast("Any", flax.struct).field(pytree_node=False, default="not a leaf")


class Pair:
    """Registered without key names."""

    def __init__(self, a: Any, b: Any) -> None:
        self.a, self.b = a, b


class Labelled(Pair):
    """Registered with its own key names."""


class Label:
    """Compares by value, and so is not hashable."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, text: str) -> None:
        self.text = text

    def __str__(self) -> str:
        return self.text

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Label) and self.text == other.text


jax.tree_util.register_pytree_node(Pair, lambda pair: ((pair.a, pair.b), None), lambda _, kids: Pair(*kids))
jax.tree_util.register_pytree_with_keys(
    Labelled,
    lambda pair: (((Label("left"), pair.a), (Label("right"), pair.b)), None),
    lambda _, kids: Labelled(*kids),
)


class Linear(eqx.Module):
    weight: jax.Array
    size: int = eqx.field(static=True)


def array(*shape: int) -> np.ndarray[Any, Any]:
    return np.ones(shape, np.float32)


async def flattened(rig: Rig, tree: object) -> list[LeafBatch]:
    return await save_stages(rig.save_run(), tree, Flatten())


async def leaves_of(rig: Rig, tree: object) -> list[Leaf]:
    return [leaf for batch in await flattened(rig, tree) for leaf in batch.leaves]


@pytest.mark.parametrize(
    ("tree", "keys", "kinds"),
    [
        ({"b": 1, "a": 2}, [("a",), ("b",)], [(M,), (M,)]),
        (OrderedDict(b=1, a=2), [("b",), ("a",)], [(M,), (M,)]),
        ([1, 2], [("0",), ("1",)], [(S,), (S,)]),
        ((1, [2]), [("0",), ("1", "0")], [(S,), (S, S)]),
        (Point(1, 2), [("x",), ("y",)], [(M,), (M,)]),
        (Registered(1), [("weight",)], [(M,)]),
        (Structure({"w": 1}), [("params", "w"), ("step",)], [(M, M), (M,)]),
        (Linear(jnp.ones(2), 3), [("weight",)], [(M,)]),
        (Pair(1, 2), [("0",), ("1",)], [(S,), (S,)]),
        (Labelled(1, 2), [("left",), ("right",)], [(M,), (M,)]),
        (frozen({}), [], []),
        (frozen({"a": frozen({"b": 1})}), [("a", "b")], [(M, M)]),
        ({"a": {}, "b": [(), None], "c": 1}, [("a",), ("b", "0"), ("b", "1"), ("c",)], None),
        ({1: 1.0}, [("1",)], [(M,)]),
        ({True: 1.0}, [("True",)], [(M,)]),
        ({1.0: 1.0}, [("1.0",)], [(M,)]),
        (3, [()], [()]),
        ({}, [()], [()]),
        (None, [()], [()]),
        (
            optax.adam(1e-3).init({"w": jnp.ones(2)}),
            [("0", "count"), ("0", "mu", "w"), ("0", "nu", "w"), ("1",)],
            None,
        ),
    ],
    ids=lambda case: type(case).__name__,
)
async def test_a_leaf_is_named_by_the_keys_to_it(
    rig: Rig, tree: object, keys: list[tuple[str, ...]], kinds: list[tuple[KeyKind, ...]] | None
) -> None:
    leaves = await leaves_of(rig, tree)

    assert [leaf.info.keys for leaf in leaves] == keys
    assert [leaf.index for leaf in leaves] == list(range(len(keys)))
    if kinds is not None:
        assert [leaf.info.kinds for leaf in leaves] == kinds


async def test_a_leaf_says_where_it_stands_and_who_handles_it(rig: Rig) -> None:
    (leaf,) = await leaves_of(rig, {"opt": (Point(array(3), None).x,)})

    assert leaf.info.key_path == "['opt'][0]"
    assert leaf.spec.typestr == leaf.handler.typestr == "np.ndarray"
    assert leaf.nbytes == 12


async def test_what_is_planned_is_counted_before_the_first_leaf_goes_on(rig: Rig) -> None:
    run = rig.save_run()
    (batch,) = await save_stages(run, {"a": array(4), "b": array(2), "n": None}, Flatten())

    assert [info.name for info in batch.plan.infos] == ["a", "b", "n"]
    assert [spec.nbytes for spec in batch.plan.specs] == [16, 8, 0]
    progress = run.progress.snapshot()
    assert (progress.leaves_total, progress.bytes_total) == (3, 24)


async def test_a_tree_without_a_leaf_is_an_empty_batch_with_its_plan(rig: Rig) -> None:
    (batch,) = await flattened(rig, cast("Any", core).FrozenDict({}))

    assert batch.leaves == ()
    assert batch.plan is not None
    assert list(batch.plan.infos) == []


async def test_batches_are_bounded_by_leaves(rig: Rig) -> None:
    rig.limits = replace(rig.limits, batch_leaves=3)

    batches = await flattened(rig, [1] * 7)

    assert [[leaf.index for leaf in batch.leaves] for batch in batches] == [[0, 1, 2], [3, 4, 5], [6]]


async def test_batches_are_bounded_by_bytes_and_a_large_leaf_goes_alone(rig: Rig) -> None:
    rig.limits = replace(rig.limits, batch_bytes=16)

    batches = await flattened(rig, [array(2), array(2), array(1), array(9), array(4), None, array(1)])

    assert [[leaf.index for leaf in batch.leaves] for batch in batches] == [[0, 1], [2], [3], [4, 5], [6]]


def deleted() -> jax.Array:
    gone = jnp.ones(3)
    gone.delete()
    return gone


@pytest.mark.parametrize(
    ("bad", "error", "key_path"),
    [
        (object(), NoHandlerError, "['bad']"),
        (np.array([object()]), InvalidLeafError, "['bad']"),
        (deleted(), DeletedLeafError, "['bad']"),
        ({"x": 1, "y": {1, 2}}, NoHandlerError, "['bad']['y']"),
        (cast("Any", jax).ShapeDtypeStruct((2,), np.float32), InvalidLeafError, "['bad']"),
        (2**70, InvalidLeafError, "['bad']"),
    ],
    ids=["object", "object-array", "deleted", "set", "abstract", "large-int"],
)
async def test_a_bad_leaf_is_an_error_before_anything_is_written(
    rig: Rig, bad: object, error: type[Exception], key_path: str
) -> None:
    rig.limits = replace(rig.limits, batch_leaves=1)
    with pytest.raises(error) as raised:
        await flattened(rig, {"a": array(3), "bad": bad, "c": array(3)})

    assert getattr(raised.value, "key_path", None) == key_path
    assert getattr(raised.value, "stage", None) == "s0"
    assert rig.operations == ["kind", "check_writable"]  # a look at the destination
    assert list(rig.root.iterdir()) == []


async def test_two_leaves_of_one_name_are_an_error(rig: Rig) -> None:
    with pytest.raises(DuplicateNameError) as raised:
        await flattened(rig, {"a": {"b": 1}, "a.b": 2})

    assert (raised.value.first, raised.value.second) == ("['a']['b']", "['a.b']")
    assert list(rig.root.iterdir()) == []


async def test_a_handler_that_fails_to_describe_a_leaf_fails_the_stage(rig: Rig) -> None:
    error = rig.scripted(np.ndarray).fail("describe", "b")

    with pytest.raises(ArithmeticError) as raised:
        await flattened(rig, {"a": array(1), "b": array(1), "c": array(1)})

    assert raised.value is error


@pytest.mark.parametrize("native", [False, True], ids=["scope", "task"])
async def test_cancelled_midway_it_ends_when_the_thread_does(rig: Rig, native: bool) -> None:
    hang = rig.scripted(np.ndarray).hang("describe", "b")

    await cancel_in(hang, lambda: flattened(rig, {"a": array(1), "b": array(1)}), native=native)

    assert list(rig.root.iterdir()) == []


@pytest.mark.parametrize("stages", [[], [Prioritise(("b", "c"))]], ids=["flatten", "prioritise"])
async def test_a_leaf_that_was_passed_on_is_not_kept_alive_by_those_that_wait(
    rig: Rig, stages: list[Any]
) -> None:
    rig.limits = replace(rig.limits, batch_leaves=1)
    values = {name: jnp.full(3, ord(name)) for name in "abcdefgh"}
    references = {name: weakref.ref(value) for name, value in values.items()}
    seen: list[str] = []

    async def count_alive(batch: LeafBatch) -> str:
        name = batch.leaves[0].info.name
        del batch
        most = max(8 - len(seen), 1)  # this one, and those that are still waiting
        with anyio.fail_after(20):  # a worker thread drops its last call some time after it has returned
            while sum(reference() is not None for reference in references.values()) > most:
                gc.collect(0)
                await checkpoint()

        seen.append(name)
        return name

    every = [Flatten(), *stages, FunctionStage(count_alive), Gather()]
    pipeline = Pipeline(tuple(Slot(f"s{at}", stage) for at, stage in enumerate(every)))
    message = TreeToSave(values)
    del values
    await run_pipeline(pipeline, rig.save_run(), message)

    assert sorted(seen) == list("abcdefgh")

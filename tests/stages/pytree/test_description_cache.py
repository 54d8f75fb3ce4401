"""A tree that is saved again is not described again, unless it has changed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding
from tests.stages.stage_rig import Rig, save_stages

from penstock.errors import DeletedLeafError
from penstock.handlers import NumpyHandler
from penstock.handlers.formats.orbax.orbax_layout import EncodedTree, OrbaxLayout
from penstock.kernel import KeyKind, Leaf, LeafHandler, LeafSpec, ParamInfo
from penstock.kernel.messages import Leaves
from penstock.kernel.pipeline import RunCaches
from penstock.stages import Commit, DeviceToHost, Finalize, Flatten, Write

pytestmark = pytest.mark.anyio


@dataclass
class Described:
    """Records the values that it describes anew."""

    inner: NumpyHandler = field(default_factory=NumpyHandler)
    seen: list[str] = field(default_factory=list[str])

    def describe(
        self, values: Sequence[Any], infos: Sequence[ParamInfo], known: dict[Any, LeafSpec]
    ) -> Sequence[LeafSpec]:
        specs: list[LeafSpec] = []
        for value, info in zip(values, infos, strict=True):
            n_known = len(known)
            specs += self.inner.describe([value], [info], known)
            if len(known) > n_known:
                self.seen.append(info.name)

        return specs

    def __post_init__(self) -> None:
        self.typestr = self.inner.typestr
        self.pieces, self.targets, self.build = self.inner.pieces, self.inner.targets, self.inner.build


async def flattened(rig: Rig, caches: RunCaches, tree: object) -> list[Leaf]:
    run = rig.save_run()
    run.caches = caches
    batches = await save_stages(run, tree, Flatten())
    return [leaf for batch in batches for leaf in batch.leaves]


TREE: dict[str, Any] = {
    "a": np.zeros(3, np.int8),
    "b": [jnp.zeros(4), jnp.ones((2, 2), jnp.bfloat16)],
    "n": None,
}
CHANGED: list[dict[str, Any]] = [
    {**TREE, "a": np.zeros(4, np.int8)},
    {**TREE, "a": np.zeros(3, np.uint8)},
    {**TREE, "a": jnp.zeros(3, jnp.int8)},
    {**TREE, "a": 3},
    {**TREE, "b": [jnp.zeros(4), jnp.ones((4, 1), jnp.bfloat16)]},
    {**TREE, "b": [jax.device_put(np.zeros(4), SingleDeviceSharding(jax.devices()[1])), TREE["b"][1]]},
    {**TREE, "n": {}},
    {**TREE, "n": "text"},
    {**TREE, "c": 1},
    {"a": TREE["a"], "c": TREE["b"], "n": None},
    {"a": TREE["a"], "b": tuple(TREE["b"]), "n": None},
]


async def test_what_is_saved_again_is_the_very_same_plan(rig: Rig) -> None:
    caches = RunCaches()
    first = await flattened(rig, caches, TREE)
    again = await flattened(rig, caches, jax.tree.map(lambda leaf: leaf + 1, TREE))

    assert all(one.spec is other.spec for one, other in zip(first, again, strict=True))
    assert [leaf.info for leaf in again] == [leaf.info for leaf in first]
    assert all(leaf.without_value().value is None for leaf in first)
    values: Any = again[0].value
    assert values.tolist() == [1, 1, 1]  # the current values


@pytest.mark.parametrize("tree", CHANGED, ids=range(len(CHANGED)))
async def test_a_changed_tree_is_planned_as_if_it_were_the_first(rig: Rig, tree: dict[str, Any]) -> None:
    caches = RunCaches()
    await flattened(rig, caches, TREE)

    after = await flattened(rig, caches, tree)

    fresh = await flattened(rig, RunCaches(), tree)
    assert [(leaf.info, leaf.spec) for leaf in after] == [(leaf.info, leaf.spec) for leaf in fresh]
    assert [type(leaf.handler) for leaf in after] == [type(leaf.handler) for leaf in fresh]
    back = await flattened(rig, caches, TREE)
    assert [leaf.spec for leaf in back] == [leaf.spec for leaf in await flattened(rig, RunCaches(), TREE)]


async def test_only_what_changed_is_described(rig: Rig) -> None:
    caches = RunCaches()
    handler = Described()
    rig.registry = rig.registry.copy()
    rig.registry.register(np.ndarray, cast("Any", handler), override=True)
    tree = {"a": np.zeros(1), "b": np.zeros(2), "c": np.zeros(3), "d": np.zeros(3)}

    await flattened(rig, caches, tree)
    assert handler.seen == ["a", "b", "c"]
    await flattened(rig, caches, {**tree, "b": np.ones(2)})
    assert handler.seen == ["a", "b", "c"]
    await flattened(rig, caches, {**tree, "b": np.zeros(4)})
    assert handler.seen == ["a", "b", "c", "b"]


async def test_a_deleted_array_is_found_though_its_plan_is_known(rig: Rig) -> None:
    caches = RunCaches()
    array = jnp.ones(3)
    await flattened(rig, caches, {"a": array})
    array.delete()

    with pytest.raises(DeletedLeafError, match=r"\['a'\]"):
        await flattened(rig, caches, {"a": array})


async def test_another_handler_for_a_type_makes_another_plan(rig: Rig) -> None:
    caches = RunCaches()
    before = await flattened(rig, caches, TREE)
    rig.scripted(np.ndarray)

    after = await flattened(rig, caches, TREE)

    handlers: list[LeafHandler | object] = [leaf.handler for leaf in after]
    assert handlers[0] is not before[0].handler
    assert after[0].without_value().handler is handlers[0]


async def test_documents_of_the_same_tree_differ_only_in_what_changed(rig: Rig) -> None:
    def content() -> dict[str, bytes]:
        files = [path for path in rig.final.rglob("*") if path.is_file() and path.parent.name != "d"]
        return {str(path.relative_to(rig.final)): path.read_bytes() for path in files}

    found: list[dict[str, bytes]] = []
    for _ in range(2):
        run = rig.save_run(overwrite=True)
        run.caches = rig.caches
        await save_stages(run, TREE, Flatten(), DeviceToHost(), Write(), Commit(), Finalize())
        found.append(content())

    differ = {name for name in found[0] if found[0][name] != found[1][name]}
    assert differ == {"_CHECKPOINT_METADATA", "_PENSTOCK_INTEGRITY", "commit_success.txt", "manifest.ocdbt"}


def test_encoded_trees_are_told_by_identity_and_bounded() -> None:
    spec = LeafSpec("np.ndarray", (2,), "int8", 1, (2,))
    tree = Leaves(range(1), [spec], None, [ParamInfo(("a",), (KeyKind.MAPPING,), "a")], {})
    layout = OrbaxLayout()

    def encoded(leaves: Leaves) -> EncodedTree:
        return layout.tree(leaves, None)

    first = encoded(tree)
    assert encoded(replace(tree)) is first
    assert encoded(replace(tree, specs=[spec])) is not first
    assert encoded(replace(tree, specs=[spec])) is not first
    assert encoded(tree) is not first

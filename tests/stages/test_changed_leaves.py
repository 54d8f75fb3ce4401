"""Stages that change leaves on the way: what they declare is planned, and what they do not is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import penstock
from penstock.handlers.formats.safetensors.safetensors_layout import SafetensorsLayout
from penstock.kernel.errors import ChangedLeafError, PenstockError, PipelineError
from penstock.kernel.messages.save import Leaf, LeafBatch, Pack, Piece, StagedBatch
from penstock.kernel.pipeline.pipeline import Pipeline
from penstock.pipelines import save_pipeline

pytestmark = pytest.mark.anyio

LARGE = 300_000  # elements: more bytes than a piece has
TREE = {"small": np.arange(5, dtype=np.float32), "large": jnp.arange(LARGE, dtype=jnp.float32) % 999, "n": 3}


def cast(leaf: Leaf, dtype: str) -> Leaf:
    if leaf.spec.dtype != "float32":
        return leaf

    value: Any = leaf.value
    spec = replace(leaf.spec, dtype=dtype, itemsize=np.dtype(dtype).itemsize)
    return replace(leaf, value=None if value is None else value.astype(dtype), spec=spec)


def cast_leaves(dtype: str) -> Any:
    """A stage behind `flatten` that casts values, and says so in the leaves' specs alone."""

    async def cast_leaves(batch: LeafBatch[Leaf]) -> LeafBatch[Leaf]:
        return replace(batch, leaves=tuple(cast(leaf, dtype) for leaf in batch.leaves))

    return cast_leaves


def cast_bytes(dtype: str, *, with_spec: bool) -> Any:
    """A stage behind `device_to_host` that casts the bytes."""

    def as_dtype(data: memoryview) -> memoryview:
        return memoryview(np.frombuffer(data, np.float32).astype(dtype).tobytes())

    def piece(whole: Piece) -> Piece:
        if whole.leaf.spec.dtype != "float32":
            return whole

        leaf = cast(whole.leaf, dtype) if with_spec else whole.leaf
        start = whole.start // 4 * leaf.spec.itemsize
        return replace(whole, leaf=leaf, start=start, data=as_dtype(whole.data))

    def pack(whole: Pack) -> Pack:
        if any(leaf.spec.dtype != "float32" for leaf in whole.leaves):
            return whole

        leaves = tuple(cast(leaf, dtype) if with_spec else leaf for leaf in whole.leaves)
        return Pack(leaves, as_dtype(whole.data))

    async def cast_bytes(batch: StagedBatch) -> StagedBatch:
        return replace(
            batch,
            leaves=tuple(cast(leaf, dtype) if with_spec else leaf for leaf in batch.leaves),
            pieces=tuple(map(piece, batch.pieces)),
            packs=tuple(map(pack, batch.packs)),
        )

    return cast_bytes


async def refused(path: Path, pipeline: Pipeline[Any], tree: object = TREE, **options: Any) -> PenstockError:
    """Save, and return what that is refused with; nothing is published, and nothing held."""
    async with penstock.Checkpointer(memory_limit="16MiB", **options) as checkpointer:
        with pytest.raises(PenstockError) as raised:
            await (await checkpointer.save(path, tree, pipeline=pipeline))

        assert checkpointer.statistics().leased == 0

    assert list(path.parent.iterdir()) == []
    return raised.value


LAYOUTS = pytest.mark.parametrize("layout", [None, SafetensorsLayout()], ids=["orbax", "safetensors"])


@LAYOUTS
@pytest.mark.parametrize("dtype", ["int32", "float16"])
async def test_an_undeclared_cast_after_flatten_is_refused(tmp_path: Path, layout: Any, dtype: str) -> None:
    pipeline = save_pipeline(layout).insert_after("flatten", cast_leaves(dtype))
    options = {} if layout is None else {"layout": layout}

    error = await refused(tmp_path / "c", pipeline, **options)

    assert isinstance(error, ChangedLeafError)
    assert error.key_path in {"['large']", "['small']"}
    assert "float32" in error.planned
    assert dtype in error.found


@LAYOUTS
@pytest.mark.parametrize("with_spec", [True, False], ids=["with its spec", "bytes alone"])
async def test_an_undeclared_cast_of_staged_bytes_is_refused(
    tmp_path: Path, layout: Any, with_spec: bool
) -> None:
    pipeline = save_pipeline(layout).insert_after(
        "device_to_host", cast_bytes("float16", with_spec=with_spec)
    )
    options = {} if layout is None else {"layout": layout}

    for number, name in enumerate(("small", "large")):
        error = await refused(tmp_path / str(number), pipeline, {name: TREE[name]}, **options)
        assert error.key_path == f"['{name}']"


async def test_a_value_of_another_shape_is_refused_though_it_has_as_many_bytes(tmp_path: Path) -> None:
    async def transpose(batch: LeafBatch[Leaf]) -> LeafBatch[Leaf]:
        return replace(batch, leaves=tuple(_transposed(leaf) for leaf in batch.leaves))

    pipeline = save_pipeline().insert_after("flatten", transpose)
    error = await refused(tmp_path / "c", pipeline, {"a": np.ones((2, 3))})

    assert isinstance(error, ChangedLeafError)
    assert (error.key_path, error.stage) == ("['a']", "device_to_host")


def _transposed(leaf: Leaf) -> Leaf:
    value: Any = leaf.value
    return replace(leaf, value=value.T)


async def test_a_value_of_the_same_shape_and_dtype_may_take_the_place_of_another(tmp_path: Path) -> None:
    async def double(batch: LeafBatch[Leaf]) -> LeafBatch[Leaf]:
        doubled: list[Leaf] = []
        for leaf in batch.leaves:
            value: Any = leaf.value
            doubled.append(replace(leaf, value=value * 2))

        return replace(batch, leaves=tuple(doubled))

    async with penstock.Checkpointer() as checkpointer:
        pipeline = save_pipeline().insert_after("flatten", double)
        await (await checkpointer.save(tmp_path / "c", TREE, pipeline=pipeline))
        found = await checkpointer.restore(tmp_path / "c")

    np.testing.assert_array_equal(found["large"], 2 * np.asarray(TREE["large"]))
    assert found["n"] == 6


async def test_a_stage_that_leaves_the_plan_out_is_told(tmp_path: Path) -> None:
    async def forget(batch: StagedBatch) -> StagedBatch:
        return StagedBatch(batch.leaves, batch.pieces, staged=batch.staged, packs=batch.packs)

    error = await refused(tmp_path / "c", save_pipeline().insert_after("device_to_host", forget))

    assert isinstance(error, PipelineError)
    assert "plan" in str(error)

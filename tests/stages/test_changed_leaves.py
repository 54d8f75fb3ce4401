"""Stages that change leaves in a save: declared changes are planned, undeclared ones are refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import penstock
from penstock import SaveFormat
from penstock.errors import ChangedLeafError, PenstockError, PipelineError
from penstock.handlers import OrbaxLayout, SafetensorsLayout
from penstock.kernel import Extents, Leaf, LeafBatch, LeafSpec, Piece, Pipeline, StagedBatch
from penstock.pipelines import save_pipeline

pytestmark = pytest.mark.anyio

LARGE = 300_000  # elements; more bytes than fit into a piece
TREE = {"small": np.arange(5, dtype=np.float32), "large": jnp.arange(LARGE, dtype=jnp.float32) % 999, "n": 3}


def cast(leaf: Leaf, dtype: str) -> Leaf:
    if leaf.spec.dtype != "float32":
        return leaf

    value: Any = leaf.value
    spec = replace(leaf.spec, dtype=dtype, itemsize=np.dtype(dtype).itemsize)
    return replace(leaf, value=None if value is None else value.astype(dtype), spec=spec)


def cast_leaves(dtype: str) -> Any:
    """Make a stage after `flatten` that casts values, and declares it only in the specs of the leaves."""

    async def cast_leaves(batch: LeafBatch) -> LeafBatch:
        return replace(batch, leaves=tuple(cast(leaf, dtype) for leaf in batch.leaves))

    return cast_leaves


def cast_bytes(dtype: str, *, with_spec: bool) -> Any:
    """Make a stage after `device_to_host` that casts the bytes."""

    def as_dtype(data: memoryview) -> memoryview:
        return memoryview(np.frombuffer(data, np.float32).astype(dtype).tobytes())

    def piece(whole: Piece) -> Piece:
        if whole.leaf.spec.dtype != "float32":
            return whole

        leaf = cast(whole.leaf, dtype) if with_spec else whole.leaf
        start = whole.start // 4 * leaf.spec.itemsize
        return replace(whole, leaf=leaf, start=start, data=as_dtype(whole.data))

    def extents(whole: Extents) -> Extents:
        if whole.chunk is not None:
            (only,) = whole
            return Extents.of(piece(only))
        if any(leaf.spec.dtype != "float32" for leaf in whole.leaves):
            return whole

        leaves = tuple(cast(leaf, dtype) if with_spec else leaf for leaf in whole.leaves)
        data = as_dtype(whole.data)
        return Extents(leaves, data, len(data))

    async def cast_bytes(batch: StagedBatch) -> StagedBatch:
        return replace(
            batch,
            leaves=tuple(cast(leaf, dtype) if with_spec else leaf for leaf in batch.leaves),
            extents=tuple(map(extents, batch.extents)),
        )

    return cast_bytes


async def refused(path: Path, pipeline: Pipeline[Any], tree: object = TREE, **options: Any) -> PenstockError:
    """Save, and return the error; assert that nothing is published and nothing is held."""
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
    pipeline = save_pipeline().insert_after("flatten", cast_leaves(dtype))
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
    pipeline = save_pipeline().insert_after("device_to_host", cast_bytes("float16", with_spec=with_spec))
    options = {} if layout is None else {"layout": layout}

    for number, name in enumerate(("small", "large")):
        error = await refused(tmp_path / str(number), pipeline, {name: TREE[name]}, **options)
        assert error.key_path == f"['{name}']"


async def test_a_value_of_another_shape_is_refused_though_it_has_as_many_bytes(tmp_path: Path) -> None:
    async def transpose(batch: LeafBatch) -> LeafBatch:
        return replace(batch, leaves=tuple(_transposed(leaf) for leaf in batch.leaves))

    pipeline = save_pipeline().insert_after("flatten", transpose)
    error = await refused(tmp_path / "c", pipeline, {"a": np.ones((2, 3))})

    assert isinstance(error, ChangedLeafError)
    assert (error.key_path, error.stage) == ("['a']", "device_to_host")


def _transposed(leaf: Leaf) -> Leaf:
    value: Any = leaf.value
    return replace(leaf, value=value.T)


async def test_a_value_of_the_same_shape_and_dtype_may_take_the_place_of_another(tmp_path: Path) -> None:
    async def double(batch: LeafBatch) -> LeafBatch:
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
        return StagedBatch(batch.leaves, batch.extents, staged=batch.staged)

    error = await refused(tmp_path / "c", save_pipeline().insert_after("device_to_host", forget))

    assert isinstance(error, PipelineError)
    assert "plan" in str(error)


# Declared


class Cast:
    """The shortest stage that casts float32. It declares the same before and after `device_to_host`."""

    def __init__(self, dtype: str, *, as_declared: str | None = None) -> None:
        self._dtype = dtype
        self._declared = as_declared or dtype

    def resolve_spec(self, spec: LeafSpec) -> LeafSpec:
        if spec.dtype != "float32":
            return spec

        return replace(spec, dtype=self._declared, itemsize=np.dtype(self._declared).itemsize)

    def __call__(self, batch: StagedBatch) -> StagedBatch:
        return batch.map(self._cast, self.resolve_spec)

    def _cast(self, piece: Piece) -> Any:
        if piece.leaf.spec.dtype != "float32":
            return piece.data

        return np.frombuffer(piece.data, np.float32).astype(self._dtype)


class CastLeaves(Cast):
    """The same stage for before `device_to_host`."""

    def __call__(self, batch: LeafBatch) -> LeafBatch:  # type: ignore[override]  # another message
        leaves = [replace(leaf, spec=self.resolve_spec(leaf.spec)) for leaf in batch.leaves]
        return replace(batch, leaves=tuple(leaves))


MIXED = {
    **TREE,
    "more": [np.full((3, 2), number, np.float32) for number in range(40)],
    "text": "unchanged",
    "ints": np.arange(7),
    "none": None,
}


@pytest.mark.thinned(4)
@LAYOUTS
@pytest.mark.parametrize("dtype", ["int32", "float16", "float64"])
@pytest.mark.parametrize("place", ["flatten", "device_to_host", "limit_bytes"])
@pytest.mark.parametrize("budget", ["3MiB", "64MiB"])
async def test_a_declared_cast_is_planned_written_and_restored(
    tmp_path: Path, layout: Any, dtype: str, place: str, budget: str
) -> None:
    stage = CastLeaves(dtype) if place == "flatten" else Cast(dtype)
    options = {} if layout is None else {"layout": layout}
    async with penstock.Checkpointer(memory_limit=budget, **options) as checkpointer:
        pipeline = save_pipeline().insert_after(place, stage)
        report = await (await checkpointer.save(tmp_path / "c", MIXED, pipeline=pipeline))
        found = await checkpointer.restore(tmp_path / "c")
        intact = layout is not None or (await checkpointer.verify(tmp_path / "c")).intact
        assert checkpointer.statistics().leased == 0

    assert intact
    for name in ("small", "large"):
        assert found[name].dtype == dtype
        np.testing.assert_array_equal(np.asarray(found[name]), np.asarray(MIXED[name]).astype(dtype))

    more = found["more"][17] if layout is None else found["more.17"]
    np.testing.assert_array_equal(more, np.full((3, 2), 17, dtype))
    np.testing.assert_array_equal(found["ints"], np.arange(7))
    assert (found["text"], found["none"]) == ("unchanged", None)
    assert report.nbytes == (LARGE + 5 + 240) * np.dtype(dtype).itemsize + 7 * 8 + 8


async def test_a_cast_in_front_of_encode_is_encoded_as_what_it_became(tmp_path: Path) -> None:
    layout = OrbaxLayout(SaveFormat(codec="zstd:1"))
    async with penstock.Checkpointer(layout=layout) as checkpointer:
        pipeline = save_pipeline().insert_after("device_to_host", Cast("float16"))
        await (await checkpointer.save(tmp_path / "c", TREE, pipeline=pipeline))
        found = await checkpointer.restore(tmp_path / "c")

    np.testing.assert_array_equal(np.asarray(found["large"]), np.asarray(TREE["large"]).astype("float16"))


@LAYOUTS
@pytest.mark.parametrize("name", ["small", "large"])
async def test_a_stage_that_does_not_keep_to_what_it_declares_is_refused(
    tmp_path: Path, layout: Any, name: str
) -> None:
    pipeline = save_pipeline().insert_after("device_to_host", Cast("float16", as_declared="int32"))
    options = {} if layout is None else {"layout": layout}

    error = await refused(tmp_path / "c", pipeline, {name: TREE[name]}, **options)

    assert isinstance(error, ChangedLeafError)
    assert (error.key_path, error.stage) == (f"['{name}']", "cast")


async def test_a_change_of_the_leaves_of_a_pack_alone_is_refused(tmp_path: Path) -> None:
    """Of as many bytes, so that only the specs show it."""

    def changed(leaf: Leaf) -> Leaf:
        return replace(leaf, spec=replace(leaf.spec, dtype="int32")) if leaf.spec.dtype == "float32" else leaf

    async def rename_dtypes(batch: StagedBatch) -> StagedBatch:
        extents = tuple(replace(each, leaves=tuple(map(changed, each.leaves))) for each in batch.extents)
        return replace(batch, extents=extents)

    pipeline = save_pipeline().insert_after("device_to_host", rename_dtypes)

    error = await refused(tmp_path / "c", pipeline, {"more": MIXED["more"]})

    assert isinstance(error, ChangedLeafError)
    assert error.key_path == "['more'][0]"


async def test_what_is_declared_and_not_done_is_refused(tmp_path: Path) -> None:
    class Lazy(Cast):
        def __call__(self, batch: StagedBatch) -> StagedBatch:
            return batch

    error = await refused(tmp_path / "c", save_pipeline().insert_after("device_to_host", Lazy("float16")))

    assert isinstance(error, ChangedLeafError)
    assert "float16" in error.planned


class Halve:
    """Leaves out every second element of a one-dimensional leaf, which is another shape."""

    def resolve_spec(self, spec: LeafSpec) -> LeafSpec:
        shape = (spec.shape[0] // 2,) if spec.shape else spec.shape
        return replace(spec, shape=shape, chunk_shape=shape or (), write_shape=shape)

    def __call__(self, batch: StagedBatch) -> StagedBatch:
        return batch.map(
            lambda piece: self._halve(piece) if piece.leaf.spec.shape else piece.data, self.resolve_spec
        )

    def _halve(self, piece: Piece) -> bytes:
        return np.frombuffer(piece.data, piece.leaf.spec.dtype)[1::2].tobytes()


@LAYOUTS
async def test_a_leaf_that_is_whole_may_get_another_shape(tmp_path: Path, layout: Any) -> None:
    options = {} if layout is None else {"layout": layout}
    async with penstock.Checkpointer(**options) as checkpointer:
        pipeline = save_pipeline().insert_after("device_to_host", Halve())
        await (await checkpointer.save(tmp_path / "c", {"a": np.arange(10), "s": 3}, pipeline=pipeline))
        found = await checkpointer.restore(tmp_path / "c")

    np.testing.assert_array_equal(found["a"], [1, 3, 5, 7, 9])


async def test_a_leaf_that_travels_in_pieces_may_not(tmp_path: Path) -> None:
    pipeline = save_pipeline().insert_after("device_to_host", Halve())
    error = await refused(tmp_path / "c", pipeline, {"large": np.arange(3_000_000)})

    assert isinstance(error, ChangedLeafError)
    assert (error.key_path, error.stage) == ("['large']", "halve")
    assert "several pieces" in str(error)


async def test_nothing_of_a_batch_that_is_mapped_to_itself_is_copied(tmp_path: Path) -> None:
    seen: list[bool] = []

    def look(batch: StagedBatch) -> StagedBatch:
        mapped = batch.map(lambda piece: piece.data)
        seen.append(all(a is b for a, b in zip(batch.extents, mapped.extents, strict=True)))
        return mapped

    async with penstock.Checkpointer() as checkpointer:
        pipeline = save_pipeline().insert_after("device_to_host", look)
        await (await checkpointer.save(tmp_path / "c", MIXED, pipeline=pipeline))

    assert seen
    assert all(seen)


async def test_what_a_stage_changes_is_not_taken_from_the_base(tmp_path: Path) -> None:
    pipeline = save_pipeline().insert_after("device_to_host", Cast("float16"))
    async with penstock.Checkpointer() as checkpointer:
        await (await checkpointer.save(tmp_path / "1", TREE))
        report = await (await checkpointer.save(tmp_path / "2", TREE, pipeline=pipeline, base=tmp_path / "1"))
        found = await checkpointer.restore(tmp_path / "2")

    assert report.nbytes_kept == 0
    assert found["large"].dtype == np.float16

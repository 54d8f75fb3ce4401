"""Small leaves on several devices: saved, restored as they were, and onto other devices, bit for bit."""

from __future__ import annotations

import itertools
import math
import sys
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import FrameType
from typing import Any

import anyio
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from crc32c import crc32c
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

import penstock
from penstock import HandlerRegistry, SaveFormat
from penstock.errors import ChecksumError
from penstock.handlers import ArrayHandler, LocalStore, OrbaxLayout, SafetensorsLayout, default_handlers
from penstock.kernel import Extents, PlannedBatch, ReadLeaves, StagedBatch
from penstock.kernel.pipeline import FunctionStage
from penstock.pipelines import restore_pipeline, save_pipeline

_jax: Any = jax
P: Any = PartitionSpec
DTYPES = ["float32", "bfloat16", "int8", "bool", "float8_e4m3fn"]


def on(shape: tuple[int, ...], spec: Any, *, backwards: bool = False) -> Sharding:
    devices = _jax.devices()[: math.prod(shape)]
    mesh: Any = np.array(devices[:: -1 if backwards else 1]).reshape(shape)
    return NamedSharding(Mesh(mesh, ("x", "y")[: len(shape)]), spec)


SHARDINGS: dict[str, Sharding] = {
    "eight rows": on((8,), P("x")),
    "eight rows, last device first": on((8,), P("x"), backwards=True),
    "eight columns": on((8,), P(None, "x")),
    "2 x 4": on((2, 4), P("x", "y")),
    "4 x 2": on((4, 2), P("y", "x")),
    "2 x 4 on one axis": on((2, 4), P(("y", "x"))),
    "four rows": on((4,), P("x")),
    "replicated": on((8,), P()),
    "partly replicated": on((2, 4), P("x")),
    "one device": SingleDeviceSharding(_jax.devices()[5]),
}


def tree_on(sharding: Sharding, n: int = 3) -> dict[str, Any]:
    """A few leaves of each dtype; in random bits, so that nothing is like anything else."""
    rng = np.random.default_rng(0)
    return {
        f"{dtype}_{at}": _jax.device_put(
            rng.integers(
                0, 2 if dtype == "bool" else 256, (8, 16 * jnp.dtype(dtype).itemsize), np.uint8
            ).view(jnp.dtype(dtype)),
            sharding,
        )
        for dtype in DTYPES
        for at in range(n)
    }


def bits(array: Any) -> bytes:
    return np.asarray(array).tobytes()


def check_equal(found: dict[str, Any], wanted: dict[str, Any], sharding: Sharding) -> None:
    assert found.keys() == wanted.keys()
    for name, array in found.items():
        assert (array.shape, array.dtype, array.sharding) == (
            wanted[name].shape,
            wanted[name].dtype,
            sharding,
        )
        assert array.committed
        assert bits(array) == bits(wanted[name])
        whole = np.asarray(wanted[name])
        for shard in array.addressable_shards:
            assert bits(shard.data) == whole[shard.index].tobytes()


def structs(tree: dict[str, Any], sharding: Sharding) -> dict[str, Any]:
    return {
        name: _jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding) for name, leaf in tree.items()
    }


@pytest.mark.thinned(3)
@pytest.mark.anyio
@pytest.mark.many_cases
@pytest.mark.parametrize("target", SHARDINGS)
@pytest.mark.parametrize("source", SHARDINGS)
async def test_from_any_sharding_to_any_other(source: str, target: str, tmp_path: Path) -> None:
    tree, wanted = tree_on(SHARDINGS[source]), SHARDINGS[target]
    await penstock.save(tmp_path / "c", tree)

    check_equal(await penstock.restore(tmp_path / "c", like=structs(tree, wanted)), tree, wanted)


@pytest.mark.anyio
@pytest.mark.parametrize("source", SHARDINGS)
async def test_sharded_leaves_are_restored_without_a_target_and_into_numpy(
    source: str, tmp_path: Path
) -> None:
    tree = tree_on(SHARDINGS[source])
    await penstock.save(tmp_path / "c", tree)

    check_equal(await penstock.restore(tmp_path / "c"), tree, SHARDINGS[source])
    host: dict[str, Any] = await penstock.restore(tmp_path / "c", like=dict.fromkeys(tree, np.ndarray))
    assert {name: (type(array), array.tobytes()) for name, array in host.items()} == {
        name: (np.ndarray, bits(array)) for name, array in tree.items()
    }


@pytest.mark.anyio
@pytest.mark.parametrize("source", SHARDINGS)
async def test_small_sharded_leaves_travel_in_packs(source: str, tmp_path: Path) -> None:
    tree, target = tree_on(SHARDINGS[source]), SHARDINGS["2 x 4"]
    packed: list[int] = []
    alone: list[str] = []

    async def look(batch: PlannedBatch) -> PlannedBatch:
        if isinstance(batch.leaves, ReadLeaves) and batch.leaves.shared is not None:
            packed.append(len(batch.leaves))
        else:
            alone.extend(leaf.info.key_path for leaf in batch.leaves)

        return batch

    await penstock.save(tmp_path / "c", tree)
    pipeline = restore_pipeline().insert_after("plan", FunctionStage(look))
    async with penstock.Checkpointer() as checkpointer:
        found = await checkpointer.restore(tmp_path / "c", like=structs(tree, target), pipeline=pipeline)

    check_equal(found, tree, target)
    assert (sum(packed), alone) == (len(tree), [])


@pytest.mark.anyio
async def test_damage_is_found_and_the_leaf_is_named(tmp_path: Path) -> None:
    tree = {
        f"w{at}": _jax.device_put(np.full((8, 4), at, np.float32), SHARDINGS["eight rows"]) for at in range(4)
    }
    await penstock.save(tmp_path / "c", tree)
    needle = np.full((1, 4), 2, np.float32).tobytes()
    (data,) = [file for file in (tmp_path / "c" / "d").iterdir() if needle in file.read_bytes()]
    data.write_bytes(data.read_bytes().replace(needle * 3, needle * 2 + bytes(16), 1))

    with pytest.raises(ChecksumError) as caught:
        await penstock.restore(tmp_path / "c", like=tree)

    assert caught.value.key_path == "['w2']"


def copying() -> HandlerRegistry:
    """Handlers that copy from and to CPU devices as from and to any other."""
    registry = default_handlers()
    registry.register(_jax.Array, ArrayHandler(alias_host=False), override=True)
    return registry


FORMATS: dict[str, dict[str, Any]] = {
    "zarr 3": {"save_format": SaveFormat(zarr=3)},
    "a directory for each array": {"save_format": SaveFormat(ocdbt=False)},
    "a directory for each array, zarr 3": {"save_format": SaveFormat(ocdbt=False, zarr=3)},
    "chunks of 16 bytes": {"save_format": SaveFormat(chunk_byte_size=16)},
    "each replica a part": {"save_format": SaveFormat(replica_parallel=True, replica_parallel_min_bytes=0)},
    "files of 300 bytes": {"save_format": SaveFormat(ocdbt_target_data_file_size=300)},
    "safetensors": {"layout": SafetensorsLayout()},
    "a budget of 2 KiB": {"memory_limit": 2048},
    "device memory that is copied": {"registry": copying()},
}


@pytest.mark.thinned(2)
@pytest.mark.anyio
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("source", ["4 x 2", "eight columns", "partly replicated", "replicated"])
async def test_sharded_leaves_are_restored_from_every_format(source: str, form: str, tmp_path: Path) -> None:
    tree = tree_on(SHARDINGS[source])
    async with penstock.Checkpointer(**FORMATS[form]) as checkpointer:
        await (await checkpointer.save(tmp_path / "c", tree))
        found = await checkpointer.restore(tmp_path / "c", like=structs(tree, SHARDINGS["2 x 4"]))

    check_equal(found, tree, SHARDINGS["2 x 4"])
    report = await penstock.verify(tmp_path / "c")
    assert not report.damages


@pytest.mark.anyio
async def test_chunks_are_packed_and_recorded_one_by_one(tmp_path: Path) -> None:
    tree = {"w": _jax.device_put(np.arange(64, dtype=np.int32).reshape(8, 8), SHARDINGS["4 x 2"])}
    seen: list[Extents] = []

    async def look(batch: StagedBatch) -> StagedBatch:
        assert all(extents.chunk is None for extents in batch.extents)
        seen.extend(batch.extents)
        return batch

    pipeline = save_pipeline().insert_after("device_to_host", FunctionStage(look))
    async with penstock.Checkpointer() as checkpointer:
        await (await checkpointer.save(tmp_path / "c", tree, pipeline=pipeline))

    (pack,) = seen
    pieces = list(pack)
    assert [piece.chunk for piece in pieces] == list(itertools.product(range(2), range(4)))
    whole = np.arange(64, dtype=np.int32).reshape(2, 4, 4, 2)
    assert [bytes(piece.data) for piece in pieces] == [
        whole[i, :, j].tobytes() for i in range(2) for j in range(4)
    ]
    checkpoint = OrbaxLayout().open(LocalStore(), str(tmp_path / "c"))
    (sums,) = checkpoint.checksums.values()
    assert [(each.nbytes, each.crc32c) for each in sums] == [(32, crc32c(piece.data)) for piece in pieces]


def calls_of(act: Callable[[], Awaitable[object]]) -> int:
    """How many functions are called meanwhile, in any thread."""
    n = itertools.count()

    def count(frame: FrameType, event: str, arg: object) -> None:
        if event in {"call", "c_call"}:
            next(n)

    threading.setprofile(count)
    sys.setprofile(count)
    try:
        anyio.run(act)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)

    return next(n)


@pytest.mark.parametrize("flow", ["save", "restore"])
def test_what_a_chunk_costs_does_not_grow_with_their_number(flow: str, tmp_path: Path) -> None:
    sharding, counts = SHARDINGS["eight rows"], {}
    for n in (1, 50, 100, 200):  # the first to import what is needed
        values = _jax.device_put([np.full((8, 4), at, np.float32) for at in range(n)], sharding)
        tree = {f"w{at}": value for at, value in enumerate(values)}
        path = tmp_path / str(n)

        async def save(path: Path = path, tree: object = tree) -> None:
            await penstock.save(path, tree)

        async def restore(path: Path = path, tree: object = tree) -> None:
            _jax.block_until_ready(await penstock.restore(path, like=tree))

        if flow == "restore":
            anyio.run(save)

        counts[n] = calls_of(save if flow == "save" else restore)

    first, then = counts[100] - counts[50], counts[200] - counts[100]
    assert then < 2.5 * first  # four times as many would be quadratic
    assert then / 800 < MOST_CALLS[flow]


MOST_CALLS = {"save": 30, "restore": 20}  # for each of eight chunks of a leaf, those of the leaf included

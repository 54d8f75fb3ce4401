"""Small leaves on several devices: saved, restored as they were, and onto other devices, bit for bit."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

import penstock
from penstock.kernel.errors import ChecksumError
from penstock.kernel.messages.packs import ReadLeaf, ReadPack
from penstock.kernel.messages.save import LeafBatch
from penstock.kernel.pipeline.stage import FunctionStage
from penstock.pipelines import restore_pipeline

pytestmark = pytest.mark.anyio

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


@pytest.mark.many_cases
@pytest.mark.parametrize("target", SHARDINGS)
@pytest.mark.parametrize("source", SHARDINGS)
async def test_from_any_sharding_to_any_other(source: str, target: str, tmp_path: Path) -> None:
    tree, wanted = tree_on(SHARDINGS[source]), SHARDINGS[target]
    await penstock.save(tmp_path / "c", tree)

    check_equal(await penstock.restore(tmp_path / "c", like=structs(tree, wanted)), tree, wanted)


@pytest.mark.parametrize("source", SHARDINGS)
async def test_without_a_target_and_into_numpy(source: str, tmp_path: Path) -> None:
    tree = tree_on(SHARDINGS[source])
    await penstock.save(tmp_path / "c", tree)

    check_equal(await penstock.restore(tmp_path / "c"), tree, SHARDINGS[source])
    host: dict[str, Any] = await penstock.restore(tmp_path / "c", like=dict.fromkeys(tree, np.ndarray))
    assert {name: (type(array), array.tobytes()) for name, array in host.items()} == {
        name: (np.ndarray, bits(array)) for name, array in tree.items()
    }


@pytest.mark.parametrize("source", SHARDINGS)
async def test_they_travel_in_packs(source: str, tmp_path: Path) -> None:
    tree, target = tree_on(SHARDINGS[source]), SHARDINGS["2 x 4"]
    packed: list[int] = []
    alone: list[str] = []

    async def look(batch: LeafBatch[ReadLeaf]) -> LeafBatch[ReadLeaf]:
        if isinstance(batch.leaves, ReadPack):
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

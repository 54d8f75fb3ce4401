"""restore(mmap=True): leaves that live in the page cache."""

from __future__ import annotations

import gc
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from tests.byte_counting import CountingStore

from penstock import Checkpointer
from penstock.errors import ChecksumError, StructureMismatchError, TruncatedDataError

pytestmark = pytest.mark.anyio

AssertSame = Callable[[Any, Any], None]


def state(xp: Any) -> dict[str, Any]:
    return {
        "large": xp.arange(3_000_000, dtype=np.float32),
        "middle": xp.ones((300, 100), np.float16),
        "small": [xp.arange(7, dtype=np.int32), xp.ones((), np.int8)],
        "a": xp.ones(5, jnp.bfloat16),
        "even": xp.arange(1024, dtype=np.float32),  # whole cache lines, unlike the next one
        "half": xp.arange(1030, dtype=np.float32),
        "empty": xp.zeros((0, 3), np.float32),
        "step": 3,
        "name": "run",
        "none": None,
    }


async def test_numpy_leaves_are_the_files_memory_and_read_only(
    tmp_path: Path, assert_same: AssertSame
) -> None:
    store: Any = CountingStore()
    tree = state(np)
    async with Checkpointer(store=store) as checkpointer:
        await (await checkpointer.save(tmp_path / "a", tree))
        found = await checkpointer.restore(tmp_path / "a", mmap=True)

        assert_same(found, tree)
        assert store.ranges == []
        for leaf in (found["large"], found["middle"], *found["small"], found["half"]):
            assert not leaf.flags.writeable
            assert not leaf.flags.owndata
            with pytest.raises(ValueError, match="read-only"):
                leaf[...] = 0

        assert checkpointer.statistics().leased == 0

    shutil.rmtree(tmp_path / "a")
    assert_same(found, tree)


async def test_jax_arrays_on_cpu_devices_share_aligned_mapped_memory(
    tmp_path: Path, assert_same: AssertSame
) -> None:
    store: Any = CountingStore()
    tree = state(jnp)
    async with Checkpointer(store=store) as checkpointer:
        await (await checkpointer.save(tmp_path / "a", tree))
        found = await checkpointer.restore(tmp_path / "a", like=tree, mmap=True)

    assert store.ranges == []
    assert_same(found, tree)
    lines = Path("/proc/self/maps").read_text().splitlines()
    mapped = [line.split()[0].split("-") for line in lines if str(tmp_path) in line]
    ranges = [(int(start, 16), int(stop, 16)) for start, stop in mapped]
    for name in ("large", "middle", "even", "half"):
        at = found[name].unsafe_buffer_pointer()
        assert any(start <= at < stop for start, stop in ranges), name


async def test_a_mapped_array_may_be_donated_and_the_file_stays_as_it_is(
    tmp_path: Path, assert_same: AssertSame
) -> None:
    tree = {"a": jnp.arange(1_000_000, dtype=jnp.float32)}
    async with Checkpointer() as checkpointer:
        await (await checkpointer.save(tmp_path / "a", tree))
        found = await checkpointer.restore(tmp_path / "a", like=tree, mmap=True)
        add: Any = cast("Any", jax).jit(lambda x: x + 1, donate_argnums=0)
        after = add(found["a"])

        assert_same(after, tree["a"] + 1)
        assert_same(await checkpointer.restore(tmp_path / "a", like=tree), tree)


async def test_what_cannot_be_mapped_is_read(tmp_path: Path, assert_same: AssertSame) -> None:
    mesh = jax.make_mesh((8,), ("x",))
    sharded = NamedSharding(mesh, cast("Any", PartitionSpec)("x"))
    tree = {"s": jax.device_put(jnp.arange(64_000, dtype=jnp.float32), sharded)}
    async with Checkpointer() as checkpointer:
        await (await checkpointer.save(tmp_path / "a", tree))
        assert_same(await checkpointer.restore(tmp_path / "a", like=tree, mmap=True), tree)
        whole = await checkpointer.restore(tmp_path / "a", like={"s": np.ndarray}, mmap=True)
        assert_same(whole, {"s": np.arange(64_000, dtype=np.float32)})

        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as orbax:  # compressed
            orbax.save(tmp_path / "b", ocp.args.PyTreeSave({"z": np.arange(1000.0)}))

        assert_same(await checkpointer.restore(tmp_path / "b", mmap=True), {"z": np.arange(1000.0)})


async def test_the_mapping_ends_with_the_last_leaf(tmp_path: Path) -> None:
    async with Checkpointer() as checkpointer:
        await (await checkpointer.save(tmp_path / "a", {"x": np.ones(1_000_000)}))
        found = await checkpointer.restore(tmp_path / "a", mmap=True)
        assert str(tmp_path) in Path("/proc/self/maps").read_text()
        part = found["x"][5:10]
        del found
        assert part.tolist() == [1.0] * 5
        del part

    gc.collect()
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()


async def test_a_mapped_restore_refuses_a_target_that_does_not_fit(tmp_path: Path) -> None:
    async with Checkpointer() as checkpointer:
        await (await checkpointer.save(tmp_path / "a", {"x": np.ones(10)}))
        with pytest.raises(StructureMismatchError):
            await checkpointer.restore(tmp_path / "a", like={"x": np.ones(11)}, mmap=True)


def many_small(xp: Any) -> dict[str, Any]:
    return {f"w{number:03}": xp.full(11 + number % 3, number, np.float32) for number in range(300)}


LEAF_33 = np.full(11, 33, np.float32).tobytes()


def data_file(path: Path) -> Path:
    """The file with the values of `many_small`."""
    (found,) = (file for file in path.rglob("*") if file.is_file() and LEAF_33 in file.read_bytes())
    return found


@pytest.mark.parametrize("xp", [np, jnp], ids=["numpy", "jax"])
async def test_small_leaves_of_a_mapped_file_are_compared_if_that_is_asked_for(
    tmp_path: Path, xp: Any, assert_same: AssertSame
) -> None:
    tree = many_small(xp)
    async with Checkpointer() as checkpointer:
        await (await checkpointer.save(tmp_path / "a", tree))
        assert_same(await checkpointer.restore(tmp_path / "a", like=tree, mmap=True, verify=True), tree)

        file = data_file(tmp_path / "a")
        content = bytearray(file.read_bytes())
        content[content.index(LEAF_33) + 5] ^= 1
        file.write_bytes(content)
        damaged = await checkpointer.restore(tmp_path / "a", like=tree, mmap=True)
        assert not np.array_equal(damaged["w033"], tree["w033"])
        with pytest.raises(ChecksumError, match="differ from those written") as caught:
            await checkpointer.restore(tmp_path / "a", like=tree, mmap=True, verify=True)

    assert caught.value.key_path == "['w033']"


async def test_small_leaves_of_a_file_that_was_cut_short_are_read_and_not_mapped(tmp_path: Path) -> None:
    tree = many_small(np)
    async with Checkpointer() as checkpointer:
        await (await checkpointer.save(tmp_path / "a", tree))
        file = data_file(tmp_path / "a")
        file.write_bytes(file.read_bytes()[:-5])
        with pytest.raises(TruncatedDataError):
            await checkpointer.restore(tmp_path / "a", like=tree, mmap=True)

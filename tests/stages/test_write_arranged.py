from __future__ import annotations

import errno
import itertools
from typing import Any

import anyio
import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from tests.stages.stage_rig import Rig, cancel_in, files_in, save_stages

from penstock.errors import StorageError
from penstock.handlers import LocalStore, SafetensorsLayout
from penstock.handlers.formats.safetensors.safetensors_checkpoint import open_checkpoint
from penstock.kernel import LeafSpec, SaveRun, WrittenBatch
from penstock.stages import DeviceToHost, Flatten, LimitBytes, Write
from penstock.stages.write import runs_of

pytestmark = pytest.mark.anyio


def run_for(rig: Rig, shard_bytes: int | None = None) -> SaveRun:
    rig.layout = SafetensorsLayout(shard_bytes)  # type: ignore[assignment]  # pyright: ignore[reportAttributeAccessIssue]
    return rig.save_run()


async def write(rig: Rig, tree: object, *before: Any, shard_bytes: int | None = None) -> list[WrittenBatch]:
    run = run_for(rig, shard_bytes)
    return await save_stages(run, tree, Flatten(), DeviceToHost(), *before, Write())


def on_disk(rig: Rig) -> dict[str, bytes]:
    """Return the bytes of each tensor, found as a reader would find them."""
    found: dict[str, bytes] = {}
    for leaf in open_checkpoint(LocalStore(), str(rig.temporary)).leaves:
        place: Any = leaf.detail
        if place is not None:
            with open(place.file, "rb") as file:
                file.seek(place.offset)
                found[leaf.info.name] = file.read(leaf.spec.nbytes)

    return found


def noise(*shape: int, dtype: Any = np.uint8) -> Any:
    bits = np.random.default_rng(sum(shape)).integers(
        0, 256, np.prod(shape, dtype=int) * np.dtype(dtype).itemsize
    )
    return bits.astype(np.uint8).view(dtype).reshape(shape)


@pytest.fixture
def sharded() -> Any:
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("x", "y"))

    def place(array: Any, *axes: Any) -> Any:
        return jax.device_put(array, NamedSharding(mesh, PartitionSpec(*axes)))  # type: ignore[no-untyped-call]  # jax's

    return place


async def test_every_leaf_lies_whole_where_the_header_says(rig: Rig, sharded: Any) -> None:
    rig.limit(1 << 20, piece=1000)
    big = noise(16, 24, 8, dtype=np.float32)
    tree: dict[str, Any] = {
        "small": [noise(3), noise(5, dtype=np.int16), noise(0)],
        "large": noise(5500),
        "sharded": [sharded(big, "x", "y"), sharded(big, None, "y"), sharded(big, "y", None, "x")],
        "none": None,
    }

    batches = await write(rig, tree, LimitBytes(700))

    expected = {"large": tree["large"], **{f"sharded.{at}": big for at in range(3)}}
    expected |= {f"small.{at}": value for at, value in enumerate(tree["small"])}
    assert on_disk(rig) == {name: np.asarray(value).tobytes() for name, value in expected.items()}
    assert sum(batch.nbytes for batch in batches) == sum(value.nbytes for value in expected.values())
    assert sum(len(batch.leaves) for batch in batches) == 8
    rig.check_idle()


async def test_shards_and_their_index(rig: Rig) -> None:
    tree = {f"l{at}": noise(100, dtype=np.int16) for at in range(5)}

    await write(rig, tree, shard_bytes=400)

    shards = {f"model-{at:05}-of-00003.safetensors" for at in (1, 2, 3)}
    assert files_in(rig.temporary) == {*shards, "model.safetensors.index.json"}
    assert on_disk(rig) == {name: value.tobytes() for name, value in tree.items()}
    assert rig.operations.count("data.sync") == 3
    assert rig.operations.index("write_file") > rig.operations.index("data.sync")


async def test_a_file_is_closed_when_its_last_byte_is_written(rig: Rig) -> None:
    await write(rig, {f"l{at:02}": noise(1000) for at in range(40)}, shard_bytes=2000)

    n_open = most = 0
    for operation in rig.operations:
        n_open += (operation == "create_long_file") - (operation == "data.close")
        most = max(most, n_open)

    assert rig.operations.count("create_long_file") == 20
    assert most <= 4  # one for each thread that writes
    assert len(on_disk(rig)) == 40


async def test_leaves_without_bytes_have_their_file(rig: Rig) -> None:
    await write(rig, {"a": noise(0), "b": noise(0, 3, dtype=np.int16)})

    assert files_in(rig.temporary) == {"model.safetensors"}
    assert on_disk(rig) == {"a": b"", "b": b""}


async def test_a_tree_without_arrays_is_one_file(rig: Rig) -> None:
    await write(rig, {"a": None, "s": "text"})

    assert files_in(rig.temporary) == {"model.safetensors"}
    assert on_disk(rig) == {}


async def test_neighbouring_bytes_are_one_write(rig: Rig) -> None:
    await write(rig, [noise(10) for _ in range(100)])

    assert rig.operations.count("data.write_at") == 2  # the head, and everything else


@pytest.mark.parametrize(
    "operation", ["create_long_file", "data.allocate", "data.write_at", "data.sync", "data.close"]
)
@pytest.mark.parametrize("nth", [1, 2])
async def test_a_failing_medium(rig: Rig, operation: str, nth: int) -> None:
    error = StorageError("x", "y", "no space", errno.ENOSPC)
    rig.store.fail_on(operation, nth, error)

    with pytest.raises(StorageError, match="no space"):
        await write(rig, [noise(2000), noise(2000)], shard_bytes=2000)

    rig.check_idle()


async def test_a_file_that_gets_no_room_is_not_created_again_by_another_worker(rig: Rig) -> None:
    error = StorageError("x", "y", "no space", errno.ENOSPC)
    hang = rig.store.hang_on("data.allocate", then=error)
    raised: list[StorageError] = []

    async def save() -> None:
        try:
            tree = [noise(3 << 20), noise(3 << 20)]  # a message each
            await save_stages(run_for(rig), tree, Flatten(), DeviceToHost(), Write(2))
        except StorageError as failure:
            raised.append(failure)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(save)
        await hang.wait_reached()
        await anyio.wait_all_tasks_blocked()  # the other worker is in its thread, and waits for the file
        hang.release()

    assert raised == [error]
    assert rig.operations.count("create_long_file") == 1
    rig.check_idle()


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("operation", ["create_long_file", "data.write_at", "data.sync"])
async def test_cancelled_midway(rig: Rig, operation: str, native: bool, anyio_backend_name: str) -> None:
    if native and anyio_backend_name != "asyncio":
        pytest.skip("trio has no native cancellation of a task")

    hang = rig.store.hang_on(operation)
    await cancel_in(hang, lambda: write(rig, [noise(5000)]), native=native)

    rig.check_idle()


@st.composite
def cases(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], int, int]:
    grid = draw(st.lists(st.integers(1, 3), max_size=3))
    chunk = tuple(draw(st.integers(1, 4)) for _ in grid)
    shape = tuple(n * size for n, size in zip(grid, chunk, strict=True))
    return shape, chunk, draw(st.sampled_from([1, 2, 8])), draw(st.integers(1, 40))


@given(cases())
def test_runs_put_every_byte_of_every_chunk_in_its_place(
    case: tuple[tuple[int, ...], tuple[int, ...], int, int],
) -> None:
    shape, chunk_shape, itemsize, piece = case
    dtype = np.dtype(f"u{itemsize}")
    array = np.arange(np.prod(shape, dtype=int), dtype=dtype).reshape(shape)
    spec = LeafSpec("np.ndarray", shape, dtype.name, itemsize, chunk_shape)
    found = bytearray(array.nbytes)
    n_written = 0
    counts = [n // size for n, size in zip(shape, chunk_shape, strict=True)]
    for chunk in itertools.product(*map(range, counts)):
        part = array[tuple(slice(i * n, i * n + n) for i, n in zip(chunk, chunk_shape, strict=True))]
        data = part.tobytes()
        for start in range(0, len(data), piece):
            cut = data[start : start + piece]
            for offset, lo, hi in runs_of(spec, chunk, start, len(cut)):
                found[offset : offset + hi - lo] = cut[lo:hi]
                n_written += hi - lo

    assert bytes(found) == array.tobytes()
    assert n_written == array.nbytes


def test_a_whole_leaf_is_one_run() -> None:
    spec = LeafSpec("np.ndarray", (4, 6), "uint8", 1, (4, 6))
    rows = LeafSpec("np.ndarray", (4, 6), "uint8", 1, (2, 6))

    assert list(runs_of(spec, (0, 0), 5, 10)) == [(5, 0, 10)]
    assert list(runs_of(rows, (1, 0), 0, 12)) == [(12, 0, 12)]

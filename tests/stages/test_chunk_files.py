"""The stage `write` for layouts in which each chunk has a file of its own."""

from __future__ import annotations

import errno
from dataclasses import replace
from typing import Any, Literal

import jax
import numpy as np
import pytest
from crc32c import crc32c
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from tests.stages.stage_rig import Rig, cancel_in, feed, files_in, run_stages, save_stages

from penstock import SaveFormat
from penstock.errors import PipelineError, StorageError
from penstock.handlers import OrbaxLayout
from penstock.kernel import Extents, Leaf, Piece, StagedBatch, Written, WrittenBatch
from penstock.kernel.pipeline import FunctionStage
from penstock.kernel.protocols import DEFAULT_PLACEMENT
from penstock.stages import DeviceToHost, Encode, Flatten, LimitBytes, Write

pytestmark = pytest.mark.anyio

Array = np.ndarray[Any, np.dtype[Any]]
SMALL = DEFAULT_PLACEMENT.document_bytes
LARGE = 3 * SMALL


def noise(nbytes: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


def use(rig: Rig, zarr: Literal[2, 3] = 2, **options: Any) -> None:
    rig.layout = OrbaxLayout(SaveFormat(ocdbt=False, zarr=zarr, **options))


async def written(rig: Rig, tree: object, *before: Any, concurrency: int = 4) -> list[WrittenBatch]:
    return await save_stages(rig.save_run(), tree, Flatten(), DeviceToHost(), *before, Write(concurrency))


def parts_of(batches: list[WrittenBatch]) -> list[Written]:
    return [part for batch in batches for part in batch.parts()]


def check_files(rig: Rig, batches: list[WrittenBatch]) -> dict[str, bytes]:
    """Return the content of each file, after checking that it is exactly what `Written` records."""
    contents = {name: (rig.temporary / name).read_bytes() for name in files_in(rig.temporary)}
    ends = dict.fromkeys(contents, 0)
    for part in sorted(parts_of(batches), key=lambda part: (part.file, part.start)):
        assert part.offset == part.start == ends[part.file]
        data = contents[part.file][part.offset : part.offset + part.nbytes]
        assert (len(data), crc32c(data)) == (part.nbytes, part.crc32c)
        ends[part.file] += part.nbytes

    assert ends == {name: len(content) for name, content in contents.items()}
    return contents


async def test_each_chunk_has_the_file_that_the_layout_names(rig: Rig) -> None:
    use(rig)
    matrix = noise(1200).reshape(30, 40)
    tree: dict[str, Any] = {
        "large": noise(LARGE),
        "m": matrix,
        "n": None,
        "s": "text",
        "x": 7,
        "z": np.ones((0, 2)),
    }
    batches = await written(rig, tree)

    contents = check_files(rig, batches)
    assert contents.keys() == {"large/0", "m/0.0", "x/0"}
    assert contents["large/0"] == tree["large"].tobytes()
    assert contents["m/0.0"] == matrix.tobytes()
    assert contents["x/0"] == np.int64(7).tobytes()
    assert sorted(leaf.index for batch in batches for leaf in batch.leaves) == list(range(6))


async def test_files_of_zarr_3_lie_in_folders_of_their_own(rig: Rig) -> None:
    use(rig, 3, chunk_byte_size=600)
    matrix = noise(1200).reshape(30, 40)

    contents = check_files(rig, await written(rig, {"a": {"m": matrix}, "x": 7.5}))

    assert contents.keys() == {"a.m/c/0/0", "a.m/c/0/1", "x/c"}
    assert contents["a.m/c/0/1"] == matrix[:, 20:].tobytes()


async def test_shards_of_several_devices(rig: Rig) -> None:
    use(rig, 3)
    devices: Any = np.array(jax.devices()).reshape(2, 4)
    sharding = NamedSharding(Mesh(devices, ("x", "y")), PartitionSpec("x", "y"))  # type: ignore[no-untyped-call]  # jax's
    value = noise(32).reshape(4, 8)

    contents = check_files(rig, await written(rig, {"a": jax.device_put(value, sharding)}))

    assert len(contents) == 8
    assert contents["a/c/1/2"] == value[2:, 4:6].tobytes()


async def test_a_large_chunk_is_put_together_from_pieces_in_any_order(rig: Rig) -> None:
    use(rig)
    (batch,) = await save_stages(rig.save_run(), {"a": noise(LARGE)}, Flatten())
    leaf: Leaf = batch.leaves[0].without_value()
    data = memoryview(noise(LARGE).tobytes())
    pieces = [Piece(leaf, (0,), at, data[at : at + SMALL]) for at in (SMALL, 2 * SMALL, 0)]

    batches = await run_stages(
        rig.save_run(),
        feed([StagedBatch(extents=(Extents.of(piece),)) for piece in pieces]),
        Write(concurrency=3),
    )

    assert check_files(rig, batches) == {"a/0": bytes(data)}
    assert rig.operations.count("create_data_file") == 1


async def test_a_small_chunk_in_pieces_is_one_file(rig: Rig) -> None:
    use(rig)
    rig.limit(1 << 20, piece=100)
    value = noise(950)

    contents = check_files(rig, await written(rig, {"a": value}, LimitBytes(300)))

    assert contents == {"a/0": value.tobytes()}


async def test_each_large_file_is_synced_and_closed_once_its_last_byte_is_written(rig: Rig) -> None:
    use(rig)
    rig.limit(1 << 30, piece=SMALL)

    await written(rig, [noise(LARGE, seed) for seed in range(3)], concurrency=1)

    for at in range(3):
        path = str(rig.temporary / f"{at}/0")
        names = [operation.name for operation in rig.store.operations if operation.path == path]
        assert names == ["create_data_file", *["data.write_at"] * 3, "data.sync", "data.close"]


async def test_no_more_files_are_open_than_chunks_are_being_written(rig: Rig) -> None:
    use(rig)
    opened: list[int] = []
    rig.limits = replace(rig.limits, batch_leaves=1, piece_bytes=SMALL)

    async def count(batch: WrittenBatch) -> WrittenBatch:
        opened.append(rig.store.open_files)
        return batch

    run = rig.save_run()
    tree = [noise(2 * SMALL, seed) for seed in range(8)]
    await save_stages(run, tree, Flatten(), DeviceToHost(), Write(concurrency=1), FunctionStage(count))

    assert max(opened) <= 2


async def test_progress_counts_what_was_saved_and_not_what_it_became(rig: Rig) -> None:
    use(rig, codec="zstd")
    run = rig.save_run()
    tree = [np.zeros(100_000, np.uint8), noise(100), None]

    batches = await save_stages(run, tree, Flatten(), DeviceToHost(), Encode(), Write())

    progress = run.progress.snapshot()
    assert (progress.leaves_done, progress.bytes_done) == (3, 100_100) == (3, progress.bytes_total)
    assert sum(map(len, check_files(rig, batches).values())) < 1000


async def test_a_chunk_whose_codec_nobody_applied_is_not_written(rig: Rig) -> None:
    use(rig, codec="zstd")

    with pytest.raises(PipelineError, match="no stage `encode`") as caught:
        await written(rig, {"a": noise(100_000)})

    assert caught.value.key_path == "['a']"
    assert files_in(rig.temporary) == set()


# Failing and cancelled


@pytest.mark.parametrize("size", [100, LARGE], ids=["small", "large"])
@pytest.mark.parametrize(
    "operation",
    ["make_directory", "write_file", "create_data_file", "data.write_at", "data.sync", "data.close"],
)
async def test_an_operation_that_fails_fails_the_stage(rig: Rig, operation: str, size: int) -> None:
    if operation != "make_directory" and (size == 100) != (operation == "write_file"):
        pytest.skip("not done with such a chunk")

    use(rig)
    rig.limits = replace(rig.limits, piece_bytes=SMALL, batch_leaves=2)
    error = StorageError(operation, "path", "refused", errno.ENOSPC)
    rig.store.fail_on(operation, 3 if operation == "make_directory" else 2, error)

    with pytest.raises(StorageError) as caught:
        await written(rig, [noise(size, seed) for seed in range(6)])

    assert caught.value is error


@pytest.mark.thinned(2)
@pytest.mark.parametrize("native", [False, True], ids=["scope", "task"])
@pytest.mark.parametrize(
    "operation", ["make_directory", "write_file", "create_data_file", "data.write_at", "data.sync"]
)
async def test_a_cancelled_write_of_chunk_files_closes_them(rig: Rig, operation: str, native: bool) -> None:
    use(rig)
    rig.limits = replace(rig.limits, piece_bytes=SMALL, batch_leaves=2)
    hang = rig.store.hang_on(operation, 2)
    tree = [noise(100 if operation == "write_file" else LARGE, seed) for seed in range(6)]

    await cancel_in(hang, lambda: written(rig, tree), native=native)

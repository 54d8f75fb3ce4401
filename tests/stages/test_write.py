from __future__ import annotations

import errno
from typing import Any

import numpy as np
import pytest
from anyio import create_task_group
from crc32c import crc32c
from tests.stages.stage_rig import (
    Parcel,
    ParcelHandler,
    Rig,
    cancel_in,
    feed,
    files_in,
    run_one,
    run_stages,
    save_stages,
    with_parcels,
)

from penstock.errors import HandlerFailedError, StorageError
from penstock.kernel import Extents, Leaf, Piece, StagedBatch, Written, WrittenBatch
from penstock.kernel.pipeline import FunctionStage
from penstock.kernel.protocols import DEFAULT_PLACEMENT
from penstock.stages import DeviceToHost, Flatten, LimitBytes, Write

MOST_FULL = DEFAULT_PLACEMENT.full_files

ALIGNED_FROM, PAGE = DEFAULT_PLACEMENT.page_from_bytes, DEFAULT_PLACEMENT.page_bytes

pytestmark = pytest.mark.anyio


def noise(nbytes: int, seed: int = 0) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


async def written_of(rig: Rig, tree: object, write: Write, *before: Any) -> list[WrittenBatch]:
    return await save_stages(rig.save_run(), tree, Flatten(), DeviceToHost(), *before, write)


def on_disk(rig: Rig, batches: list[WrittenBatch]) -> dict[tuple[int, tuple[int, ...]], bytes]:
    """Join the chunks from the files, after checking that each piece is at its recorded place."""
    chunks: dict[tuple[int, tuple[int, ...]], bytearray] = {}
    bases: dict[tuple[int, tuple[int, ...]], set[tuple[str, int]]] = {}
    for part in sorted(parts_of(batches), key=lambda part: (part.leaf, part.chunk, part.start)):
        data = (rig.temporary / part.file).read_bytes()[part.offset : part.offset + part.nbytes]
        assert len(data) == part.nbytes
        assert crc32c(data) == part.crc32c
        chunk = chunks.setdefault((part.leaf, part.chunk), bytearray())
        assert len(chunk) == part.start
        chunk += data
        bases.setdefault((part.leaf, part.chunk), set()).add((part.file, part.offset - part.start))

    assert all(len(places) == 1 for places in bases.values()), "a chunk is whole in one file"
    return {key: bytes(chunk) for key, chunk in chunks.items()}


def parts_of(batches: list[WrittenBatch]) -> list[Written]:
    return [part for batch in batches for part in batch.parts()]


async def test_bytes_land_where_written_says(rig: Rig) -> None:
    rig.limit(1 << 20, piece=1000)
    tree = [noise(size, size) for size in (0, 1, 999, 1000, 1001, 5500)]

    batches = await written_of(rig, [*tree, None], Write(), LimitBytes(700))

    assert on_disk(rig, batches) == {
        (at, (0,)): value.tobytes() for at, value in enumerate(tree) if value.size
    }
    assert sorted(leaf.index for batch in batches for leaf in batch.leaves) == list(range(7))
    assert len({part.file for part in parts_of(batches)}) == 1


async def test_progress_counts_leaves_and_bytes(rig: Rig) -> None:
    run = rig.save_run()
    await save_stages(run, [noise(100), noise(50), None], Flatten(), DeviceToHost(), Write())

    progress = run.progress.snapshot()
    assert (progress.leaves_done, progress.bytes_done) == (3, 150) == (3, progress.bytes_total)


async def leaf_of(rig: Rig, nbytes: int) -> Leaf:
    (batch,) = await save_stages(rig.save_run(), noise(nbytes), Flatten())
    leaf: Leaf = batch.leaves[0]
    return leaf.without_value()


async def test_a_chunk_is_put_together_from_batches_in_any_order_by_several_workers(rig: Rig) -> None:
    data = memoryview(noise(1000).tobytes())
    leaf = await leaf_of(rig, 1000)
    starts = [600, 0, 900, 300]
    pieces = [Piece(leaf, (0,), start, data[start : start + 300]) for start in starts]
    held = rig.store.hang_on("data.write_at")
    rig.store.hang_on("data.write_at", 2).release()

    async def let_go(batch: WrittenBatch) -> WrittenBatch:
        held.release()  # the first piece is written after the second, by the other worker
        return batch

    batches = await run_stages(
        rig.save_run(),
        feed([StagedBatch(extents=(Extents.of(piece),)) for piece in pieces]),
        Write(concurrency=2),
        FunctionStage(let_go),
    )

    assert on_disk(rig, batches) == {(0, (0,)): bytes(data)}
    assert rig.operations.count("create_data_file") == 1


async def test_a_file_that_has_grown_is_followed_by_another_one(rig: Rig) -> None:
    tree = [noise(100, at) for at in range(6)]
    rig.limits = type(rig.limits)(100, 1, 1000)

    batches = await written_of(rig, tree, Write(concurrency=1, file_bytes=150))

    files = [part.file for part in parts_of(batches)]
    assert len(set(files)) == 3
    assert all(files.count(file) == 2 for file in files)
    assert len(on_disk(rig, batches)) == 6
    assert files_in(rig.temporary) == set(files)


async def test_small_leaves_that_are_more_than_a_file_holds_are_divided_among_several(rig: Rig) -> None:
    batches = await written_of(rig, [noise(100, at) for at in range(10)], Write(file_bytes=250))

    parts = parts_of(batches)
    assert sorted(
        sum([part.nbytes for part in parts if part.file == file]) for file in {p.file for p in parts}
    ) == [
        100,
        300,
        300,
        300,
    ]
    assert len(on_disk(rig, batches)) == 10


async def test_of_many_files_few_are_open_at_once(rig: Rig) -> None:
    rig.limits = type(rig.limits)(100, 1, 1000)
    await written_of(rig, [noise(100, at) for at in range(20 * MOST_FULL)], Write(file_bytes=100))

    most = now = 0
    for name in rig.operations:
        now += {"create_data_file": 1, "data.close": -1}.get(name, 0)
        most = max(most, now)

    assert rig.operations.count("data.sync") == rig.operations.count("create_data_file") == 20 * MOST_FULL
    assert most <= 6 * MOST_FULL


async def test_a_file_that_was_just_made_is_not_taken_for_a_full_one(rig: Rig) -> None:
    each, together = ALIGNED_FROM // 8, 8
    rig.limits = type(rig.limits)(ALIGNED_FROM, together, ALIGNED_FROM)
    n_before = MOST_FULL + together  # files of the messages before the one that is placed meanwhile
    first_write = rig.store.hang_on("data.write_at")
    new_file = rig.store.hang_on("data.allocate", n_before + 1)
    closing = rig.store.hang_on("data.sync", n_before - 1)  # all but the last file to be filled
    tree = [noise(each, at) for at in range(n_before + together)]
    batches: list[WrittenBatch] = []

    async def write() -> None:
        batches.extend(await written_of(rig, tree, Write(concurrency=2, file_bytes=1)))

    async with create_task_group() as tasks:
        tasks.start_soon(write)
        await new_file.wait_reached()
        first_write.release()  # the worker of the first message closes the full files
        await closing.wait_reached()
        closing.release()
        new_file.release()

    assert on_disk(rig, batches) == {(at, (0,)): value.tobytes() for at, value in enumerate(tree)}
    synced: set[str] = set()
    for operation in rig.store.operations:
        assert operation.name != "data.write_at" or operation.path not in synced
        if operation.name == "data.sync":
            synced.add(operation.path)


async def test_a_chunk_in_pieces_stays_in_the_file_it_began_in(rig: Rig) -> None:
    rig.limit(1 << 20, piece=40)

    batches = await written_of(rig, [noise(1000), noise(1000, 1)], Write(file_bytes=50))

    assert len({part.file for part in parts_of(batches)}) == 2
    assert len(on_disk(rig, batches)) == 2


async def test_large_chunks_begin_on_a_page_and_small_ones_follow_each_other(rig: Rig) -> None:
    rig.limits = type(rig.limits)(1 << 30, 100, 1 << 30)
    sizes = (10, 20, ALIGNED_FROM, 7, ALIGNED_FROM + 1)

    batches = await written_of(rig, [noise(size) for size in sizes], Write())

    offsets = {part.leaf: part.offset for part in parts_of(batches)}
    assert offsets[2] % PAGE == offsets[4] % PAGE == 0
    assert offsets[1] == offsets[0] + 10
    assert offsets[3] == offsets[1] + 20
    assert len(on_disk(rig, batches)) == 5


async def test_pieces_that_follow_each_other_are_one_write(rig: Rig) -> None:
    await written_of(rig, [noise(10) for _ in range(50)], Write())

    assert rig.operations.count("data.write_at") == 1


async def test_pieces_at_neighbouring_places_of_two_files_are_two_writes(rig: Rig) -> None:
    (batch,) = await save_stages(rig.save_run(), [noise(200), noise(100)], Flatten())
    split, whole = (leaf.without_value() for leaf in batch.leaves)
    data = memoryview(noise(300, 1).tobytes())
    begun = (Extents.of(Piece(split, (0,), 0, data[:100])),)
    pieces = (Piece(whole, (0,), 0, data[200:]), Piece(split, (0,), 100, data[100:200]))
    after = tuple(map(Extents.of, pieces))

    batches = await run_one(
        rig.save_run(), Write(1, file_bytes=150), *[StagedBatch(extents=each) for each in (begun, after)]
    )

    assert on_disk(rig, batches) == {(0, (0,)): bytes(data[:200]), (1, (0,)): bytes(data[200:])}


async def test_each_file_is_synced_once_after_its_last_write_and_closed(rig: Rig) -> None:
    rig.limits = type(rig.limits)(100, 1, 1000)
    await written_of(rig, [noise(100, at) for at in range(9)], Write(file_bytes=300))

    files = {operation.path for operation in rig.store.operations if operation.name == "create_data_file"}
    assert len(files) == 3
    for file in files:
        names = [operation.name for operation in rig.store.operations if operation.path == file]
        assert names == ["create_data_file", *["data.write_at"] * 3, "data.sync", "data.close"]


async def test_nothing_is_written_for_leaves_without_bytes(rig: Rig) -> None:
    batches = await written_of(rig, {"n": None, "s": "text", "z": np.ones((0, 2))}, Write())

    assert parts_of(batches) == []
    assert rig.operations == ["kind", "check_writable"]  # a look at the destination


# Failing and cancelled


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("operation", ["data.write_at", "data.sync", "create_data_file", "make_directory"])
async def test_an_operation_that_fails_fails_the_stage(rig: Rig, operation: str, code: int) -> None:
    error = StorageError(operation, "path", "refused", code)
    rig.store.fail_on(operation, 1, error)
    rig.limit(100)

    with pytest.raises(StorageError) as raised:
        await written_of(rig, [noise(90), noise(90)], Write(), LimitBytes(100))

    assert raised.value is error
    assert raised.value.stage == "s3"
    opened = rig.operations.count("create_data_file") - (operation == "create_data_file")
    assert rig.operations.count("data.close") == opened


async def test_a_failed_sync_is_not_tried_again(rig: Rig) -> None:
    rig.store.fail_on("data.sync")

    with pytest.raises(StorageError):
        await written_of(rig, [noise(90)], Write())

    assert rig.operations[-2:] == ["data.sync", "data.close"]
    assert rig.operations.count("data.sync") == 1


async def test_a_torn_write_fails_the_stage(rig: Rig) -> None:
    rig.store.tear_on("data.write_at", 2)
    rig.limits = type(rig.limits)(100, 1, 1000)

    with pytest.raises(StorageError):
        await written_of(rig, [noise(90), noise(90)], Write())


async def test_a_file_that_cannot_be_closed_fails_the_save_and_the_others_are_closed(rig: Rig) -> None:
    error = StorageError("close", "path", "refused", errno.EIO)
    rig.store.fail_on("data.close", 1, error)
    rig.limits = type(rig.limits)(100, 1, 1000)

    with pytest.raises(StorageError) as raised:
        await written_of(rig, [noise(90), noise(90), noise(90)], Write(file_bytes=10))

    assert raised.value is error
    assert rig.operations.count("data.close") == 3


async def test_the_first_failure_counts_and_not_that_of_closing_after_it(rig: Rig) -> None:
    error = StorageError("write", "path", "refused", errno.ENOSPC)
    rig.store.fail_on("data.write_at", 1, error)
    rig.store.fail_on("data.close")

    with pytest.raises(StorageError) as raised:
        await written_of(rig, [noise(90)], Write())

    assert raised.value is error


@pytest.mark.parametrize("native", [False, True], ids=["scope", "task"])
@pytest.mark.parametrize("operation", ["data.write_at", "data.sync", "create_data_file", "make_directory"])
async def test_cancelled_midway_it_closes_its_files(rig: Rig, operation: str, native: bool) -> None:
    hang = rig.store.hang_on(operation)
    rig.limit(100)
    tree = [noise(90), noise(90)]

    await cancel_in(hang, lambda: written_of(rig, tree, Write(), LimitBytes(100)), native=native)


async def test_a_worker_cancelled_natively_while_a_file_is_made_loses_no_file(rig: Rig) -> None:
    # Task.cancel passes every shield of AnyIO: the thread's result is lost, but the file must not be.
    (batch,) = await save_stages(rig.save_run(), noise(10), Flatten(), DeviceToHost())
    hang = rig.store.hang_on("create_data_file")

    async def work() -> None:
        async with Write().open(rig.save_run()) as actor:
            result: Any = actor(batch)
            await result

    await cancel_in(hang, work, native=True)

    assert rig.operations[-2:] == ["create_data_file", "data.close"]


# Third parties


async def test_a_third_partys_background_work_is_waited_for(rig: Rig) -> None:
    handler = ParcelHandler()
    rig.registry = with_parcels(rig.registry, handler)

    await written_of(rig, {"a": noise(10), "p": Parcel("text")}, Write())

    assert (rig.temporary / "p").read_text() == "text"


async def test_a_third_partys_background_failure_names_the_leaf(rig: Rig) -> None:
    handler = ParcelHandler()
    error = handler.fail("write", "p")
    rig.registry = with_parcels(rig.registry, handler)

    with pytest.raises(HandlerFailedError) as raised:
        await written_of(rig, {"a": noise(10), "p": Parcel("text")}, Write())

    assert raised.value.key_path == "['p']"
    assert raised.value.__cause__ is error


async def test_cancelled_while_a_third_party_works_it_leaves_that_to_be_waited_for(rig: Rig) -> None:
    handler = ParcelHandler(when_asked=True)
    hang = handler.hang("write", "p")
    rig.registry = with_parcels(rig.registry, handler)

    async def work() -> None:
        await written_of(rig, {"p": Parcel("text")}, Write())

    await cancel_in(hang, work)

    await rig.wait_background()
    assert files_in(rig.temporary) == {"p"}

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import anyio
import pytest
from anyio.lowlevel import checkpoint
from crc32c import crc32c
from tests.stages.stage_rig import ParcelHandler, Rig, cancel_in, run_one, run_stages

from penstock.embedding import AdaptedHandler
from penstock.errors import ChecksumError, HandlerFailedError, PipelineError, StorageError, TruncatedDataError
from penstock.handlers import LocalStore
from penstock.kernel import (
    DirectRead,
    DriverRead,
    HostBatch,
    LeafSpec,
    ParamInfo,
    PlannedBatch,
    Read,
    ReadBatch,
    ReadLeaf,
    ScatterRead,
    StoredLeaf,
    Target,
)
from penstock.kernel.pipeline import FunctionStage
from penstock.stages import LimitBytes
from penstock.stages import read as module

pytestmark = pytest.mark.anyio

DATA = bytes(range(256)) * 4


@dataclass
class Buffer:
    nbytes: int
    bounds: tuple[tuple[int, int], ...] = ()
    data: bytearray = field(default_factory=bytearray)

    def __post_init__(self) -> None:
        self.data = bytearray(self.nbytes)

    def fresh(self) -> Buffer:
        raise NotImplementedError

    def view(self) -> memoryview:
        return memoryview(self.data)


def leaf_of(index: int, *reads: Read, staging: int = 0, handler: Any = None) -> ReadLeaf:
    info = ParamInfo((str(index),), (), f"[{index}]")
    return ReadLeaf(index, StoredLeaf(info, LeafSpec("t")), handler, Target((), staging), reads)


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "data"
    path.write_bytes(DATA)
    return str(path)


def direct(
    index: int, file: str, offset: int, nbytes: int, crc: int | None = None
) -> tuple[DirectRead, Buffer]:
    buffer = Buffer(nbytes)
    return DirectRead(index, file, offset, nbytes, buffer, 0, crc), buffer


async def read_all(rig: Rig, leaves: list[ReadLeaf], stage: module.Read | None = None) -> list[HostBatch]:
    """Read each leaf in a batch of its own."""
    batches = [ReadBatch((leaf,), leaf.reads) for leaf in leaves]
    return await run_one(rig.restore_run(), stage or module.Read(), *batches)


async def test_direct_reads_fill_their_places(rig: Rig, file: str) -> None:
    region = Buffer(30)
    reads = [DirectRead(0, file, 100 + at, 10, region, at) for at in (20, 0, 10)]

    (batch,) = await read_all(rig, [leaf_of(0, *reads)])

    assert bytes(region.data) == DATA[100:130]
    assert [leaf.index for leaf in batch.leaves] == [0]
    assert rig.operations == ["open_data_file", "file.read_at", "file.close"]  # adjacent ranges are one read


async def test_which_way_the_bytes_came_is_told(rig: Rig, file: str, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_bytes(DATA)

    await read_all(rig, [leaf_of(0, direct(0, file, 0, 10)[0], direct(0, str(other), 3, 7)[0])])

    assert rig.logged("data.read") == [{"n_files": 2, "direct_bytes": 0, "buffered_bytes": 17}]

    await read_all(rig, [leaf_of(0)])
    assert len(rig.logged("data.read")) == 1


@pytest.mark.parametrize("verify", [False, True])
async def test_large_reads_stay_by_themselves(rig: Rig, tmp_path: Path, verify: bool) -> None:
    path = tmp_path / "large"
    data = random.Random(0).randbytes(3 * module.LARGE)
    path.write_bytes(data)
    limits = [0, 5, 10, 10 + module.LARGE, 2 * module.LARGE, len(data)]
    got = bytearray(len(data))
    reads: list[Read] = []
    for start, end in pairwise(limits):

        def place(view: memoryview, start: int = start, end: int = end) -> None:
            got[start:end] = view

        reads.append(ScatterRead(0, str(path), start, end - start, place, crc32c(data[start:end])))

    await read_all(rig, [leaf_of(0, *reads)], module.Read(verify=verify))

    assert got == data
    assert rig.operations.count("file.read_at") == 4  # the two small ones are read together


async def test_scattered_reads_get_their_bytes(rig: Rig, file: str) -> None:
    got: list[tuple[int, bytes]] = []

    def into(at: int) -> Callable[[memoryview], None]:
        return lambda view: got.append((at, bytes(view)))

    reads = [ScatterRead(0, file, at, 5, into(at), crc32c(DATA[at : at + 5])) for at in (7, 50)]
    empty = ScatterRead(0, file, 0, 0, into(0))

    await read_all(rig, [leaf_of(0, *reads, empty)])

    assert sorted(got) == [(0, b""), (7, DATA[7:12]), (50, DATA[50:55])]


async def test_a_file_is_opened_once_for_all_batches_and_closed(rig: Rig, file: str, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_bytes(DATA)
    leaves = [leaf_of(at, direct(at, (file, str(other))[at % 2], 9 * at, 4)[0]) for at in range(18)]

    await read_all(rig, leaves, module.Read(concurrency=3))

    assert rig.operations.count("open_data_file") == 2
    assert rig.operations.count("file.close") == 2


async def test_a_leaf_spread_over_batches_is_passed_on_once_with_its_lease(rig: Rig, file: str) -> None:
    region = Buffer(90)
    reads = [DirectRead(0, file, at, 10, region, at) for at in range(0, 90, 10)]
    leaf = leaf_of(0, *reads, staging=90)
    lease = await rig.memory.acquire(90)
    batches = [
        ReadBatch((leaf,), tuple(reads[at : at + 2]), lease if at == 0 else None) for at in range(0, 9, 2)
    ]

    (batch,) = await run_one(rig.restore_run(), module.Read(concurrency=3), *batches)

    assert [each.index for each in batch.leaves] == [0]
    assert batch.staged is lease
    assert bytes(region.data) == DATA[:90]


async def test_the_last_batch_may_be_read_before_the_first(rig: Rig, file: str) -> None:
    region = Buffer(20)
    reads = [DirectRead(0, file, at, 10, region, at) for at in (0, 10)]
    leaf = leaf_of(0, *reads)
    order: list[str] = []
    gate = anyio.Event()

    async def late() -> None:
        await gate.wait()
        order.append("late")

    async def early() -> None:
        order.append("early")
        gate.set()

    leaf = leaf_of(0, DriverRead(0, 1, late), DriverRead(0, 1, early), *reads)
    batches = [
        ReadBatch((leaf,), (leaf.reads[0], leaf.reads[2])),
        ReadBatch((leaf,), (leaf.reads[1], leaf.reads[3])),
    ]

    (batch,) = await run_one(rig.restore_run(), module.Read(concurrency=2), *batches)

    assert order == ["early", "late"]
    assert [each.index for each in batch.leaves] == [0]
    assert bytes(region.data) == DATA[:20]


async def test_leaves_with_nothing_to_read_pass(rig: Rig) -> None:
    batches = await read_all(rig, [leaf_of(0), leaf_of(1)])

    assert [leaf.index for batch in batches for leaf in batch.leaves] == [0, 1]
    assert rig.operations == []


async def test_progress_counts_leaves_and_bytes(rig: Rig, file: str) -> None:
    run = rig.restore_run()
    leaf = leaf_of(0, *(direct(0, file, at, 10)[0] for at in (0, 10)))
    await run_one(run, module.Read(), *(ReadBatch((leaf,), (read,)) for read in leaf.reads))

    progress = run.progress.snapshot()
    assert (progress.leaves_done, progress.bytes_done) == (1, 20)


async def test_what_was_in_flight_is_given_back_once_it_is_read(rig: Rig, file: str) -> None:
    lease = await rig.memory.acquire(10)
    leaf = leaf_of(0, direct(0, file, 0, 10)[0])
    leased: list[int] = []

    async def look(batch: HostBatch) -> HostBatch:
        leased.append(rig.memory.statistics().leased)
        return batch

    message = ReadBatch((leaf,), leaf.reads, in_flight=lease)
    await run_stages(rig.restore_run(), module.Read(), FunctionStage(look), message=message)

    assert leased == [0]


async def test_a_file_that_two_workers_want_at_once_is_opened_once(rig: Rig, file: str) -> None:
    hang = rig.store.hang_on("open_data_file")

    async def let_go() -> None:
        while rig.threads.busy < 2:
            await checkpoint()
        for _ in range(100):  # time for the second thread to open the file, too, if it would
            await checkpoint()
        hang.release()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(let_go)
        await read_all(rig, [leaf_of(at, direct(at, file, at, 5)[0]) for at in range(2)])

    assert rig.operations.count("open_data_file") == 1


async def test_without_limit_bytes_leaf_batches_are_read(rig: Rig, file: str) -> None:
    read, buffer = direct(0, file, 3, 10)

    (batch,) = await run_one(rig.restore_run(), module.Read(), PlannedBatch((leaf_of(0, read), leaf_of(1))))

    assert [leaf.index for leaf in batch.leaves] == [0, 1]
    assert bytes(buffer.data) == DATA[3:13]


# Damage


@pytest.mark.parametrize("scattered", [False, True], ids=["direct", "scatter"])
async def test_a_flipped_byte_is_found_if_it_is_asked_for(rig: Rig, file: str, scattered: bool) -> None:
    scatters: list[bytes] = []

    def made(index: int, offset: int, crc: int) -> Read:
        if scattered:
            return ScatterRead(index, file, offset, 10, lambda view: scatters.append(bytes(view)), crc)
        return direct(index, file, offset, 10, crc)[0]

    good = made(0, 0, crc32c(DATA[:10]))
    bad = made(1, 10, crc32c(DATA[10:20]) ^ 1)
    batch = ReadBatch((leaf_of(0, good), leaf_of(1, bad)), (good, bad))

    with pytest.raises(ChecksumError, match="bytes 10 to 20") as raised:
        await run_one(rig.restore_run(), module.Read(), batch)

    assert raised.value.key_path == "[1]"
    assert raised.value.path == file
    assert len(scatters) <= 1
    rig.check_idle()

    await run_one(rig.restore_run(), module.Read(verify=False), batch)


@pytest.mark.parametrize("scattered", [False, True], ids=["direct", "scatter"])
@pytest.mark.parametrize("bare", [False, True], ids=["read, then summed", "summed as it is read"])
async def test_a_flipped_byte_of_a_large_read_is_found(
    rig: Rig, tmp_path: Path, scattered: bool, bare: bool
) -> None:
    path, data = str(tmp_path / "large"), bytearray(random.Random(0).randbytes(3 * module.LARGE))
    crc = crc32c(data[module.LARGE :])
    placed: list[bytes] = []
    read, buffer = direct(0, path, module.LARGE, 2 * module.LARGE, crc)
    wanted: Read = read
    if scattered:
        wanted = ScatterRead(
            0, path, module.LARGE, 2 * module.LARGE, lambda view: placed.append(bytes(view)), crc
        )

    def run(*, verify: bool = True) -> Awaitable[list[HostBatch]]:
        run = rig.restore_run()
        run.store = LocalStore() if bare else rig.store
        return run_one(run, module.Read(verify=verify), ReadBatch((leaf_of(0, wanted),), (wanted,)))

    Path(path).write_bytes(data)
    await run()
    assert (placed.pop() if scattered else buffer.data) == data[module.LARGE :]

    data[-1] ^= 1
    Path(path).write_bytes(data)
    with pytest.raises(ChecksumError, match=f"bytes {module.LARGE} to {3 * module.LARGE}"):
        await run()

    assert not placed
    await run(verify=False)
    assert (placed.pop() if scattered else buffer.data) == data[module.LARGE :]


async def test_a_truncated_file_is_found_and_the_leaf_is_named(rig: Rig, file: str) -> None:
    reads = [direct(at, file, len(DATA) - 20 + 10 * at, 10)[0] for at in range(3)]
    leaves = tuple(leaf_of(at, read) for at, read in enumerate(reads))

    with pytest.raises(TruncatedDataError) as raised:
        await run_one(rig.restore_run(), module.Read(), ReadBatch(leaves, tuple(reads)))

    assert raised.value.key_path == "[2]"
    assert (raised.value.needed, raised.value.found) == (len(DATA) + 10, len(DATA))
    assert "[2]" in str(raised.value)


@pytest.mark.parametrize("operation", ["open_data_file", "file.read_at"])
async def test_an_operation_that_fails_fails_the_stage_and_gives_back_leases(
    rig: Rig, file: str, operation: str
) -> None:
    rig.store.fail_on(operation)
    first, second = (leaf_of(at, direct(at, file, at, 10)[0], staging=30) for at in range(2))
    batches = [
        ReadBatch((leaf,), leaf.reads, await rig.memory.acquire(30), await rig.memory.acquire(10))
        for leaf in (first, second)
    ]

    with pytest.raises(StorageError) as raised:
        await run_one(rig.restore_run(), module.Read(), *batches)

    assert raised.value.stage == "x"


async def test_a_leaf_that_never_became_whole_gives_back_its_lease(rig: Rig, file: str) -> None:
    leaf = leaf_of(0, *(direct(0, file, at, 10)[0] for at in (0, 10)), staging=20)
    batch = ReadBatch((leaf,), leaf.reads[:1], await rig.memory.acquire(20))

    assert await run_one(rig.restore_run(), module.Read(), batch) == []


async def test_a_file_that_cannot_be_closed_does_not_keep_the_others_open(
    rig: Rig, file: str, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    other.write_bytes(DATA)
    rig.store.fail_on("file.close")
    reads = (direct(0, file, 0, 1)[0], direct(0, str(other), 0, 1)[0])

    with pytest.raises(StorageError):
        await read_all(rig, [leaf_of(0, *reads)])

    assert rig.operations.count("file.close") == 2


@pytest.mark.parametrize("native", [False, True], ids=["scope", "task"])
@pytest.mark.parametrize("operation", ["open_data_file", "file.read_at"])
async def test_cancelled_while_a_read_hangs_it_closes_files_and_gives_back_leases(
    rig: Rig, file: str, operation: str, native: bool
) -> None:
    hang = rig.store.hang_on(operation)
    leaves = tuple(leaf_of(at, direct(at, file, at * 20, 10)[0], staging=10) for at in range(4))

    async def work() -> None:
        await run_stages(rig.restore_run(), LimitBytes(10), module.Read(), message=PlannedBatch(leaves))

    await cancel_in(hang, work, native=native)


# Drivers


async def test_drivers_work_beside_the_files(rig: Rig, file: str) -> None:
    performed: list[int] = []

    def perform(at: int) -> Callable[[], Awaitable[None]]:
        async def run() -> None:
            await checkpoint()
            performed.append(at)

        return run

    reads = (DriverRead(0, 5, perform(0)), direct(0, file, 0, 4)[0], DriverRead(0, 5, perform(1)))

    (batch,) = await read_all(rig, [leaf_of(0, *reads)])

    assert sorted(performed) == [0, 1]
    assert [leaf.index for leaf in batch.leaves] == [0]


async def test_a_driver_that_fails_fails_the_stage_with_its_own_error(rig: Rig, file: str) -> None:
    async def fail() -> None:
        await checkpoint()
        raise ArithmeticError

    async def hang() -> None:
        await anyio.sleep_forever()

    with pytest.raises(ArithmeticError):
        await read_all(
            rig, [leaf_of(0, DriverRead(0, 5, hang), direct(0, file, 0, 4)[0], DriverRead(0, 5, fail))]
        )


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_driver_whose_future_somebody_else_cancels_is_an_error_and_not_a_leaf(rig: Rig) -> None:
    async def cancelled_elsewhere() -> None:
        future = asyncio.get_running_loop().create_future()
        future.cancel()
        await future

    with pytest.raises(PipelineError, match="something that it awaited was cancelled"):
        await read_all(rig, [leaf_of(0, DriverRead(0, 5, cancelled_elsewhere))])


async def test_a_driver_that_hangs_is_cancelled(rig: Rig) -> None:
    reached = anyio.Event()
    cleaned_up: list[bool] = []

    async def hang() -> None:
        reached.set()
        try:
            await anyio.sleep_forever()
        finally:
            cleaned_up.append(True)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(read_all, rig, [leaf_of(0, DriverRead(0, 5, hang))])
        await reached.wait()
        tasks.cancel_scope.cancel()

    assert cleaned_up == [True]


# Third parties


async def test_a_third_partys_leaf_is_read_by_its_handler(rig: Rig, file: str) -> None:
    (rig.root / "0").write_text("text")
    handler = AdaptedHandler(ParcelHandler())
    info = ParamInfo(("0",), (), "[0]", str(rig.root))
    leaf = ReadLeaf(0, StoredLeaf(info, LeafSpec("parcel")), handler)
    plain = leaf_of(1, direct(1, file, 0, 4)[0])

    read, other = await run_one(
        rig.restore_run(),
        module.Read(),
        ReadBatch((leaf,), (), handler=handler),
        ReadBatch((plain,), plain.reads),
    )

    ((index, value),) = read.ready
    assert (index, value.text) == (0, "text")
    assert (read.leaves, [each.index for each in other.leaves]) == ((), [1])


async def test_a_third_partys_failure_names_the_leaf(rig: Rig) -> None:
    handler = ParcelHandler()
    error = handler.fail("deserialize", "0")

    adapted = AdaptedHandler(handler)
    batch = PlannedBatch((leaf_of(0, handler=adapted),), handler=adapted)

    with pytest.raises(HandlerFailedError) as raised:
        await run_one(rig.restore_run(), module.Read(), batch)

    assert raised.value.key_path == "[0]"
    assert raised.value.__cause__ is error

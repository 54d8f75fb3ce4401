"""Small leaves that are read in packs give the same result as leaves that are read one by one."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import msgpack
import numpy as np
import pytest
from tests.stages.stage_rig import Rig, cancel_in, feed, run_stages

from penstock.errors import ChecksumError, PenstockError, StructureMismatchError, TruncatedDataError
from penstock.kernel import (
    HostBatch,
    PlannedBatch,
    ReadableFile,
    ReadBatch,
    ReadLeaves,
    RestoredTree,
    RestoreRequest,
    TreeToSave,
    run_pipeline,
)
from penstock.kernel.pipeline import FunctionStage
from penstock.kernel.protocols import SharedRead
from penstock.pipelines import save_pipeline
from penstock.stages import Assemble, HostToDevice, LimitBytes, Locate, Plan, Prioritise, Read
from penstock.stages.planning.restore_planner import SMALL
from penstock.stages.read import GAP, fill_shared

pytestmark = pytest.mark.anyio

TREE: dict[str, Any] = {
    **{f"n{at:02}": np.full((3, 2), at, np.float32) for at in range(12)},
    **{f"j{at:02}": jnp.full((5,), at, jnp.bfloat16) for at in range(12)},
    "large": np.arange(SMALL + 1, dtype=np.uint8),
    "scalar": 3,
    "none": None,
    "empty": np.zeros((0, 3)),
}


async def saved(rig: Rig, tree: object = TREE) -> str:
    await run_pipeline(save_pipeline(), rig.save_run(), TreeToSave(tree))
    return str(rig.final)


async def planned(rig: Rig, *like: object) -> list[PlannedBatch]:
    request = RestoreRequest(str(rig.final), like[0] if like else None, bool(like))
    return await run_stages(rig.restore_run(), Locate(), Plan(), message=request)


def packs_of(batches: Sequence[PlannedBatch]) -> list[ReadLeaves]:
    """Return the leaves of the batches that are read together."""
    tables = [ReadLeaves.of(batch.leaves) for batch in batches]
    return [leaves for leaves in tables if leaves.shared is not None]


async def restored(rig: Rig, like: object, *between: Any, read: Read | None = None) -> Any:
    request = RestoreRequest(str(rig.final), like, has_like=True)
    stages = (Locate(), Plan(), *between, read or Read(), HostToDevice(), Assemble())
    (tree,) = await run_stages(rig.restore_run(), *stages, message=request)
    assert isinstance(tree, RestoredTree)
    return tree.tree


def check_equal(found: Any, wanted: Any = TREE) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert type(found[name]) is type(value), name
        if value is not None:
            assert np.asarray(found[name]).dtype == np.asarray(value).dtype, name
            np.testing.assert_array_equal(np.asarray(found[name]), np.asarray(value), strict=True)


@pytest.mark.parametrize("with_like", [True, False])
async def test_small_leaves_of_a_file_are_one_batch(rig: Rig, with_like: bool) -> None:
    await saved(rig)

    batches = await planned(rig, *([TREE] if with_like else []))

    packs = packs_of(batches)
    names = [{pack.info(index).name for index in pack.indices} for pack in packs]
    assert names == [{name for name in TREE if name[0] in "jns" and name != "none"}]
    others = {leaf.info.name for batch in batches for leaf in batch.leaves if batch.leaves not in packs}
    assert others == {"large", "none", "empty"}


async def test_every_leaf_is_restored_as_it_was(rig: Rig) -> None:
    await saved(rig)
    check_equal(await restored(rig, TREE, LimitBytes()))


async def test_packed_reads_work_without_limit_bytes(rig: Rig) -> None:
    await saved(rig)
    check_equal(await restored(rig, TREE))


async def test_a_stage_may_unpack(rig: Rig) -> None:
    async def unpack(batch: PlannedBatch) -> PlannedBatch:
        return replace(batch, leaves=tuple(batch.leaves))

    await saved(rig)
    check_equal(await restored(rig, TREE, FunctionStage(unpack), LimitBytes()))


async def filled(rig: Rig, look: Callable[[HostBatch], None]) -> Any:
    """Restore with a stage that looks at the leaves that were read."""

    async def see(batch: HostBatch) -> HostBatch:
        look(batch)
        return batch

    stages = (Locate(), Plan(), Read(), FunctionStage(see), HostToDevice(), Assemble())
    request = RestoreRequest(await saved(rig), TREE, has_like=True)
    (restored,) = await run_stages(rig.restore_run(), *stages, message=request)
    return restored.tree


async def test_a_stage_sees_every_byte_in_packs_or_not(rig: Rig) -> None:
    seen: dict[str, bytes] = {}
    in_packs: list[bool] = []

    def look(batch: HostBatch) -> None:
        in_packs.append(ReadLeaves.of(batch.leaves).shared is not None)
        for part in batch.parts():
            assert part.bounds == tuple((0, size) for size in part.spec.shape or ())
            assert part.key_path not in seen
            seen[part.key_path] = bytes(part.data)

    check_equal(await filled(rig, look))

    assert set(in_packs) == {True, False}
    arrays = {f"[{name!r}]": np.asarray(value) for name, value in TREE.items() if value is not None}
    assert {name: data for name, data in seen.items() if data} == {
        name: array.tobytes() for name, array in arrays.items() if array.nbytes
    }


async def test_a_stage_may_overwrite_every_byte(rig: Rig) -> None:
    def look(batch: HostBatch) -> None:
        for part in batch.parts():
            part.data[:] = bytes(len(part.data))

    found = await filled(rig, look)

    check_equal(found, {name: value if value is None else value * 0 for name, value in TREE.items()})


async def test_batches_are_bounded(rig: Rig) -> None:
    await saved(rig)
    rig.limits = replace(rig.limits, batch_leaves=5, batch_bytes=100)

    packs = packs_of(await planned(rig))

    assert max(len(pack) for pack in packs) == 5
    assert max(pack.nbytes for pack in packs) <= 100
    assert len(packs) == 6


async def test_a_pack_above_what_may_be_in_flight_is_cut(rig: Rig) -> None:
    await saved(rig)
    admitted: list[ReadBatch] = []

    async def see(batch: ReadBatch) -> ReadBatch:
        admitted.append(batch)
        return batch

    check_equal(await restored(rig, TREE, LimitBytes(50), FunctionStage(see)))

    packs = [batch for batch in admitted if ReadLeaves.of(batch.leaves).shared is not None]
    assert len(packs) == 9
    assert all(batch.nbytes <= 50 for batch in packs)


async def test_the_buffers_are_leased(rig: Rig) -> None:
    rig.limit(100)
    await saved(rig)

    check_equal(await restored(rig, TREE, LimitBytes()))

    assert rig.memory.statistics().peak <= 100 + SMALL + 1


async def test_values_keep_no_memory_but_their_own(rig: Rig) -> None:
    await saved(rig)
    found = await restored(rig, TREE)

    for at in range(12):
        array = found[f"n{at:02}"]
        assert array.flags.owndata
        assert array.flags.writeable
        assert array.flags.aligned


async def test_prioritised_leaves_go_first(rig: Rig) -> None:
    await saved(rig)
    request = RestoreRequest(str(rig.final))
    first = Prioritise(("n03", "j*", "large"))

    batches = await run_stages(rig.restore_run(), Locate(), Plan(), first, message=request)

    urgent = {leaf.info.name for batch in batches if batch.prioritised for leaf in batch.leaves}
    assert urgent == {"n03", "large", *[f"j{at:02}" for at in range(12)]}
    assert [batch.prioritised for batch in batches] == sorted(
        [batch.prioritised for batch in batches], reverse=True
    )
    assert {leaf.info.name for batch in batches for leaf in batch.leaves} == set(TREE)


async def test_a_leaf_that_does_not_fit_is_a_difference(rig: Rig) -> None:
    await saved(rig)
    like = {**TREE, "n01": np.zeros((3, 2), np.float64), "n02": np.zeros(6, np.float32), "j04": jnp.zeros(4)}

    with pytest.raises(StructureMismatchError) as raised:
        await planned(rig, like)

    found = {(each.kind, each.key_path) for each in raised.value.differences}
    assert found == {("dtype", "['n01']"), ("shape", "['n02']"), ("dtype", "['j04']")}


async def test_packed_leaves_are_restored_into_other_dtypes_and_types(rig: Rig) -> None:
    await saved(rig)
    swapped = {
        name: jnp.asarray(value) if name[0] == "n" and value is not None else value
        for name, value in TREE.items()
    }
    swapped |= {name: np.asarray(value) for name, value in TREE.items() if name[0] == "j"}
    swapped |= {"n01": np.ndarray, "j01": jax.Array, "large": np.ndarray, "empty": np.ndarray}

    found = await restored(rig, swapped)

    assert isinstance(found["n00"], jax.Array)
    assert type(found["j00"]) is np.ndarray
    assert type(found["n01"]) is np.ndarray
    assert isinstance(found["j01"], jax.Array)
    for name, value in TREE.items():
        if value is not None:
            np.testing.assert_array_equal(np.asarray(found[name]), np.asarray(value))


def only_file(rig: Rig) -> tuple[Path, list[int]]:
    document = msgpack.unpackb((rig.final / "_PENSTOCK_INTEGRITY").read_bytes())
    ((name, columns),) = document["files"].items()
    return rig.final / name, np.frombuffer(columns["offsets"], "<u8").tolist()


async def test_a_flipped_byte_names_the_leaf(rig: Rig) -> None:
    await saved(rig, {f"n{at}": np.full(4, at, np.uint8) for at in range(4)})
    file, offsets = only_file(rig)
    data = bytearray(file.read_bytes())
    data[offsets[2] + 1] ^= 1
    file.write_bytes(data)
    like = {f"n{at}": np.ndarray for at in range(4)}

    with pytest.raises(ChecksumError) as raised:
        await restored(rig, like)

    assert raised.value.key_path == "['n2']"
    assert f"bytes {offsets[2]} to {offsets[2] + 4}" in str(raised.value)
    found = await restored(rig, like, read=Read(verify=False))
    assert found["n2"].tolist() == [2, 3, 2, 2]


async def test_a_file_cut_short_after_it_was_opened_names_the_leaf(rig: Rig) -> None:
    await saved(rig, {f"n{at}": np.full(4, at, np.uint8) for at in range(4)})
    batches = await planned(rig)
    file, offsets = only_file(rig)
    file.write_bytes(file.read_bytes()[: offsets[2] + 2])

    with pytest.raises(TruncatedDataError) as raised:
        await run_stages(rig.restore_run(), feed(batches), Read())

    assert raised.value.key_path == "['n2']"


class Bytes:
    """A readable file that counts reads."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.reads: list[tuple[int, int]] = []

    def read_at(self, offset: int, buffers: Any, seen: Any = None) -> None:
        (buffer,) = buffers
        self.reads.append((offset, len(buffer)))
        buffer[:] = self.data[offset : offset + len(buffer)]


@pytest.mark.parametrize(
    ("places", "reads"),
    [
        ([(0, 4), (4, 4), (8, 4)], [(0, 12)]),
        ([(8, 4), (0, 4), (4, 4)], [(0, 12)]),
        ([(100, 4)], [(100, 4)]),
        ([(0, 4), (4 + GAP, 4)], [(0, 8 + GAP)]),
        ([(0, 4), (5 + GAP, 4)], [(0, 4), (5 + GAP, 4)]),
        ([(7 + GAP, 2), (0, 4), (2, 4)], [(0, 4), (2, 4), (7 + GAP, 2)]),
    ],
)
def test_reads_are_few_and_gaps_small(places: list[tuple[int, int]], reads: list[tuple[int, int]]) -> None:
    file = Bytes(bytes(at % 251 for at in range(3 * GAP)))
    read = SharedRead(
        leaves=range(len(places)),
        file="/f",
        specs=(),
        offsets=[offset for offset, _ in places],
        sizes=[nbytes for _, nbytes in places],
        crc32cs=[-1] * len(places),
    )
    opened: ReadableFile = file  # type: ignore[assignment]  # what is not used is left out

    fill_shared(opened, read, lambda _: pytest.fail("nobody asked"), verify=True)

    assert file.reads == reads
    for (offset, nbytes), start in zip(places, read.buffer.starts, strict=True):
        assert read.buffer.data[start : start + nbytes] == file.data[offset : offset + nbytes]


@pytest.mark.parametrize("operation", ["open_data_file", "file.read_at"])
async def test_an_operation_that_fails_gives_back_every_lease(rig: Rig, operation: str) -> None:
    await saved(rig)
    batches = await planned(rig)
    rig.store.fail_on(operation, rig.operations.count(operation) + 1)

    with pytest.raises(PenstockError):
        await run_stages(rig.restore_run(), feed(batches), LimitBytes(50), Read())

    rig.check_idle()


@pytest.mark.parametrize("native", [False, True])
async def test_cancelled_midway_every_lease_is_given_back(rig: Rig, native: bool) -> None:
    await saved(rig)
    batches = await planned(rig)
    hang = rig.store.hang_on("file.read_at", rig.operations.count("file.read_at") + 2)

    async def work() -> None:
        await run_stages(rig.restore_run(), feed(batches), LimitBytes(50), Read())

    await cancel_in(hang, work, native=native)
    rig.check_idle()


async def test_cancelled_while_waiting_for_the_budget(rig: Rig) -> None:
    await saved(rig)
    (batch, *_) = [batch for batch in await planned(rig) if packs_of([batch])]
    run = rig.restore_run()

    async def endless(batch: ReadBatch) -> AsyncIterator[ReadBatch]:
        yield batch
        raise PenstockError("stop")

    with pytest.raises(PenstockError, match="stop"):
        await run_stages(run, feed([batch]), LimitBytes(50), FunctionStage(endless))

    rig.check_idle()


async def test_packs_and_leaves_are_counted_alike(rig: Rig) -> None:
    await saved(rig)
    run = rig.restore_run()
    request = RestoreRequest(str(rig.final), TREE, has_like=True)

    await run_stages(run, Locate(), Plan(), LimitBytes(), Read(), message=request)

    progress = run.progress.snapshot()
    nbytes = sum(np.asarray(value).nbytes for value in TREE.values() if value is not None)
    assert (progress.leaves_total, progress.bytes_total) == (len(TREE), nbytes)
    assert (progress.leaves_done, progress.bytes_done) == (len(TREE), nbytes)

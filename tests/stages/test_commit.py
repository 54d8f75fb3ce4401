from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import jax.numpy as jnp
import numpy as np
import pytest
from anyio import create_task_group
from flax import core
from tests.stages.stage_rig import Parcel, ParcelHandler, Rig, cancel_in, files_in, save_stages

from penstock.errors import HandlerFailedError, IncompletePipelineError, StorageError
from penstock.kernel import Committed, SaveRun, TreeToSave, Written, WrittenBatch, run_pipeline
from penstock.kernel.pipeline import FunctionStage
from penstock.kernel.protocols import WrittenTable
from penstock.pipelines import save_pipeline
from penstock.stages import Commit, DeviceToHost, Flatten, Write

pytestmark = pytest.mark.anyio

TREE = {"a": np.arange(100, dtype=np.uint8), "b": jnp.arange(30), "c": None, "d": "text", "e": 3}


def piecewise(rig: Rig) -> SaveRun:
    rig.limit(1000, piece=40)
    return rig.save_run()


async def committed(run: SaveRun, tree: object, *before: object) -> Committed:
    (message,) = await save_stages(run, tree, Flatten(), DeviceToHost(), Write(), *before, Commit())
    assert isinstance(message, Committed)
    return message


async def test_everything_lies_under_the_temporary_name_and_is_counted(rig: Rig) -> None:
    message = await committed(rig.save_run(), TREE)

    assert message == Committed(5, 100 + 120 + 8, 1)
    assert not rig.final.exists()
    assert {"_METADATA", "manifest.ocdbt", "commit_success.txt"} <= files_in(rig.temporary)


async def test_documents_become_durable_in_order_and_directories_after_them(rig: Rig) -> None:
    await committed(rig.save_run(), TREE)

    operations = list(rig.store.operations)
    names = [operation.name for operation in operations]
    closed = names.index("data.close")
    assert names.index("data.sync") < closed
    assert "write_file" not in names[:closed]
    after = operations[closed + 1 :]
    root = str(rig.temporary)
    documents = [operation.path[len(root) + 1 :] for operation in after if operation.name == "write_file"]
    assert documents[0].startswith("d/")
    assert documents[1:3] == ["manifest.ocdbt", "_METADATA"]
    assert documents[-1] == "commit_success.txt"
    assert len(set(documents)) == len(documents)
    last_document = max(at for at, operation in enumerate(after) if operation.name == "write_file")
    synced = [operation.path.rstrip("/") for operation in after[last_document + 1 :]]
    assert {operation.name for operation in after[last_document + 1 :]} == {"sync_directory"}
    assert set(synced) == {root, f"{root}/d", f"{root}/array_metadatas"}
    assert len(synced) == 3


async def test_a_tree_without_a_leaf_is_committed(rig: Rig) -> None:
    assert await committed(rig.save_run(), cast("Any", core).FrozenDict({})) == Committed(0, 0, 0)
    assert (rig.temporary / "commit_success.txt").exists()


def with_parts(batch: WrittenBatch, parts: Sequence[Written]) -> WrittenBatch:
    return replace(batch, written=WrittenTable.of(parts, batch.written.specs))


def unpacked(batch: WrittenBatch, keep: Callable[[Written], bool]) -> WrittenBatch:
    return with_parts(batch, [part for part in batch.parts() if keep(part)])


def drop_leaf(batch: WrittenBatch) -> WrittenBatch | None:
    keep = tuple(leaf for leaf in batch.leaves if leaf.info.name != "b")
    return replace(unpacked(batch, lambda part: part.leaf != 1), leaves=keep)


def drop_leaf_only(batch: WrittenBatch) -> WrittenBatch:
    return replace(batch, leaves=tuple(leaf for leaf in batch.leaves if leaf.info.name != "b"))


def drop_half_of_the_bytes(batch: WrittenBatch) -> WrittenBatch:
    return unpacked(batch, lambda part: part.leaf != 1 or part.start == 0)


def drop_all_bytes(batch: WrittenBatch) -> WrittenBatch:
    return unpacked(batch, lambda part: part.leaf != 1)


def drop_table(batch: WrittenBatch) -> WrittenBatch:
    return with_parts(batch, () if any(part.leaf == 1 for part in batch.parts()) else tuple(batch.parts()))


def twice(batch: WrittenBatch) -> WrittenBatch:
    parts = tuple(batch.parts())
    return with_parts(batch, parts + tuple(part for part in parts if part.leaf == 1))


def table_twice(batch: WrittenBatch) -> WrittenBatch:
    return with_parts(batch, tuple(batch.parts()) * 2)


def leaf_twice(batch: WrittenBatch) -> WrittenBatch:
    again = [leaf for leaf in batch.leaves if leaf.index == 1]
    return replace(batch, leaves=(*batch.leaves, *again))


@pytest.mark.parametrize(
    "damage",
    [drop_leaf, drop_leaf_only, drop_half_of_the_bytes, drop_all_bytes, twice],
    ids=lambda f: f.__name__,
)
async def test_a_leaf_that_does_not_arrive_whole_is_named_and_nothing_is_published(
    rig: Rig, damage: Callable[[WrittenBatch], WrittenBatch | None]
) -> None:
    async def meddle(batch: WrittenBatch) -> WrittenBatch | None:
        return damage(batch)

    run = piecewise(rig)
    pipeline = save_pipeline().insert_after("write", meddle)
    with pytest.raises(IncompletePipelineError) as raised:
        await run_pipeline(pipeline, run, TreeToSave(TREE))

    assert raised.value.key_path == "['b']"
    assert (raised.value.planned, raised.value.arrived) == (5, 4)
    assert raised.value.stage == "commit"
    assert not rig.final.exists()
    assert "write_file" not in rig.operations
    assert "publish" not in rig.operations


@pytest.mark.parametrize("damage", [leaf_twice, drop_table, table_twice], ids=lambda f: f.__name__)
async def test_what_arrives_twice_or_not_at_all_is_an_error(
    rig: Rig, damage: Callable[[WrittenBatch], WrittenBatch]
) -> None:
    async def meddle(batch: WrittenBatch) -> WrittenBatch:
        return damage(batch)

    with pytest.raises(IncompletePipelineError):
        await committed(rig.save_run(), TREE, FunctionStage(meddle))


# Third parties


async def test_a_third_partys_finalize_is_called_once_before_the_documents(rig: Rig) -> None:
    handler = ParcelHandler()

    class Special(Parcel):
        """A second type, registered with the same handler."""

    rig.registry = rig.registry.copy()
    rig.registry.register(Parcel, handler)
    rig.registry.register(Special, handler)
    hang = handler.hang("finalize", "")
    written: list[int] = []

    async def look() -> None:
        await hang.wait_reached()
        written.append(rig.operations.count("write_file"))
        hang.release()

    async with create_task_group() as tasks:
        tasks.start_soon(look)
        await committed(rig.save_run(), {"p": Parcel("x"), "q": Parcel("y"), "r": Special("z")})

    assert handler.finalized == [str(rig.temporary)]
    assert written == [0]


async def test_what_a_third_party_wrote_is_made_durable_before_the_documents(rig: Rig) -> None:
    handler = ParcelHandler()
    rig.registry = rig.registry.copy()
    rig.registry.register(Parcel, handler)

    await committed(rig.save_run(), {"p": Parcel("x"), "a": np.arange(3)})

    assert rig.operations.count("sync_tree") == 1
    assert rig.operations.index("sync_tree") < rig.operations.index("write_file")


async def test_without_third_parties_each_file_is_synced_once(rig: Rig) -> None:
    await committed(rig.save_run(), {"a": np.arange(3)})

    assert "sync_tree" not in rig.operations


async def test_a_third_partys_finalize_that_fails_fails_the_commit(rig: Rig) -> None:
    handler = ParcelHandler()
    error = handler.fail("finalize", "")
    rig.registry = rig.registry.copy()
    rig.registry.register(Parcel, handler)

    with pytest.raises(HandlerFailedError) as raised:
        await committed(rig.save_run(), {"p": Parcel("x")})

    assert raised.value.__cause__ is error
    assert "write_file" not in rig.operations


async def test_finalize_is_not_called_if_a_leaf_is_absent(rig: Rig) -> None:
    handler = ParcelHandler()
    rig.registry = rig.registry.copy()
    rig.registry.register(Parcel, handler)

    async def lose(batch: WrittenBatch) -> WrittenBatch:
        return replace(batch, leaves=())

    with pytest.raises(IncompletePipelineError):
        await committed(rig.save_run(), {"p": Parcel("x")}, FunctionStage(lose))

    assert handler.finalized == []


# Failing and cancelled


@pytest.mark.parametrize(("operation", "nth"), [("write_file", 1), ("write_file", 3), ("sync_directory", 2)])
async def test_an_operation_that_fails_fails_the_commit(rig: Rig, operation: str, nth: int) -> None:
    rig.store.fail_on(operation, nth)

    with pytest.raises(StorageError) as raised:
        await committed(rig.save_run(), TREE)

    assert raised.value.stage == "s3"
    assert rig.operations[-1] == operation


@pytest.mark.parametrize("native", [False, True], ids=["scope", "task"])
async def test_a_cancelled_commit_publishes_nothing(rig: Rig, native: bool) -> None:
    hang = rig.store.hang_on("write_file", 2)

    async def work() -> None:
        await run_pipeline(save_pipeline(), rig.save_run(), TreeToSave(TREE))

    await cancel_in(hang, work, native=native)

    assert not rig.final.exists()

from __future__ import annotations

import shutil
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.byte_counting import files_of_arrays
from tests.stages.stage_rig import Parcel, ParcelHandler, Rig, cancel_in, run_one, run_stages, with_parcels

from penstock.errors import (
    CorruptCheckpointError,
    IncompleteCheckpointError,
    NoHandlerError,
    NotACheckpointError,
    StorageError,
    StructureMismatchError,
    TreeDifference,
)
from penstock.kernel import Located, PlannedBatch, ReadLeaf, RestoreRequest, TreeToSave, run_pipeline
from penstock.pipelines import save_pipeline
from penstock.stages import Locate, Plan

pytestmark = pytest.mark.anyio

TREE = {
    "opt": {"mu": np.zeros((2, 3), np.float32), "count": 3},
    "params": [jnp.ones(4), jnp.ones((2, 2), jnp.bfloat16)],
    "none": None,
    "name": "text",
}


async def saved(rig: Rig, tree: object = TREE) -> Path:
    await run_pipeline(save_pipeline(), rig.save_run(), TreeToSave(tree))
    return rig.final


def request(rig: Rig, *like: object) -> RestoreRequest:
    return RestoreRequest(str(rig.final), like[0] if like else None, bool(like))


async def planned(rig: Rig, *like: object) -> list[ReadLeaf]:
    batches = await run_stages(rig.restore_run(), Locate(), Plan(), message=request(rig, *like))
    return [leaf for batch in batches for leaf in batch.leaves]


async def differences(rig: Rig, like: object) -> dict[tuple[str, str], TreeDifference]:
    with pytest.raises(StructureMismatchError) as raised:
        await planned(rig, like)

    assert raised.value.stage == "s1"
    assert raised.value.path == str(rig.final)
    found = {(each.kind, each.key_path): each for each in raised.value.differences}
    assert len(found) == len(raised.value.differences)
    assert all(
        str(each) in str(raised.value) for each in raised.value.differences[: StructureMismatchError.SHOWN]
    )
    return found


# Locate


async def test_a_checkpoint_is_located_without_reading_array_bytes(rig: Rig) -> None:
    await saved(rig)

    (located,) = await run_one(rig.restore_run(), Locate(), request(rig, [1]))

    assert isinstance(located, Located)
    assert (located.request.like, located.request.has_like) == ([1], True)
    names = [stored.info.name for stored in located.checkpoint.leaves]
    assert sorted(names) == ["name", "none", "opt.count", "opt.mu", "params.0", "params.1"]
    opened = {operation.path for operation in rig.store.operations if operation.name == "open_data_file"}
    arrays = files_of_arrays(rig.final)
    assert arrays
    assert not opened & arrays


async def test_where_nothing_is_there_is_no_checkpoint(rig: Rig) -> None:
    with pytest.raises(NotACheckpointError) as raised:
        await run_one(rig.restore_run(), Locate(), request(rig))

    assert raised.value.stage == "x"


async def test_an_interrupted_save_is_said_to_be_one(rig: Rig) -> None:
    path = await saved(rig)
    shutil.move(path, rig.temporary)

    with pytest.raises(IncompleteCheckpointError):
        await run_one(rig.restore_run(), Locate(), RestoreRequest(str(rig.temporary)))


async def test_a_damaged_document_is_named(rig: Rig) -> None:
    path = await saved(rig)
    (path / "_METADATA").write_bytes(b"{")

    with pytest.raises(CorruptCheckpointError, match="_METADATA"):
        await run_one(rig.restore_run(), Locate(), request(rig))


async def test_a_document_that_cannot_be_read_fails_the_stage(rig: Rig) -> None:
    await saved(rig)
    rig.store.fail_on("read_file", rig.operations.count("read_file") + 1)

    with pytest.raises(StorageError):
        await run_one(rig.restore_run(), Locate(), request(rig))


@pytest.mark.parametrize("native", [False, True], ids=["scope", "task"])
async def test_locating_is_cancelled_when_the_read_that_hangs_returns(rig: Rig, native: bool) -> None:
    await saved(rig)
    hang = rig.store.hang_on("read_file", rig.operations.count("read_file") + 1)

    await cancel_in(hang, lambda: run_one(rig.restore_run(), Locate(), request(rig)), native=native)


# Plan


async def test_without_a_target_every_leaf_is_read_once(rig: Rig) -> None:
    await saved(rig)
    run = rig.restore_run()

    batches = await run_stages(run, Locate(), Plan(), message=request(rig))

    for batch in batches:
        assert [leaf.index for leaf in batch.leaves] == sorted(leaf.index for leaf in batch.leaves)
    leaves = sorted([leaf for batch in batches for leaf in batch.leaves], key=lambda leaf: leaf.index)
    assert [leaf.index for leaf in leaves] == list(range(6))
    assert {leaf.info.name: leaf.nbytes for leaf in leaves} == {
        "opt.mu": 24,
        "opt.count": 8,
        "params.0": 16,
        "params.1": 8,
        "none": 0,
        "name": 0,
    }
    (plan,) = {id(batch.plan): batch.plan for batch in batches}.values()
    assert [info.name for info in plan.infos] == [leaf.info.name for leaf in leaves]
    assert plan.directory == str(rig.final)
    progress = run.progress.snapshot()
    assert (progress.leaves_total, progress.bytes_total) == (6, 56)


async def test_with_a_target_leaves_come_in_its_order(rig: Rig) -> None:
    await saved(rig)
    like = OrderedDict(
        params=(jnp.ones(4), jnp.ones((2, 2), jnp.bfloat16)),
        opt=OrderedDict(mu=np.ndarray, count=int),
        none=None,
        name="",
    )

    leaves = await planned(rig, like)

    assert [leaf.info.name for leaf in leaves] == [
        *("params.0", "params.1", "opt.mu", "opt.count", "none", "name")
    ]


async def test_batches_are_bounded(rig: Rig) -> None:
    await saved(rig)
    rig.limits = replace(rig.limits, batch_leaves=2, batch_bytes=20)

    batches: list[PlannedBatch] = await run_stages(rig.restore_run(), Locate(), Plan(), message=request(rig))

    assert all(len(batch.leaves) <= 2 for batch in batches)
    assert all(len(batch.leaves) == 1 or sum(leaf.nbytes for leaf in batch.leaves) <= 20 for batch in batches)


async def test_reads_are_no_larger_than_a_piece(rig: Rig) -> None:
    rig.limit(1 << 20, piece=10)
    await saved(rig, {"a": np.zeros(100, np.uint8)})

    (leaf,) = await planned(rig)

    assert [read.nbytes for read in leaf.reads] == [10] * 10


async def test_missing_and_unexpected_leaves_are_listed_with_the_nearest_name(rig: Rig) -> None:
    await saved(rig)
    like = {
        "opt": {"mu": TREE["opt"]["mu"], "counter": 3},  # type: ignore[call-overload,index]
        "params": TREE["params"],
        "none": None,
        "entirely-else": jnp.ones(7),
    }

    found = await differences(rig, like)

    assert set(found) == {
        ("missing", "['opt']['counter']"),
        ("missing", "['entirely-else']"),
        ("unexpected", "['opt']['count']"),
        ("unexpected", "['name']"),
    }
    assert found["missing", "['opt']['counter']"].suggestion == "['opt']['count']"
    assert found["unexpected", "['opt']['count']"].suggestion == "['opt']['counter']"
    assert found["missing", "['entirely-else']"].suggestion == ""
    assert found["missing", "['entirely-else']"].in_like == "float32[7]"
    assert found["unexpected", "['name']"].on_disk == "string"


def struct(shape: tuple[int, ...], dtype: Any) -> Any:
    return cast("Any", jax).ShapeDtypeStruct(shape, dtype)


@pytest.mark.parametrize(
    ("kind", "wrong"),
    [
        ("shape", np.zeros((3, 2), np.float32)),
        ("shape", struct((2, 3, 1), np.float32)),
        ("dtype", np.zeros((2, 3), np.float16)),
        ("dtype", struct((2, 3), np.int32)),
        ("type", None),
        ("type", "text"),
        ("type", str),
    ],
    ids=["shape-numpy", "shape-struct", "dtype-numpy", "dtype-struct", "none", "string", "string-type"],
)
async def test_a_leaf_that_does_not_fit_is_listed(rig: Rig, kind: str, wrong: object) -> None:
    await saved(rig)

    found = await differences(rig, {**TREE, "opt": {"mu": wrong, "count": 3}})

    assert set(found) == {(kind, "['opt']['mu']")}
    difference = found[kind, "['opt']['mu']"]
    assert "float32[2,3]" in difference.on_disk
    assert difference.in_like


async def test_every_difference_is_listed_at_once(rig: Rig) -> None:
    await saved(rig)

    found = await differences(
        rig, {"opt": {"mu": np.zeros(1, np.float32), "count": "x"}, "params": [jnp.ones(4), None], "extra": 1}
    )

    assert set(found) == {
        ("shape", "['opt']['mu']"),
        ("type", "['opt']['count']"),
        ("type", "['params'][1]"),
        ("missing", "['extra']"),
        ("unexpected", "['name']"),
    }


class Empty(NamedTuple):
    pass


async def test_empties_on_disk_that_the_target_does_not_know_are_no_difference(rig: Rig) -> None:
    await saved(rig, {"a": 1, "e": {}, "n": None})

    assert [leaf.info.name for leaf in await planned(rig, {"a": int})] == ["a"]


async def test_empties_of_the_target_that_are_not_on_disk_are_a_difference(rig: Rig) -> None:
    await saved(rig, {"a": 1})

    assert set(await differences(rig, {"a": int, "n": None, "e": Empty()})) == {
        ("missing", "['n']"),
        ("missing", "['e']"),
    }


async def test_a_target_type_that_nobody_handles_is_an_error(rig: Rig) -> None:
    await saved(rig)

    with pytest.raises(NoHandlerError) as raised:
        await planned(rig, {**TREE, "name": object()})

    assert raised.value.key_path == "['name']"


async def test_a_stored_type_that_nobody_handles_is_an_error(rig: Rig) -> None:
    registry = rig.registry
    rig.registry = with_parcels(registry, ParcelHandler())
    await saved(rig, {"p": Parcel("text")})
    rig.registry = registry

    with pytest.raises(NoHandlerError, match="parcel"):
        await planned(rig)


async def test_a_third_party_is_told_where_its_files_are(rig: Rig) -> None:
    rig.registry = with_parcels(rig.registry, ParcelHandler())
    await saved(rig, {"p": Parcel("text")})

    (leaf,) = await planned(rig, {"p": Parcel})

    assert leaf.info.directory == str(rig.final)
    assert leaf.reads == ()


async def test_a_third_party_is_told_the_directory_of_the_item_that_holds_its_leaf(rig: Rig) -> None:
    # A step as Orbax lays it out: the tree lies in an item of it.
    rig.registry = with_parcels(rig.registry, ParcelHandler())
    path = await saved(rig, {"p": Parcel("text")})
    shutil.move(path, rig.root / "item")
    path.mkdir()
    shutil.move(rig.root / "item", path / "default")

    (leaf,) = await planned(rig, {"p": Parcel})

    assert leaf.info.directory == str(path / "default")


@pytest.mark.parametrize("value", [3, np.ones(3), "text", None], ids=repr)
async def test_a_third_partys_target_for_a_leaf_of_another_type_is_a_difference(
    rig: Rig, value: object
) -> None:
    rig.registry = with_parcels(rig.registry, ParcelHandler())
    await saved(rig, {"p": value})

    assert set(await differences(rig, {"p": Parcel("")})) == {("type", "['p']")}


async def test_a_third_partys_leaf_for_a_target_of_another_type_is_a_difference(rig: Rig) -> None:
    rig.registry = with_parcels(rig.registry, ParcelHandler())
    await saved(rig, {"p": Parcel("text")})

    assert set(await differences(rig, {"p": np.ones(3)})) == {("type", "['p']")}


async def test_a_handler_that_fails_fails_the_plan(rig: Rig) -> None:
    await saved(rig)
    error = rig.scripted(np.ndarray).fail("target", "opt.mu")

    with pytest.raises(ArithmeticError) as raised:
        await planned(rig)

    assert raised.value is error


@pytest.mark.parametrize("native", [False, True], ids=["scope", "task"])
async def test_planning_is_cancelled_when_the_handler_that_hangs_returns(rig: Rig, native: bool) -> None:
    await saved(rig)
    hang = rig.scripted(np.ndarray).hang("target", "opt.mu")

    await cancel_in(hang, lambda: planned(rig), native=native)


async def test_suggestions_are_bounded_for_a_wholly_different_tree(rig: Rig) -> None:
    await saved(rig, {f"name{at:03}": None if at > 60 else at for at in range(70)})

    found = await differences(rig, {f"nam{at:03}": at for at in range(60)})

    assert len(found) == 60 + 61
    assert sum(bool(each.suggestion) for each in found.values()) == 80

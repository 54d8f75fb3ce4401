"""Saves with a base: leaves that have not changed since the base are not written again."""

from __future__ import annotations

import errno
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from penstock import Checkpointer, SaveArgs, SaveFormat, SaveFuture
from penstock.config import Config
from penstock.embedding import BaseIfWhole
from penstock.errors import NotACheckpointError, SpecError, StorageError
from penstock.handlers import Composite, LocalStore, OrbaxLayout
from penstock.kernel import Milestone, StoreWrapper, Written
from penstock.stages.reuse.incremental import files_worth_linking
from penstock.testing import FaultyStore

pytestmark = pytest.mark.anyio

AssertSame = Callable[[Any, Any], None]
N = 20
EACH = 4000


def state() -> dict[str, Any]:
    return {f"a{at:02}": jnp.full(EACH // 4, at, jnp.float32) for at in range(N)}


@pytest.fixture
def store() -> Iterator[FaultyStore]:
    store = FaultyStore(LocalStore())
    yield store
    assert store.open_files == 0


BasedOn = Callable[[Path], Any]


@pytest.fixture(params=[Path, BaseIfWhole], ids=["before staging", "after staging"])
def based_on(request: pytest.FixtureRequest) -> BasedOn:
    """Bases as callers name them, and those that a save does without if need be: these are opened later."""
    make: type = request.param
    return lambda path: make(str(path))


def data_files(path: Path) -> set[int]:
    return {file.stat().st_ino for file in (path / "d").iterdir()}


@pytest.mark.filterwarnings("ignore:Sharding info not provided:UserWarning")
async def test_unchanged_arrays_are_linked_and_each_checkpoint_is_whole_by_itself(
    tmp_path: Path, based_on: BasedOn, assert_same: AssertSame
) -> None:
    first = state()
    second = {**first, "a03": first["a03"] + 1}
    async with Checkpointer() as checkpointer:
        before = await (await checkpointer.save(tmp_path / "1", first))
        after = await (await checkpointer.save(tmp_path / "2", second, base=based_on(tmp_path / "1")))

        assert (before.nbytes, before.nbytes_kept) == (N * EACH, 0)
        assert (after.nbytes, after.nbytes_kept) == (EACH, (N - 1) * EACH)
        assert after.n_leaves == N
        assert data_files(tmp_path / "1") & data_files(tmp_path / "2")
        assert_same(await checkpointer.restore(tmp_path / "2", like=second), second)

        shutil.rmtree(tmp_path / "1")
        assert_same(await checkpointer.restore(tmp_path / "2", like=second), second)

    restored = ocp.PyTreeCheckpointer().restore(tmp_path / "2")
    assert_same(jax.tree.map(np.asarray, restored), jax.tree.map(np.asarray, second))


async def test_leaves_in_one_chunk_in_several_and_in_pieces_are_linked_alike(
    tmp_path: Path, based_on: BasedOn, assert_same: AssertSame
) -> None:
    tree = {
        name: jnp.arange(n, dtype=jnp.float32) + n for name, n in (("a", 100), ("b", 6000), ("c", 900_000))
    }
    save_args = {"a": SaveArgs(), "b": SaveArgs(chunk_byte_size=8000), "c": SaveArgs()}
    # The last one is written in several pieces.
    config = Config.load(environ={}, arguments={"save": {"piece_bytes": 2**20}})
    async with Checkpointer(config=config) as ckpt:
        await (await ckpt.save(tmp_path / "1", tree, save_args=save_args))
        stored = OrbaxLayout().open(LocalStore(), str(tmp_path / "1"))
        assert [len(parts) for parts in stored.parts(range(3), range(3))] == [1, 3, 4]
        for others in ({}, {"more": jnp.zeros(5)}):  # the second time leaves have other places in the tree
            base, path = tmp_path / "1", tmp_path / f"2{len(others)}"
            both = {**others, **tree}
            asked = {**dict.fromkeys(others, SaveArgs()), **save_args}
            report = await (await ckpt.save(path, both, base=based_on(base), save_args=asked))

            assert report.nbytes_kept == sum(leaf.nbytes for leaf in tree.values())
            assert_same(await ckpt.restore(path, like=both), both)


async def test_leaves_of_items_are_linked_each_with_its_own_bytes(
    tmp_path: Path, based_on: BasedOn, assert_same: AssertSame
) -> None:
    items = {name: {"x": jnp.full(1000, at), "y": jnp.arange(1000) + at} for at, name in enumerate("ab")}
    changed = {**items, "a": {**items["a"], "x": jnp.zeros(1000)}}
    async with Checkpointer() as ckpt:
        await (await ckpt.save(tmp_path / "1", Composite(**items)))
        report = await (await ckpt.save(tmp_path / "2", Composite(**changed), base=based_on(tmp_path / "1")))

        assert (report.nbytes, report.nbytes_kept) == (4000, 12000)
        for name, tree in changed.items():
            assert_same(await ckpt.restore(tmp_path / "2", item=name, like=tree), tree)


async def test_the_base_survives_the_checkpoint_that_shares_its_files(
    tmp_path: Path, based_on: BasedOn, assert_same: AssertSame
) -> None:
    tree = state()
    async with Checkpointer() as checkpointer:
        await (await checkpointer.save(tmp_path / "1", tree))
        report = await (await checkpointer.save(tmp_path / "2", tree, base=based_on(tmp_path / "1")))
        assert (report.nbytes, report.nbytes_kept) == (0, N * EACH)

        shutil.rmtree(tmp_path / "2")
        assert_same(await checkpointer.restore(tmp_path / "1", like=tree), tree)


async def test_restored_arrays_count_as_those_of_the_checkpoint(
    tmp_path: Path, based_on: BasedOn, assert_same: AssertSame
) -> None:
    tree = {"frozen": jnp.arange(50_000.0), "tuned": jnp.ones(20_000)}
    async with Checkpointer() as checkpointer:
        await (await checkpointer.save(tmp_path / "1", tree))

    async with Checkpointer() as checkpointer:
        state = await checkpointer.restore(tmp_path / "1", like=tree)
        state["tuned"] = state["tuned"] + 1
        report = await (await checkpointer.save(tmp_path / "2", state, base=based_on(tmp_path / "1")))
        assert (report.nbytes, report.nbytes_kept) == (80_000, 200_000)
        assert_same(await checkpointer.restore(tmp_path / "2", like=state), state)

        cast = await checkpointer.restore(tmp_path / "1", dtype=jnp.bfloat16)
        report = await (await checkpointer.save(tmp_path / "3", cast, base=based_on(tmp_path / "1")))
        assert report.nbytes_kept == 0


async def test_equal_arrays_that_are_other_objects_are_written(tmp_path: Path) -> None:
    tree = state()
    async with Checkpointer() as checkpointer:
        await (await checkpointer.save(tmp_path / "1", tree))
        copies = jax.tree.map(jnp.copy, tree)
        report = await (await checkpointer.save(tmp_path / "2", copies, base=tmp_path / "1"))

    assert (report.nbytes, report.nbytes_kept) == (N * EACH, 0)


async def test_numpy_arrays_may_have_changed_and_are_written(tmp_path: Path, assert_same: AssertSame) -> None:
    tree: dict[str, Any] = {"a": np.zeros(1000), "b": jnp.zeros(1000)}
    async with Checkpointer() as checkpointer:
        await (await checkpointer.save(tmp_path / "1", tree))
        tree["a"][:] = 1
        report = await (await checkpointer.save(tmp_path / "2", tree, base=tmp_path / "1"))

        assert report.nbytes_kept in (0, 4000)
        assert_same(await checkpointer.restore(tmp_path / "2", like=tree), tree)


@pytest.mark.parametrize("convert", [np.asarray, jnp.asarray], ids=["numpy", "jax"])
async def test_leaves_of_other_processes_and_objects_are_linked_by_digest(
    tmp_path: Path, assert_same: AssertSame, convert: Callable[[Any], Any]
) -> None:
    tree = jax.tree.map(convert, state())
    async with Checkpointer() as checkpointer:
        await (await checkpointer.save(tmp_path / "1", tree, compare="digest"))

    second = jax.tree.map(lambda leaf: convert(np.array(leaf)), tree)
    second["a07"] = convert(np.array(second["a07"]) * 2)
    async with Checkpointer() as checkpointer:
        report = await (
            await checkpointer.save(tmp_path / "2", second, base=tmp_path / "1", compare="digest")
        )
        assert (report.nbytes, report.nbytes_kept) == (EACH, (N - 1) * EACH)

        third = await (await checkpointer.save(tmp_path / "3", second, base=tmp_path / "2", compare="digest"))
        assert third.nbytes == 0
        assert checkpointer.statistics().leased == 0
        shutil.rmtree(tmp_path / "1")
        shutil.rmtree(tmp_path / "2")
        assert_same(await checkpointer.restore(tmp_path / "3", like=second), second)


async def test_bytes_of_another_dtype_shape_or_place_are_not_taken_for_the_same(
    tmp_path: Path, assert_same: AssertSame
) -> None:
    async with Checkpointer() as checkpointer:
        first = {"a": np.zeros(8, np.int32), "b": np.zeros((2, 4), np.int32), "c": np.ones(8, np.int32)}
        await (await checkpointer.save(tmp_path / "1", first, compare="digest"))
        second = {"a": np.zeros(8, np.float32), "b": np.zeros((4, 2), np.int32), "d": np.ones(8, np.int32)}
        report = await (
            await checkpointer.save(tmp_path / "2", second, base=tmp_path / "1", compare="digest")
        )

        assert report.nbytes_kept == 0
        assert_same(await checkpointer.restore(tmp_path / "2", like=second), second)


async def test_files_of_which_little_is_needed_are_not_linked(tmp_path: Path, based_on: BasedOn) -> None:
    tree = state()
    async with Checkpointer() as checkpointer:
        await (await checkpointer.save(tmp_path / "1", tree))
        second = {key: leaf if key < "a05" else leaf + 1 for key, leaf in tree.items()}
        report = await (await checkpointer.save(tmp_path / "2", second, base=based_on(tmp_path / "1")))

    assert (report.nbytes, report.nbytes_kept) == (N * EACH, 0)
    assert not data_files(tmp_path / "1") & data_files(tmp_path / "2")


async def test_a_base_that_was_replaced_meanwhile_is_not_trusted(
    tmp_path: Path, based_on: BasedOn, assert_same: AssertSame
) -> None:
    tree = state()
    async with Checkpointer() as checkpointer:
        await (await checkpointer.save(tmp_path / "1", tree))
        async with Checkpointer() as other:
            changed = jax.tree.map(lambda leaf: leaf + 1, tree)
            await (await other.save(tmp_path / "1", changed, overwrite=True))

        report = await (await checkpointer.save(tmp_path / "2", tree, base=based_on(tmp_path / "1")))
        assert report.nbytes_kept == 0
        assert_same(await checkpointer.restore(tmp_path / "2", like=tree), tree)


async def test_a_checkpoint_may_be_overwritten_on_its_own_base(
    tmp_path: Path, based_on: BasedOn, assert_same: AssertSame
) -> None:
    tree = state()
    async with Checkpointer() as checkpointer:
        await (await checkpointer.save(tmp_path / "1", tree))
        tree["a00"] = tree["a00"] + 1
        report = await (
            await checkpointer.save(tmp_path / "1", tree, base=based_on(tmp_path / "1"), overwrite=True)
        )
        assert report.nbytes == EACH
        assert_same(await checkpointer.restore(tmp_path / "1", like=tree), tree)


async def test_what_cannot_be_linked_is_written_and_told(
    tmp_path: Path,
    based_on: BasedOn,
    store: FaultyStore,
    assert_same: AssertSame,
    caplog: pytest.LogCaptureFixture,
) -> None:
    tree = state()
    async with Checkpointer(store=store) as checkpointer:
        await (await checkpointer.save(tmp_path / "1", tree))
        store.fail_on("share", 1, StorageError("share", "x", "another device", errno.EXDEV))
        with caplog.at_level(logging.WARNING):
            report = await (await checkpointer.save(tmp_path / "2", tree, base=based_on(tmp_path / "1")))

        assert (report.nbytes, report.nbytes_kept) == (N * EACH, 0)
        assert "save.not_linked" in caplog.text
        assert_same(await checkpointer.restore(tmp_path / "2", like=tree), tree)


async def test_a_save_that_fails_after_linking_leaves_the_base_alone(
    tmp_path: Path, based_on: BasedOn, store: FaultyStore, assert_same: AssertSame
) -> None:
    tree = state()
    async with Checkpointer(store=store) as checkpointer:
        await (await checkpointer.save(tmp_path / "1", tree))
        store.fail_on("publish", 2, StorageError("publish", "x", "no", errno.EIO))
        with pytest.raises(StorageError):
            await (await checkpointer.save(tmp_path / "2", tree, base=based_on(tmp_path / "1")))

        assert os.listdir(tmp_path) == ["1"]
        assert_same(await checkpointer.restore(tmp_path / "1", like=tree), tree)


async def test_a_base_written_by_orbax_has_no_checksums_and_is_written_anew(
    tmp_path: Path, assert_same: AssertSame
) -> None:
    tree = state()
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_compression=False)) as orbax:
        orbax.save(tmp_path / "1", ocp.args.PyTreeSave(tree))

    async with Checkpointer() as checkpointer:
        report = await (await checkpointer.save(tmp_path / "2", tree, base=tmp_path / "1", compare="digest"))
        assert report.nbytes_kept == 0
        assert_same(await checkpointer.restore(tmp_path / "2", like=tree), tree)


async def test_a_base_that_is_not_there_and_a_comparison_that_is_none(tmp_path: Path) -> None:
    async with Checkpointer() as checkpointer:
        with pytest.raises(NotACheckpointError):
            await (await checkpointer.save(tmp_path / "2", state(), base=tmp_path / "1"))

        wrong: Any = "size"
        with pytest.raises(SpecError, match="'identity' or 'digest', not 'size'"):
            await checkpointer.save(tmp_path / "2", state(), compare=wrong)

    assert os.listdir(tmp_path) == []


async def test_digests_are_of_leaves_whatever_pieces_they_are_written_in(tmp_path: Path) -> None:
    value = np.random.default_rng(0).integers(0, 256, 300_000, np.uint8)
    async with Checkpointer(memory_limit=100_000) as checkpointer:
        await (await checkpointer.save(tmp_path / "1", {"a": value}, compare="digest"))
    async with Checkpointer() as checkpointer:
        await (await checkpointer.save(tmp_path / "2", {"a": value}, compare="digest"))

    found = [OrbaxLayout().open(LocalStore(), str(tmp_path / name)).digests for name in "12"]
    assert found[0] == found[1]
    assert len(found[0]["a"]) == 32


async def test_a_base_is_not_looked_at_if_no_object_is_saved_again(tmp_path: Path) -> None:
    store = LocalStore()
    async with Checkpointer() as checkpointer:
        await (await checkpointer.save(tmp_path / "1", state()))
        held = store.hold(str(tmp_path / "1"))  # as a deletion does
        report = await (await checkpointer.save(tmp_path / "2", state(), base=tmp_path / "1"))
        held.release()

    assert (report.nbytes, report.nbytes_kept) == (N * EACH, 0)


async def test_a_base_is_not_looked_at_for_what_is_encoded_there(tmp_path: Path, store: FaultyStore) -> None:
    noise = jnp.asarray(np.random.default_rng(0).integers(0, 256, 300_000, np.uint8))
    encoded = {"zeros": jnp.zeros(300_000)}
    async with Checkpointer(store=store, save_format=SaveFormat(codec="auto")) as checkpointer:
        await (await checkpointer.save(tmp_path / "1", {**encoded, "noise": noise}))
        before = len(store.operations)
        report = await (await checkpointer.save(tmp_path / "2", encoded, base=tmp_path / "1"))
        looked = [each.path for each in store.operations[before:] if each.name.startswith(("read", "open"))]
        after = await (await checkpointer.save(tmp_path / "3", {"noise": noise}, base=tmp_path / "1"))

    assert 0 < report.nbytes < 300_000
    assert not [path for path in looked if path.startswith(str(tmp_path / "1"))]
    assert after.nbytes_kept == 300_000


# A base that is opened after staging


async def test_a_save_is_staged_before_its_base_is_opened(
    tmp_path: Path, store: FaultyStore, assert_same: AssertSame
) -> None:
    tree = {**state(), "large": jnp.arange(300_000), "other": np.arange(10)}
    async with Checkpointer(store=store) as checkpointer:
        await (await checkpointer.save(tmp_path / "1", tree))
        hang = store.hang_on("file.read_at", 1 + [one.name for one in store.operations].count("file.read_at"))
        save = await checkpointer.save(tmp_path / "2", tree, base=BaseIfWhole(str(tmp_path / "1")))
        await hang.wait_reached()
        assert save.milestone is Milestone.STAGED
        hang.release()
        report = await save

        assert (report.nbytes, report.nbytes_kept) == (80, N * EACH + 1_200_000)
        assert_same(await checkpointer.restore(tmp_path / "2", like=tree), tree)


async def test_leaves_that_staging_copies_are_looked_for_before(tmp_path: Path, store: FaultyStore) -> None:
    tree, cast = {"large": jnp.arange(300_000.0)}, SaveArgs(dtype="float16")
    saves: list[SaveFuture] = []
    async with Checkpointer(store=store) as checkpointer, anyio.create_task_group() as tasks:
        await (await checkpointer.save(tmp_path / "1", tree, save_args=cast))
        hang = store.hang_on("file.read_at", 1 + [one.name for one in store.operations].count("file.read_at"))

        async def save() -> None:
            base = BaseIfWhole(str(tmp_path / "1"))
            saves.append(await checkpointer.save(tmp_path / "2", tree, save_args=cast, base=base))

        tasks.start_soon(save)
        await hang.wait_reached()
        assert not saves
        hang.release()

    assert saves[0].result().nbytes_kept == 600_000


@pytest.mark.parametrize("damage", ["gone", "damaged"])
async def test_a_save_goes_without_a_base_that_is_not_whole(
    tmp_path: Path, assert_same: AssertSame, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    tree, base = state(), tmp_path / "1"
    async with Checkpointer() as checkpointer:
        await (await checkpointer.save(base, tree))
        if damage == "gone":
            shutil.rmtree(base)
        else:
            (base / "manifest.ocdbt").write_bytes(b"damaged")
        report = await (await checkpointer.save(tmp_path / "2", tree, base=BaseIfWhole(str(base))))
        assert_same(await checkpointer.restore(tmp_path / "2", like=tree), tree)

    told = [record for record in caplog.records if "save.not_linked" in record.getMessage()]
    assert (report.nbytes, report.nbytes_kept) == (N * EACH, 0)
    assert len(told) == (damage == "damaged")


async def test_what_is_staged_may_hold_all_memory_while_a_base_is_compared(
    tmp_path: Path, assert_same: AssertSame
) -> None:
    tree = {"a": np.ones(200_000), "kept": jnp.arange(1_000_000), "z": np.ones(200_000)}
    async with Checkpointer(memory_limit=2**20) as checkpointer:
        await (await checkpointer.save(tmp_path / "1", tree))
        base = BaseIfWhole(str(tmp_path / "1"))
        report = await (await checkpointer.save(tmp_path / "2", tree, base=base))
        assert report.nbytes_kept == 4_000_000
        assert_same(await checkpointer.restore(tmp_path / "2", like=tree), tree)


async def test_what_fits_only_if_it_is_linked_is_looked_for_before(tmp_path: Path) -> None:
    tree = state()
    store = Room(N * EACH)
    async with Checkpointer(store=store) as checkpointer:
        await (await checkpointer.save(tmp_path / "1", tree))
        store.free = EACH
        report = await (await checkpointer.save(tmp_path / "2", tree, base=BaseIfWhole(str(tmp_path / "1"))))

    assert report.nbytes_kept == N * EACH


class Room(StoreWrapper):
    """The local store, with as much room as a test says."""

    def __init__(self, free: int) -> None:
        super().__init__(LocalStore())
        self.free = free

    def free_bytes(self, path: str) -> int | None:
        return self.free


# Which files are worth linking


def part(leaf: int, file: str, nbytes: int) -> Written:
    return Written(leaf, (0,), 0, file, 0, nbytes, 0)


def test_a_file_is_linked_from_half_of_its_bytes_on() -> None:
    assert files_worth_linking([[part(0, "a", 50)], [part(1, "b", 49)]], {"a": 100, "b": 100}) == {"a"}


def test_a_leaf_whose_other_file_is_not_linked_needs_nothing_of_this_one() -> None:
    leaves = [[part(0, "a", 60), part(0, "b", 10)], [part(1, "a", 20)]]

    assert files_worth_linking(leaves, {"a": 100, "b": 100}) == set()
    assert files_worth_linking([*leaves, [part(2, "b", 40)]], {"a": 100, "b": 100}) == {"a", "b"}


def test_a_save_without_an_unchanged_leaf_links_nothing() -> None:
    assert files_worth_linking([], {}) == set()
    assert files_worth_linking([[]], {}) == set()


@pytest.mark.thinned(2)
@pytest.mark.parametrize(
    ("at", "nth"), [("identity", 1), ("read_file", 1), ("share", 1), ("share", 9), ("identity", 2)]
)
@pytest.mark.parametrize("compare", ["identity", "digest"])
async def test_a_base_that_is_overwritten_meanwhile_gives_nothing(
    tmp_path: Path, store: FaultyStore, assert_same: AssertSame, at: str, nth: int, compare: Any
) -> None:
    tree, base = state(), tmp_path / "base"
    layout = OrbaxLayout(SaveFormat(ocdbt=False))  # the files of a leaf have the same names in each save
    async with Checkpointer(store=store, layout=layout) as checkpointer:
        await (await checkpointer.save(base, tree, compare="digest", base=None))
        seen = [operation.name for operation in store.operations].count(at)
        hang = store.hang_on(at, seen + nth)

        async def overwrite() -> None:
            await hang.wait_reached()
            others = {name: leaf + 1 for name, leaf in tree.items()}
            async with Checkpointer(layout=layout) as other:
                await (await other.save(base, others, overwrite=True, compare="digest"))
            hang.release()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(overwrite)
            save = await checkpointer.save(tmp_path / "new", tree, base=base, compare=compare)
            report = await save
            assert (report.nbytes, report.nbytes_kept) == (N * EACH, 0)

        assert_same(await checkpointer.restore(tmp_path / "new", like=tree), tree)
        assert sorted(os.listdir(tmp_path)) == ["base", "new"]


async def test_a_base_that_becomes_another_kind_of_checkpoint_meanwhile_fails_no_save(
    tmp_path: Path, store: FaultyStore, assert_same: AssertSame
) -> None:
    """What is read of it then does not fit together, which says nothing of the base that is there now."""
    tree, base = state(), tmp_path / "base"
    directories = OrbaxLayout(SaveFormat(ocdbt=False))
    async with Checkpointer(layout=directories) as other:
        await (await other.save(base, tree))
    async with Checkpointer(store=store, layout=directories) as checkpointer:
        hang = store.hang_on("read_file", 2)

        async def overwrite() -> None:
            await hang.wait_reached()
            async with Checkpointer() as other:
                await (await other.save(base, tree, overwrite=True))
            hang.release()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(overwrite)
            save = await checkpointer.save(tmp_path / "new", tree, base=base, compare="digest")
            assert (await save).nbytes_kept == 0

        assert_same(await checkpointer.restore(tmp_path / "new", like=tree), tree)


async def test_what_is_linked_is_synced_once_unless_the_store_has_synced_it(
    tmp_path: Path, based_on: BasedOn, store: FaultyStore
) -> None:
    tree = state()
    async with Checkpointer(store=store) as checkpointer:
        await (await checkpointer.save(tmp_path / "1", tree))
        await (await checkpointer.save(tmp_path / "2", tree, base=based_on(tmp_path / "1")))

    names = [operation.name for operation in store.operations]
    assert names.count("sync_file") == names.count("share") > 0
    shared = names.index("share")
    assert names[shared : shared + 2] == ["share", "sync_file"]


async def test_a_linked_file_that_cannot_be_synced_fails_the_save(
    tmp_path: Path, based_on: BasedOn, store: FaultyStore
) -> None:
    tree = state()
    async with Checkpointer(store=store) as checkpointer:
        await (await checkpointer.save(tmp_path / "1", tree))
        store.fail_on("sync_file")
        with pytest.raises(StorageError, match="injected"):
            await (await checkpointer.save(tmp_path / "2", tree, base=based_on(tmp_path / "1")))

    assert os.listdir(tmp_path) == ["1"]


def flip(file: Path, at: int) -> None:
    """Flip a bit in place, as a medium does: every link shows it."""
    with file.open("r+b") as data:
        data.seek(at)
        byte = data.read(1)
        data.seek(at)
        data.write(bytes([byte[0] ^ 1]))


def only_data_file(path: Path) -> Path:
    """The one with the arrays; the other one is the index."""
    return max((path / "d").iterdir(), key=lambda file: file.stat().st_size)


def damage_told(log: pytest.LogCaptureFixture) -> list[Any]:
    return [
        record.__dict__["penstock"] for record in log.records if "save.base_damaged" in record.getMessage()
    ]


@pytest.mark.parametrize("compare", ["identity", "digest"])
async def test_a_bit_that_flips_in_the_base_is_not_linked_but_written_from_memory(
    tmp_path: Path, based_on: BasedOn, assert_same: AssertSame, caplog: pytest.LogCaptureFixture, compare: Any
) -> None:
    tree = state()
    async with Checkpointer() as checkpointer:
        await (await checkpointer.save(tmp_path / "1", tree, compare=compare))
        flip(only_data_file(tmp_path / "1"), 5 * EACH + 7)
        report = await (
            await checkpointer.save(tmp_path / "2", tree, base=based_on(tmp_path / "1"), compare=compare)
        )
        third = await (
            await checkpointer.save(tmp_path / "3", tree, base=based_on(tmp_path / "2"), compare=compare)
        )

        assert (report.nbytes, report.nbytes_kept) == (EACH, (N - 1) * EACH)
        assert (third.nbytes, third.nbytes_kept) == (0, N * EACH)
        for step in ("2", "3"):
            assert_same(await checkpointer.restore(tmp_path / step, like=tree), tree)
            assert (await checkpointer.verify(tmp_path / step)).status == "intact"

    (told,) = damage_told(caplog)
    assert told["key_path"] == "['a05']"
    assert told["path"] == str(tmp_path / "2")
    assert (told["offset"], told["nbytes"]) == (5 * EACH, EACH)


async def test_a_base_that_cannot_be_read_is_not_linked(
    tmp_path: Path,
    based_on: BasedOn,
    assert_same: AssertSame,
    store: FaultyStore,
    caplog: pytest.LogCaptureFixture,
) -> None:
    tree = state()
    async with Checkpointer(store=store) as checkpointer:
        await (await checkpointer.save(tmp_path / "1", tree))
        store.fail_on("file.read_at", 2 + [one.name for one in store.operations].count("file.read_at"))
        report = await (await checkpointer.save(tmp_path / "2", tree, base=based_on(tmp_path / "1")))
        assert (report.nbytes, report.nbytes_kept) == (EACH, (N - 1) * EACH)
        assert_same(await checkpointer.restore(tmp_path / "2", like=tree), tree)

    assert len(damage_told(caplog)) == 1


async def test_comparing_bytes_can_be_turned_off(tmp_path: Path) -> None:
    tree = state()
    async with Checkpointer(config=Config().changed({"save": {"compare_linked_every": 0}})) as checkpointer:
        await (await checkpointer.save(tmp_path / "1", tree))
        flip(only_data_file(tmp_path / "1"), 7)
        report = await (await checkpointer.save(tmp_path / "2", tree, base=tmp_path / "1"))
        assert report.nbytes_kept == N * EACH
        assert (await checkpointer.verify(tmp_path / "2")).status == "damaged"


async def test_a_flipped_bit_in_a_large_base_is_found_within_as_many_saves_as_asked(
    tmp_path: Path, based_on: BasedOn
) -> None:
    tree = {f"a{at}": jnp.full(2**20, at, jnp.float32) for at in range(12)}  # 48 MiB
    config = Config().changed({"save": {"compare_linked_every": 3}})
    async with Checkpointer(config=config) as checkpointer:
        await (await checkpointer.save(tmp_path / "0", tree))
        flip(only_data_file(tmp_path / "0"), 30 * 2**20)
        written: list[int] = []
        for step in range(1, 4):
            report = await (
                await checkpointer.save(tmp_path / str(step), tree, base=based_on(tmp_path / str(step - 1)))
            )
            written.append(report.nbytes)
            shutil.rmtree(tmp_path / str(step - 1))

        assert sorted(written) == [0, 0, 4 * 2**20]
        assert (await checkpointer.verify(tmp_path / "3")).status == "intact"


async def test_a_save_that_is_cancelled_while_it_compares_leaves_nothing(
    tmp_path: Path, store: FaultyStore
) -> None:
    tree = state()
    async with Checkpointer(store=store) as checkpointer:
        await (await checkpointer.save(tmp_path / "1", tree))
        hang = store.hang_on("file.read_at", 2 + [one.name for one in store.operations].count("file.read_at"))
        async with anyio.create_task_group() as tasks:

            async def save() -> None:
                await (await checkpointer.save(tmp_path / "2", tree, base=tmp_path / "1"))

            tasks.start_soon(save)
            await hang.wait_reached()
            tasks.cancel_scope.cancel()
            hang.release()

        assert checkpointer.statistics().leased == 0
    assert [path.name for path in tmp_path.iterdir()] == ["1"]

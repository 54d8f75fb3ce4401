"""What works with a store that has only the required methods, and which errors name the missing ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from penstock import Checkpointer, SaveFormat
from penstock.errors import StorageError, UnsupportedByStoreError
from penstock.handlers import SafetensorsLayout, default_handlers
from penstock.kernel import Placement, Store, StoreWrapper
from penstock.steps import CheckpointManager, KeepLast
from penstock.testing import FaultyStore, MemoryStore

AssertSame = Callable[[Any, Any], None]

pytestmark = pytest.mark.anyio

ROOT = "/run"
PATH = "/run/1"


@pytest.fixture
def store() -> FaultyStore:
    inner = MemoryStore()
    inner.make_directory(ROOT)
    return FaultyStore(inner)


def state(step: int = 1) -> dict[str, Any]:
    return {"w": jnp.arange(50_000.0) * step, "b": np.full(3, step), "name": "run", "step": step}


async def test_a_tree_is_saved_described_verified_and_restored(
    store: FaultyStore, assert_same: AssertSame
) -> None:
    async with Checkpointer(store=store) as checkpointer:
        report = await (await checkpointer.save(PATH, state()))
        assert report.n_leaves == 4
        assert_same(await checkpointer.restore(PATH, like=state(2)), state())
        assert_same(await checkpointer.restore(PATH), state())
        assert len((await checkpointer.metadata(PATH)).leaves) == 4
        assert checkpointer.statistics().leased == 0

    assert store.open_files == 0
    assert list(store.list_directory(ROOT)) == ["1"]


async def test_a_single_file_is_published_without_a_rename(
    store: FaultyStore, assert_same: AssertSame
) -> None:
    tree = {"w": np.arange(1000.0), "b": np.ones(3)}
    async with Checkpointer(store=store, layout=SafetensorsLayout()) as checkpointer:
        await (await checkpointer.save("/run/model.safetensors", tree))
        assert store.kind("/run/model.safetensors") == "file"
        assert_same(await checkpointer.restore("/run/model.safetensors", like=tree), tree)


async def test_replacing_is_refused_before_a_byte_is_written(
    store: FaultyStore, assert_same: AssertSame
) -> None:
    async with Checkpointer(store=store) as checkpointer:
        await (await checkpointer.save(PATH, state()))
        before = len(store.operations)
        with pytest.raises(UnsupportedByStoreError, match=r"cannot replace '/run/1'.*Directories") as caught:
            await (await checkpointer.save(PATH, state(2), overwrite=True))

        assert (caught.value.path, caught.value.capability) == (PATH, "Directories")
        assert not {"begin_build", "write_file", "discard"} & {
            operation.name for operation in store.operations[before:]
        }
        assert_same(await checkpointer.restore(PATH), state())


async def test_two_saves_to_one_path_never_build_at_once(store: FaultyStore) -> None:
    hang = store.hang_on("publish")
    async with Checkpointer(store=store) as first, Checkpointer(store=store) as second:
        save = await first.save(PATH, state())
        await hang.wait_reached()
        with pytest.raises(StorageError, match="another save is building there"):
            await (await second.save(PATH, state(2)))

        hang.release()
        await save
        assert (await second.restore(PATH))["step"] == 1


async def test_unchanged_leaves_are_copied_by_the_store(store: FaultyStore, assert_same: AssertSame) -> None:
    tree = {"a": np.arange(100_000), "b": np.ones(100_000)}
    async with Checkpointer(store=store) as checkpointer:
        await (await checkpointer.save("/run/1", tree))
        report = await (await checkpointer.save("/run/2", tree, base="/run/1", compare="digest"))
        assert report.nbytes + report.nbytes_kept == 1_600_000
        await (await checkpointer.save("/run/3", tree, base="/run/2", compare="digest"))
        store.remove_tree("/run/2")
        assert_same(await checkpointer.restore("/run/3"), tree)

    assert "share" in {operation.name for operation in store.operations}


async def test_mapping_is_refused(store: FaultyStore) -> None:
    async with Checkpointer(store=store) as checkpointer:
        await (await checkpointer.save(PATH, state()))
        with pytest.raises(UnsupportedByStoreError, match="SharedFiles"):
            await checkpointer.restore(PATH, mmap=True)


async def test_chunks_with_a_codec_are_read_through_the_store(
    store: FaultyStore, assert_same: AssertSame
) -> None:
    tree = {"a": np.zeros(100_000)}
    async with Checkpointer(store=store, save_format=SaveFormat(codec="zstd")) as checkpointer:
        await (await checkpointer.save(PATH, tree))
        assert_same(await checkpointer.restore(PATH), tree)


class _Note:
    def __init__(self, text: str) -> None:
        self.text = text


class _NoteHandler:
    """Writes its own files, by paths of the operating system."""

    def typestr(self) -> str:
        return "tests.Note"

    async def serialize(self, values: Sequence[Any], infos: Sequence[Any], args: Any = None) -> Any:
        pytest.fail("the store is not where it would write")

    async def deserialize(self, infos: Sequence[Any], args: Any = None) -> Any:
        return [_Note("") for _ in infos]

    async def metadata(self, infos: Sequence[Any]) -> Any:
        return [None for _ in infos]

    def memory_size(self, values: Sequence[Any]) -> Sequence[tuple[int, int]]:
        return [(1, 1) for _ in values]

    def finalize(self, directory: str) -> None: ...


async def test_handlers_that_write_files_are_refused(store: FaultyStore) -> None:
    registry = default_handlers(entry_points=False)
    registry.register(_Note, _NoteHandler())
    async with Checkpointer(store=store, registry=registry) as checkpointer:
        with pytest.raises(UnsupportedByStoreError, match="SystemFiles"):
            await (await checkpointer.save(PATH, {"note": _Note("text"), "a": np.ones(3)}))

    assert list(store.list_directory(ROOT)) == []


async def test_steps_are_kept_and_deleted_and_not_moved(store: FaultyStore) -> None:
    async with CheckpointManager(ROOT, keep=KeepLast(1), store=store) as manager:
        for step in (1, 2):
            save = await manager.save(step, state(step))
            assert save is not None
            await save

        await manager.wait()
        assert list(manager.all_steps()) == [2]
        assert (await manager.restore())["step"] == 2

    assert "1" not in store.list_directory(ROOT)
    with pytest.raises(UnsupportedByStoreError, match="Directories"):
        async with CheckpointManager(ROOT, store=store, trash="trash"):
            pass


class ShortFiles(StoreWrapper):
    @property
    def placement(self) -> Placement:
        return Placement(file_bytes=100_000)


async def test_data_files_are_as_large_as_the_store_prefers() -> None:
    sizes: dict[int | None, list[int]] = {}
    store: Store = MemoryStore()
    store.make_directory(ROOT)
    for file_bytes in (None, 100_000):
        if file_bytes is not None:
            store = ShortFiles(store)

        async with Checkpointer(store=store) as checkpointer:
            tree = [np.full(10_000, n) for n in range(8)]
            await (await checkpointer.save(f"/run/{file_bytes}", tree))
            folder = f"/run/{file_bytes}/d"
            found = [store.size(f"{folder}/{name}") for name in store.list_directory(folder)]
            sizes[file_bytes] = [size for size in found if size >= 80_000]

    assert len(sizes[None]) == 1
    assert len(sizes[100_000]) == 4


async def test_a_store_in_memory_takes_urls_for_paths(assert_same: AssertSame) -> None:
    store = MemoryStore()
    async with Checkpointer(store=store) as checkpointer:
        await (await checkpointer.save("s3://bucket/run/1", state()))
        assert_same(await checkpointer.restore("s3://bucket/run/1", like=state(2)), state())

    assert store.kind("s3://bucket/run/1") == "directory"

"""safetensors in a bucket in memory: one file, a folder of one, and one of several."""

from __future__ import annotations

from collections.abc import Callable
from threading import Event
from typing import Any, cast

import anyio
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from tests.handlers.stores.buckets.bucket_rig import URL, Bucket, Interposed, bucket_of_every_url

import penstock
from penstock import Checkpointer
from penstock.errors import InUseError, SaveCancelledError, StorageError
from penstock.handlers import SafetensorsLayout
from penstock.handlers.stores.buckets import BucketStore
from penstock.testing import FaultyStore

AssertSame = Callable[[Any, Any], None]

pytestmark = pytest.mark.anyio

FORMS = {
    "file": (SafetensorsLayout(), f"{URL}/run/model.safetensors"),
    "folder": (SafetensorsLayout(), f"{URL}/run/model"),
    "folder of several files": (SafetensorsLayout(max_shard_bytes=300_000), f"{URL}/run/model"),
}
FILE_BYTES = 2**16
"""So short that most files here are long ones."""


@pytest.fixture
def bucket() -> Bucket:
    return Bucket()


@pytest.fixture(params=FORMS)
def form(request: pytest.FixtureRequest) -> tuple[SafetensorsLayout, str]:
    found: tuple[SafetensorsLayout, str] = FORMS[request.param]
    return found


def state(step: int = 1) -> dict[str, Any]:
    mesh = Mesh(np.array(jax.devices()), ("x",))
    columns = NamedSharding(mesh, PartitionSpec(None, "x"))  # type: ignore[no-untyped-call]
    return {
        "columns": jax.device_put(jnp.arange(60_000.0).reshape(100, 600) * step, columns),
        "w": np.arange(50_000, dtype=np.int64) * step,
        "small": [np.full(3, at, np.int8) for at in range(20)],
        "name": "run",
    }


async def test_a_tree_is_saved_verified_restored_and_deleted(
    bucket: Bucket, form: tuple[SafetensorsLayout, str], assert_same: AssertSame
) -> None:
    layout, path = form
    store = FaultyStore(bucket.store(FILE_BYTES))
    async with Checkpointer(store=store, layout=layout) as checkpointer:
        await (await checkpointer.save(path, state(2)))
        await (await checkpointer.save(path, state(), overwrite="delete-first"))
        assert_same(await checkpointer.restore(path, like=state(3)), state())
        found = await checkpointer.verify(path)
        assert found.intact
        assert found.checkpoints == (path,)
        assert found.n_leaves == 23
        assert len((await checkpointer.metadata(path)).leaves) == 23
        assert checkpointer.statistics().leased == 0

    assert not [key for key in bucket.objects_there() if "penstock-saving" in key]
    assert store.open_files == 0
    await penstock.delete(path, store=bucket.store())
    assert bucket.objects_there() == []


async def test_the_library_of_safetensors_reads_it(bucket: Bucket) -> None:
    load = pytest.importorskip("safetensors.numpy").load
    async with Checkpointer(store=bucket.store(FILE_BYTES), layout=SafetensorsLayout()) as checkpointer:
        await (await checkpointer.save(f"{URL}/a.safetensors", state()))

    found = load(bucket.store().read_file(f"{URL}/a.safetensors"))
    assert np.array_equal(found["columns"], state()["columns"])


async def test_a_checkpoint_is_converted_into_a_bucket_and_back(
    monkeypatch: pytest.MonkeyPatch, assert_same: AssertSame, tmp_path: Any
) -> None:
    bucket = bucket_of_every_url(monkeypatch)
    await penstock.save(f"{URL}/orbax", state())
    await penstock.convert(f"{URL}/orbax", f"{URL}/a.safetensors")
    await penstock.convert(f"{URL}/a.safetensors", f"{URL}/folder", format="safetensors")
    await penstock.convert(f"{URL}/folder", tmp_path / "back")
    assert_same(await penstock.restore(tmp_path / "back", like=state(2)), state())
    await penstock.export_safetensors({"w": np.ones(3)}, f"{URL}/b.safetensors")
    assert (await penstock.restore(f"{URL}/b.safetensors"))["w"].tolist() == [1, 1, 1]
    assert bucket.client().head("a.safetensors") is not None


@pytest.mark.parametrize("operation", ["create_long_file", "data.write_at", "data.sync", "publish"])
async def test_a_save_that_fails_leaves_nothing(
    bucket: Bucket, form: tuple[SafetensorsLayout, str], operation: str
) -> None:
    layout, path = form
    store = FaultyStore(bucket.store(FILE_BYTES))
    store.fail_on(operation, 1, StorageError(operation, path, "refused"))
    async with Checkpointer(store=store, layout=layout) as checkpointer:
        with pytest.raises(StorageError, match="refused"):
            await (await checkpointer.save(path, state()))

    assert store.open_files == 0
    assert bucket.objects_there() == []


async def test_a_cancelled_save_leaves_nothing(bucket: Bucket, form: tuple[SafetensorsLayout, str]) -> None:
    layout, path = form
    store = FaultyStore(bucket.store(FILE_BYTES))
    hang = store.hang_on("data.sync")
    async with Checkpointer(store=store, layout=layout) as checkpointer:
        save = await checkpointer.save(path, state())
        await hang.wait_reached()
        assert [key for key in bucket.objects_there() if "penstock-saving.d" in key], "it has put something"
        save.cancel()
        hang.release()
        with pytest.raises(SaveCancelledError):
            await save

    assert bucket.objects_there() == []


async def test_a_save_that_is_cancelled_stops_in_the_middle_of_an_upload(bucket: Bucket) -> None:
    reached, go_on = Event(), Event()
    asked = Interposed(bucket.client())

    def read(method: Callable[..., Any], *args: Any) -> Any:
        reached.set()
        go_on.wait(30)
        return method(*args)

    asked.instead["read_range"] = read
    store = BucketStore(URL, lambda _: None, file_bytes=FILE_BYTES, objects=cast("Any", asked))
    async with Checkpointer(store=store, layout=SafetensorsLayout()) as checkpointer:
        save = await checkpointer.save(f"{URL}/a.safetensors", state())
        await anyio.to_thread.run_sync(reached.wait, 30)
        save.cancel()
        await anyio.wait_all_tasks_blocked()
        go_on.set()
        with pytest.raises(SaveCancelledError):
            await save

    assert [name for name, _ in asked.calls].count("read_range") == 1
    assert bucket.objects_there() == []


async def test_the_next_save_takes_over_from_one_that_was_killed(
    bucket: Bucket, form: tuple[SafetensorsLayout, str], assert_same: AssertSame
) -> None:
    layout, path = form
    key = path.removeprefix(f"{URL}/")
    killed = bucket.store(FILE_BYTES)
    token = killed.begin_build(path, f"{path}.tmp", layout.file_of(path))
    file = killed.create_long_file(f"{token.place}/model.safetensors", 2**20)
    file.write_at(0, [memoryview(bytes(2**19))])
    async with Checkpointer(store=bucket.store(FILE_BYTES), layout=layout) as checkpointer:
        with pytest.raises(InUseError):
            await (await checkpointer.save(path, state()))

        bucket.end_owner(f"{key}.penstock-saving")
        await (await checkpointer.save(path, state()))
        file.write_at(2**19, [memoryview(bytes(2**19))])  # it was only stopped, and wakes
        with pytest.raises(StorageError, match="nothing is there"):  # what it had put was removed
            file.sync()
        with pytest.raises(StorageError, match="is there already"):
            killed.publish(token)

        assert_same(await checkpointer.restore(path, like=state(2)), state())

"""A save, a restore, a manager, a race and a failure: what `make test` runs on SeaweedFS, too."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from anyio import create_task_group
from tests.cloud.fault_proxy import fault_proxy
from tests.cloud.servers import ENDPOINTS, Server

import penstock
from penstock import RestoreReport
from penstock.errors import InUseError, StorageError
from penstock.handlers import SafetensorsLayout
from penstock.handlers.stores.buckets import BucketStore
from penstock.steps import CheckpointManager, KeepLast

AssertSame = Callable[[Any, Any], None]

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(240)]


def state(step: int = 1) -> dict[str, Any]:
    return {"w": np.arange(500_000.0) * step, "small": [np.full(3, at) for at in range(20)], "step": step}


async def test_a_tree_is_saved_restored_and_deleted(environ: Server, assert_same: AssertSame) -> None:
    path = f"{environ.url()}/run/7"
    await penstock.save(path, state())
    assert_same(await penstock.restore(path, like=state(2)), state())
    assert (await penstock.verify(path)).intact
    await penstock.save(path, state(2), overwrite="delete-first")
    assert (await penstock.restore(path))["step"] == 2
    await penstock.delete(path)
    assert environ.bucket_store().kind(path) is None


async def test_safetensors_are_uploaded_in_parts(environ: Server, assert_same: AssertSame) -> None:
    path = f"{environ.url()}/model.safetensors"
    store = BucketStore(environ.bucket, environ.connect(), file_bytes=2**20)
    weights = {"w": np.arange(1_000_000.0), "small": np.ones(3)}
    async with penstock.Checkpointer(store=store, layout=SafetensorsLayout()) as checkpointer:
        await (await checkpointer.save(path, weights))

    assert_same(await penstock.restore(path, like=weights), weights)
    assert (await penstock.verify(path)).intact
    assert list(store.list_directory(path.rpartition("/")[0])) == ["model.safetensors"]


async def test_steps_are_kept_and_deleted(environ: Server) -> None:
    root = f"{environ.url()}/run"
    async with CheckpointManager(root, keep=KeepLast(2)) as manager:
        for step in (1, 2, 3):
            save = await manager.save(step, {"step": step})
            assert save is not None
            await save

        await manager.wait()
        assert list(manager.all_steps()) == [2, 3]

    async with CheckpointManager(root, read_only=True) as reader:
        assert (await reader.restore())["step"] == 3


def test_of_four_savers_of_one_path_one_wins(environ: Server) -> None:
    url = environ.url()

    def save(number: int) -> str:
        store = environ.bucket_store()
        try:
            token = store.begin_build(f"{url}/7", f"{url}/7.tmp")
        except StorageError as error:
            return type(error).__name__ if isinstance(error, InUseError) else str(error.errno)

        for name in ("a", "b"):
            store.write_file(f"{token.place}/{name}", str(number).encode())

        store.publish(token)
        return "won"

    with ThreadPoolExecutor(4) as pool:
        ended = list(pool.map(save, range(4)))

    assert ended.count("won") == 1, ended
    store = environ.bucket_store()
    found = {store.read_file(f"{url}/7/{name}") for name in ("a", "b")}
    assert found == {str(ended.index("won")).encode()}


async def test_one_503_and_one_lost_reply_are_survived(
    environ: Server, monkeypatch: pytest.MonkeyPatch, assert_same: AssertSame
) -> None:
    path = f"{environ.url()}/7"
    with fault_proxy(environ.endpoint) as proxy:
        monkeypatch.setenv(ENDPOINTS[environ.scheme], environ.path_to(proxy.endpoint))
        proxy.fail("^PUT .*/d/", "refuse")
        proxy.fail("^PUT .*commit_success", "lost_reply")
        await penstock.save(path, state())
        assert sorted(proxy.fired()) == ["lost_reply", "refuse"]
        assert_same(await penstock.restore(path), state())


async def test_503_for_two_seconds_fails_no_save_and_no_restore(
    environ: Server, monkeypatch: pytest.MonkeyPatch, assert_same: AssertSame
) -> None:
    url = environ.url()
    await penstock.save(f"{url}/there", state())
    with fault_proxy(environ.endpoint) as proxy:
        monkeypatch.setenv(ENDPOINTS[environ.scheme], environ.path_to(proxy.endpoint))
        proxy.fail_for(2.0, ".", "refuse")
        reports: list[RestoreReport] = []

        async def restore() -> None:
            assert_same(await penstock.restore(f"{url}/there", on_report=reports.append), state())

        async def save(number: int) -> None:
            await penstock.save(f"{url}/{number}", state(number))

        async with create_task_group() as tasks:
            for number in range(4):
                tasks.start_soon(restore)
                tasks.start_soon(save, number)

        assert proxy.fired()
        assert all(report.requests is not None and report.requests.n_refused for report in reports)

        for number in range(4):
            assert_same(await penstock.restore(f"{url}/{number}"), state(number))

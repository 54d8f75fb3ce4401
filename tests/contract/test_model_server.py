"""The example server, on a socket: it swaps checkpoints in while a client sends requests, and none fails."""

from __future__ import annotations

import sys
from pathlib import Path

import anyio
import httpx
import numpy as np
import pytest
from tests.proofs.serving import load_example, serving, summary, swap_under_load

import penstock

# uvicorn runs on asyncio alone.
pytestmark = [pytest.mark.anyio, pytest.mark.parametrize("anyio_backend", ["asyncio"])]

N_SWAPS = 3
WEIGHTS = {"w": np.ones((4, 2), np.float32), "b": np.zeros(2, np.float32)}


@pytest.mark.timeout(120)
async def test_a_server_swaps_checkpoints_in_and_no_request_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # So large that a restore takes long enough to meet requests.
    clients = await swap_under_load(tmp_path, n_swaps=N_SWAPS, n_quiet=50, n_ballast=4_000_000, limit="8MiB")

    for client in clients:
        assert client.steps == sorted(client.steps)
        assert set(client.steps) == set(range(1, 2 + N_SWAPS))

    quiet = [took for client in clients for took in client.quiet]
    busy = [took for client in clients for took in client.swapping]
    assert busy, "no request met a swap"
    with capsys.disabled():
        sys.stdout.write(f"\nwithout a swap {summary(quiet)}, during one {summary(busy)}\n")


async def test_a_damaged_checkpoint_leaves_the_weights_in_service(tmp_path: Path) -> None:
    root = tmp_path / "run"
    await penstock.save(root / "1", WEIGHTS)
    await penstock.save(tmp_path / "2", WEIGHTS)
    for data in (tmp_path / "2").glob("d/*"):
        data.write_bytes(b"")

    server = load_example().ModelServer(root, interval_s=0.01)
    async with serving(server.app) as url, httpx.AsyncClient(base_url=url) as client:
        (tmp_path / "2").rename(root / "2")
        while not server.failures:
            await anyio.sleep(0.005)

        assert (await client.get("/step")).json() == {"step": 1}
        assert (await client.post("/predict", json={"x": [0.0] * 4})).status_code == 200
        await penstock.save(root / "3", WEIGHTS)
        while server.step != 3:
            await anyio.sleep(0.005)

    assert len(server.failures) == 1


async def test_a_damaged_checkpoint_at_the_start_is_tried_once(tmp_path: Path) -> None:
    await penstock.save(tmp_path / "1", WEIGHTS)
    for data in (tmp_path / "1").glob("d/*"):
        data.write_bytes(b"")

    server = load_example().ModelServer(tmp_path, interval_s=0.01)
    async with serving(server.app) as url, httpx.AsyncClient(base_url=url) as client:
        assert (await client.post("/predict", json={"x": [0.0] * 4})).status_code == 503
        await penstock.save(tmp_path / "2", WEIGHTS)
        while server.step != 2:
            await anyio.sleep(0.005)

    assert len(server.failures) == 1


async def test_a_server_answers_503_until_the_first_checkpoint_is_saved(tmp_path: Path) -> None:
    server = load_example().ModelServer(tmp_path / "later", interval_s=0.01)
    async with serving(server.app) as url, httpx.AsyncClient(base_url=url) as client:
        assert (await client.post("/predict", json={"x": [0.0] * 4})).status_code == 503
        await penstock.save(tmp_path / "later" / "0", WEIGHTS)
        while server.step != 0:
            await anyio.sleep(0.005)


async def test_a_step_that_is_read_is_not_deleted_by_the_trainer(tmp_path: Path) -> None:
    async with penstock.CheckpointManager(tmp_path, keep=penstock.steps.KeepLast(1)) as trainer:
        await trainer.save(1, WEIGHTS)
        await trainer.wait()
        server = load_example().ModelServer(tmp_path, interval_s=0.01)
        async with serving(server.app):
            for step in range(2, 8):
                await trainer.save(step, {**WEIGHTS, "ballast": np.full(300_000, step, np.float32)})

            await trainer.wait()
            while server.step != 7:
                await anyio.sleep(0.005)

    assert server.failures == []

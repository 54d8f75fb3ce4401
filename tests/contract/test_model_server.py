"""The example server, on a socket: it swaps checkpoints in while a client sends requests, and none fails."""

from __future__ import annotations

import sys
import time
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import anyio
import httpx
import numpy as np
import pytest
import uvicorn

import penstock

# uvicorn runs on asyncio alone.
pytestmark = [pytest.mark.anyio, pytest.mark.parametrize("anyio_backend", ["asyncio"])]

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "model_server.py"
N_SWAPS = 3
N_QUIET = 50  # requests between two swaps
N_BALLAST = 4_000_000  # float32 numbers: a restore takes long enough to meet requests


def load_example() -> Any:
    spec = spec_from_file_location("model_server", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["model_server"] = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def weights(step: int) -> dict[str, Any]:
    """Weights by which every prediction for x is sum(x) * step + step."""
    return {
        "w": np.full((4, 2), step, np.float32),
        "b": np.full(2, step, np.float32),
        "ballast": np.full(N_BALLAST, step, np.float32),
    }


@contextmanager
def no_signal_handlers(self: uvicorn.Server) -> Generator[None]:
    """Leave signals to pytest."""
    yield


class QuietServer(uvicorn.Server):
    """uvicorn in a test's loop."""

    capture_signals = no_signal_handlers


@asynccontextmanager
async def serving(app: Any) -> AsyncGenerator[str]:
    """Serve on a free port of loopback; yield the address."""
    # To configure logging would close the handlers of others, and with absl's the stream it writes to.
    server = QuietServer(uvicorn.Config(app, port=0, log_config=None, lifespan="on", ws="none"))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(server.serve)
        while not server.started:
            await anyio.sleep(0.005)

        port = server.servers[0].sockets[0].getsockname()[1]
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            server.should_exit = True


PRECEDENCE = ("a swap", "a save", "nothing")


class Client:
    """Sends requests one after another, and keeps how long each took, by what went on meanwhile."""

    saving = False  #: whether the test saves, which a server would not do

    def __init__(self, url: str, server: Any) -> None:
        self.url = url
        self.server = server
        self.steps: list[int] = []
        self.seconds: dict[str, list[float]] = {"nothing": [], "a swap": [], "a save": []}

    def meanwhile(self) -> str:
        if self.server.swapping:
            return "a swap"

        return "a save" if Client.saving else "nothing"

    async def send(self) -> None:
        async with httpx.AsyncClient(base_url=self.url, timeout=30.0) as client:
            while True:
                since, before = time.perf_counter(), self.meanwhile()
                response = await client.post("/predict", json={"x": [1.0, 2.0, 3.0, 4.0]})
                self.seconds[min(before, self.meanwhile(), key=PRECEDENCE.index)].append(
                    time.perf_counter() - since
                )
                assert response.status_code == 200, response.text
                answer = response.json()
                assert answer["y"] == [11.0 * answer["step"]] * 2, "one set of weights, never a mixture"
                self.steps.append(answer["step"])


def p99_ms(seconds: list[float]) -> float:
    return float(np.percentile(seconds, 99)) * 1e3 if seconds else float("nan")


@pytest.mark.timeout(120)
async def test_it_swaps_checkpoints_in_and_no_request_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    await penstock.save(tmp_path / "1", weights(1))
    server = load_example().ModelServer(tmp_path, memory_limit="8MiB", poll_s=0.01)
    clients: list[Client] = []
    async with serving(server.app) as url, anyio.create_task_group() as tasks:
        clients += [Client(url, server) for _ in range(2)]
        for client in clients:
            tasks.start_soon(client.send)

        for step in range(2, 2 + N_SWAPS):
            before = len(clients[0].steps)
            while len(clients[0].steps) < before + N_QUIET:
                await anyio.sleep(0.005)

            Client.saving = True
            await penstock.save(tmp_path / str(step), weights(step))
            Client.saving = False
            while any(client.steps[-1:] != [step] for client in clients):
                await anyio.sleep(0.005)

        tasks.cancel_scope.cancel()

    assert server.failures == []
    for client in clients:
        assert client.steps == sorted(client.steps)
        assert set(client.steps) == set(range(1, 2 + N_SWAPS))
    quiet, busy = (clients[0].seconds[what] + clients[1].seconds[what] for what in ("nothing", "a swap"))
    assert busy, "no request met a swap"
    with capsys.disabled():
        sys.stdout.write(
            f"\np99 of a request: {p99_ms(quiet):.1f} ms without a swap ({len(quiet)} requests), "
            f"{p99_ms(busy):.1f} ms during one ({len(busy)})\n"
        )


async def test_a_damaged_checkpoint_leaves_the_weights_in_service(tmp_path: Path) -> None:
    await penstock.save(tmp_path / "1", {"w": np.ones((4, 2), np.float32), "b": np.zeros(2, np.float32)})
    server = load_example().ModelServer(tmp_path, poll_s=0.01)
    async with serving(server.app) as url, httpx.AsyncClient(base_url=url) as client:
        (tmp_path / "2").mkdir()
        (tmp_path / "2" / "junk").write_text("no checkpoint")
        while not server.failures:
            await anyio.sleep(0.005)

        assert (await client.get("/step")).json() == {"step": 1}
        assert (await client.post("/predict", json={"x": [0.0] * 4})).status_code == 200


async def test_before_the_first_checkpoint_it_says_so(tmp_path: Path) -> None:
    server = load_example().ModelServer(tmp_path / "later", poll_s=0.01)
    async with serving(server.app) as url, httpx.AsyncClient(base_url=url) as client:
        assert (await client.post("/predict", json={"x": [0.0] * 4})).status_code == 503

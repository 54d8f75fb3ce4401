"""What a request to the example's model server waits while a checkpoint is swapped in. `make server`.

Clients on loopback send requests one after another; what is told is the median and the 99th percentile of
the time to the answer, without a swap and during one. Each checkpoint is saved beforehand and put in
place by a rename, so that nothing but the server's own restore is beside the requests.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import anyio
import httpx
import numpy as np
import uvicorn

import penstock

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "model_server.py"
N_CLIENTS = 2
LOOK_S = 0.005


def load_example() -> Any:
    """The module of the example."""
    spec = spec_from_file_location("model_server", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["model_server"] = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def weights(step: int, n_ballast: int) -> dict[str, Any]:
    """Weights by which every prediction for x is sum(x) * step + step, and so many numbers beside them."""
    return {
        "w": np.full((4, 2), step, np.float32),
        "b": np.full(2, step, np.float32),
        "ballast": np.full(n_ballast, step, np.float32),
    }


@contextmanager
def no_signal_handlers(self: uvicorn.Server) -> Generator[None]:
    """Leave signals to whoever runs this."""
    yield


class QuietServer(uvicorn.Server):
    """uvicorn in a loop that has more to do."""

    capture_signals = no_signal_handlers


@asynccontextmanager
async def serving(app: Any) -> AsyncGenerator[str]:
    """Serve on a free port of loopback; yield the address."""
    # To configure logging would close the handlers of others, and with absl's the stream it writes to.
    server = QuietServer(uvicorn.Config(app, port=0, log_config=None, lifespan="on", ws="none"))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(server.serve)
        while not server.started:
            await anyio.sleep(LOOK_S)

        port = server.servers[0].sockets[0].getsockname()[1]
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            server.should_exit = True


class Client:
    """Sends requests one after another, and keeps how long each took, by whether a swap went on meanwhile."""

    def __init__(self, url: str, server: Any) -> None:
        self.url = url
        self.server = server
        self.steps: list[int] = []
        self.quiet: list[float] = []
        self.swapping: list[float] = []

    async def send(self) -> None:
        """Send for ever. A request that fails is an error."""
        async with httpx.AsyncClient(base_url=self.url, timeout=30.0) as client:
            while True:
                since, before = time.perf_counter(), self.server.swapping
                response = await client.post("/predict", json={"x": [1.0, 2.0, 3.0, 4.0]})
                took = time.perf_counter() - since
                (self.swapping if before or self.server.swapping else self.quiet).append(took)
                assert response.status_code == 200, response.text
                answer = response.json()
                assert answer["y"] == [11.0 * answer["step"]] * 2, "one set of weights, never a mixture"
                self.steps.append(answer["step"])


async def swap_under_load(
    folder: Path, *, n_swaps: int, n_quiet: int, n_ballast: int, limit: str
) -> list[Client]:
    """Serve step 1, and swap in so many more, each after so many requests; return what the clients saw."""
    for step in range(1, n_swaps + 2):
        await penstock.save(folder / "made" / str(step), weights(step, n_ballast))

    root = folder / "run"
    root.mkdir()
    (folder / "made" / "1").rename(root / "1")
    server = load_example().ModelServer(root, memory_limit=limit, interval_s=0.01)
    clients: list[Client] = []
    async with serving(server.app) as url, anyio.create_task_group() as tasks:
        clients += [Client(url, server) for _ in range(N_CLIENTS)]
        for client in clients:
            tasks.start_soon(client.send)

        for step in range(2, n_swaps + 2):
            before = len(clients[0].steps)
            while len(clients[0].steps) < before + n_quiet:
                await anyio.sleep(LOOK_S)

            (folder / "made" / str(step)).rename(root / str(step))
            while any(client.steps[-1:] != [step] for client in clients):
                await anyio.sleep(LOOK_S)

        tasks.cancel_scope.cancel()

    assert server.failures == []
    return clients


def summary(seconds: list[float]) -> dict[str, Any]:
    """Milliseconds, and how many requests they are of."""
    median, p99 = (round(float(np.percentile(seconds, q)) * 1e3, 1) for q in (50, 99))
    return {"requests": len(seconds), "median_ms": median, "p99_ms": p99}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--mib", type=int, default=256, help="size of a checkpoint")
    parser.add_argument("--swaps", type=int, default=8)
    parser.add_argument("--limit", default="32MiB", help="memory budget of the server's restores")
    arguments = parser.parse_args()
    n_ballast = arguments.mib * 2**18
    folder = Path(tempfile.mkdtemp())
    try:
        clients = anyio.run(
            lambda: swap_under_load(
                folder, n_swaps=arguments.swaps, n_quiet=300, n_ballast=n_ballast, limit=arguments.limit
            )
        )
    finally:
        shutil.rmtree(folder)

    quiet = [took for client in clients for took in client.quiet]
    busy = [took for client in clients for took in client.swapping]
    found = {"mib": arguments.mib, "without_a_swap": summary(quiet), "during_a_swap": summary(busy)}
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()

"""Serves a model, and swaps in each new checkpoint of it while requests go on.

    uvicorn --factory model_server:from_environment     # CHECKPOINTS=run/steps

The directory holds one checkpoint a step, named by its number; a training process writes them. What is
there is looked at every `poll_s` seconds: a directory under its own name is a finished checkpoint, for
penstock publishes by a rename. A restore runs beside the requests under a memory budget and gives the
event loop up between all its parts; the new weights replace the old ones in one assignment, so a request
sees one set or the other, whole.
"""

from __future__ import annotations

__all__ = ("ModelServer", "from_environment")

import contextlib
import os
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import anyio
import numpy as np
from anyio import to_thread
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

import penstock


class ModelServer:
    """The application, and the weights that it serves.

    Args:
        directory: Where checkpoints appear, each in a directory named by its step.
        memory_limit: Host bytes that restoring may hold beyond the weights themselves.
        poll_s: Seconds between two looks at the directory.
    """

    def __init__(self, directory: Path, *, memory_limit: int | str = "64MiB", poll_s: float = 1.0) -> None:
        self.step = -1  #: of the weights that are served; -1 before the first
        self.swapping = False  #: whether a restore is under way
        self.failures: list[Exception] = []  #: of restores; the weights before stay in service
        self._weights: Any = None
        self._directory = directory
        self._memory_limit = memory_limit
        self._poll_s = poll_s
        self._tried = -1
        self.app = Starlette(
            routes=[Route("/predict", self._predict, methods=["POST"]), Route("/step", self._say_step)],
            lifespan=self._lifespan,
        )

    @contextlib.asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncGenerator[None]:
        async with (
            penstock.Checkpointer(memory_limit=self._memory_limit) as checkpointer,
            anyio.create_task_group() as tasks,
        ):
            await self._swap(checkpointer)  # no request comes before the first weights, if there are any
            tasks.start_soon(self._watch, checkpointer)
            yield
            tasks.cancel_scope.cancel()  # a restore that is under way gives back all it holds

    async def _watch(self, checkpointer: penstock.Checkpointer) -> None:
        while True:
            await anyio.sleep(self._poll_s)
            await self._swap(checkpointer)

    async def _swap(self, checkpointer: penstock.Checkpointer) -> None:
        newest = await to_thread.run_sync(_newest_step, self._directory)
        if newest <= self._tried:
            return

        self._tried, self.swapping = newest, True
        try:
            restored = await checkpointer.restore(self._directory / str(newest))
        except penstock.PenstockError as error:
            self.failures.append(error)  # damaged, or removed meanwhile: what is served stays
        else:
            self.step, self._weights = newest, restored
        finally:
            self.swapping = False

    async def _predict(self, request: Request) -> JSONResponse:
        step, weights = self.step, self._weights  # one set, whatever is swapped in meanwhile
        if weights is None:
            return JSONResponse({"error": "no checkpoint yet"}, status_code=503)

        x = np.asarray((await request.json())["x"], np.float32)
        y = x @ weights["w"] + weights["b"]
        return JSONResponse({"step": step, "y": y.tolist()})

    async def _say_step(self, _: Request) -> JSONResponse:
        return JSONResponse({"step": self.step})


def _newest_step(directory: Path) -> int:
    names = os.listdir(directory) if directory.is_dir() else []
    return max((int(name) for name in names if name.isdigit()), default=-1)


def from_environment() -> Starlette:
    """Return the application for the directory that `CHECKPOINTS` names."""
    return ModelServer(Path(os.environ["CHECKPOINTS"])).app
